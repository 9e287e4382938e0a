# SPDX-License-Identifier: Apache-2.0
"""A hand-written contender: all-gather, then reduce-scatter.

Every rank receives all tokens and takes those of its experts. In combine each
rank first sums, for every token, the outputs of its own experts, and then the
ranks add these sums. That moves P rows per token instead of K, in regular
blocks.
"""

from __future__ import annotations

from jax import lax
import jax.numpy as jnp

from benchmarks.padded import scale, take, take_sum
from benchmarks.workload import AXIS, Layout


class Gathered:
  exact = False

  def __init__(self, layout: Layout):
    self._layout = layout

  def prepare(self, topk_idx):
    layout = self._layout
    all_idx = lax.all_gather(topk_idx, AXIS, tiled=True)  # [P * T, K]
    local = all_idx.reshape(-1) - lax.axis_index(AXIS) * (
      layout.num_local_experts
    )
    mine = (local >= 0) & (local < layout.num_local_experts)
    # The order of the slots is by expert, then by token of all ranks.
    key = jnp.where(mine, local, layout.num_local_experts)
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    slots = jnp.arange(layout.capacity, dtype=jnp.int32)
    order = order[: layout.capacity]
    choice = jnp.where(slots < mine.sum(), order, mine.size)
    slot = jnp.full(mine.size, layout.capacity, jnp.int32)
    return {
      "choice": choice,  # [C], indices into the choices of all ranks
      "slot": slot.at[choice].set(slots, mode="drop").reshape(all_idx.shape),
    }

  def dispatch(self, handle, tokens, topk_weights):
    weights = lax.all_gather(topk_weights, AXIS, tiled=True).reshape(-1)
    weights = take(weights, handle["choice"], zeros=self._layout.zero_tail)
    return self.combine_bwd(handle, tokens), weights

  def combine(self, handle, rows, weights=None):
    total = take_sum(scale(rows, weights), handle["slot"], rows.dtype)
    return lax.psum_scatter(total, AXIS, tiled=True)

  def dispatch_bwd(self, handle, rows, row_weights):
    weights = take(row_weights, handle["slot"], zeros=True)
    weights = lax.psum_scatter(weights, AXIS, tiled=True)
    return self.combine(handle, rows), weights

  def combine_bwd(self, handle, tokens):
    tokens = lax.all_gather(tokens, AXIS, tiled=True)
    token = handle["choice"] // self._layout.shape.top_k
    return take(tokens, token, zeros=self._layout.zero_tail)
