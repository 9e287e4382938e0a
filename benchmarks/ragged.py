# SPDX-License-Identifier: Apache-2.0
"""A contender with `ep.lax.ragged_all_to_all`, which is JAX's but on CPUs.

It sends one slice for each expert, directly into the expert's slab.
"""

from __future__ import annotations

from jax import lax
import jax.numpy as jnp

from benchmarks.padded import scale, sort_choices, starts, take, take_sum
from benchmarks.workload import AXIS, Layout
import ep


class Ragged:
  exact = False

  def __init__(self, layout: Layout):
    self._layout = layout

  def prepare(self, topk_idx):
    layout = self._layout
    order, counts = sort_choices(topk_idx, layout.shape.num_experts)
    me = lax.axis_index(AXIS)
    # The arrays [source, destination, expert there] say where slabs begin on
    # the experts' ranks, and where runs begin in the sources' sorted choices.
    by_rank = counts.reshape(layout.ranks, layout.ranks, -1)
    slab = starts(by_rank.sum(0, dtype=jnp.int32), 1) + starts(by_rank, 0)
    run = starts(counts, 1).reshape(by_rank.shape)
    place = jnp.arange(order.size, dtype=jnp.int32)
    return {
      "order": order,
      "place": jnp.zeros_like(order).at[order].set(place),  # its inverse
      "sent": counts[me],
      "came": by_rank[:, me].reshape(-1),
      "run_here": run[me].reshape(-1),
      "slab_there": slab[me].reshape(-1),
      "slab_here": slab[:, me].reshape(-1),
      "run_there": run[:, me].reshape(-1),
    }

  def dispatch(self, handle, tokens, topk_weights):
    weights = topk_weights.reshape(-1)[handle["order"]]
    return self.combine_bwd(handle, tokens), self._to_slots(handle, weights)

  def combine(self, handle, rows, weights=None):
    home = self._to_home(handle, scale(rows, weights))
    place = handle["place"].reshape(-1, self._layout.shape.top_k)
    return take_sum(home, place, rows.dtype)

  def dispatch_bwd(self, handle, rows, row_weights):
    weights = take(
      self._to_home(handle, row_weights), handle["place"], zeros=True
    )
    weights = weights.reshape(-1, self._layout.shape.top_k)
    return self.combine(handle, rows), weights

  def combine_bwd(self, handle, tokens):
    token = handle["order"] // self._layout.shape.top_k
    return self._to_slots(handle, tokens[token])

  def _to_slots(self, handle, rows):
    return ep.lax.ragged_all_to_all(
      rows,
      jnp.zeros((self._layout.capacity, *rows.shape[1:]), rows.dtype),
      handle["run_here"],
      handle["sent"],
      handle["slab_there"],
      handle["came"],
      axis_name=AXIS,
    )

  def _to_home(self, handle, rows):
    # The rows of unused choices are zero here and stay zero.
    size = handle["order"].shape
    return ep.lax.ragged_all_to_all(
      rows,
      jnp.zeros((*size, *rows.shape[1:]), rows.dtype),
      handle["slab_here"],
      handle["came"],
      handle["run_there"],
      handle["sent"],
      axis_name=AXIS,
    )
