# SPDX-License-Identifier: Apache-2.0
"""The contenders that compute a whole MoE layer: exchange and experts.

Each contender has the method

  moe(topk_idx, tokens, topk_weights, w_gate, w_up, w_down) -> tokens

which takes one rank's arrays. `w_gate` and `w_up` are `[L, H, F]`, and `w_down`
is `[L, F, H]`. The result for a token x is the weighted sum over its choices of

  (silu(x @ w_gate[e]) * (x @ w_up[e])) @ w_down[e]

and it is differentiable in all arguments except `topk_idx`.
"""

from __future__ import annotations

import functools

import jax
from jax import lax
import jax.numpy as jnp

from benchmarks.exchanges import sort_choices
from benchmarks.workload import AXIS, Layout
import ep


def swiglu(gate, up):
  return jax.nn.silu(gate) * up


def group_sizes(layout: Layout, topk_idx):
  """Returns the number of rows per expert of this rank: `[L]`."""
  _, counts = sort_choices(topk_idx, layout.shape.num_experts)
  return counts.sum(0).reshape(layout.ranks, -1)[lax.axis_index(AXIS)]


class JaxExperts:
  """A layer that calls JAX between the ops of another contender.

  `sizes(handle, topk_idx)` returns the number of rows per expert of this rank.
  """

  def __init__(self, exchange, sizes):
    self._exchange = exchange
    self._sizes = sizes

  def moe(self, topk_idx, tokens, topk_weights, w_gate, w_up, w_down):
    handle = self._exchange.prepare(topk_idx)
    sizes = self._sizes(handle, topk_idx)
    dot = functools.partial(ep.grouped_matmul, group_sizes=sizes)
    rows, weights = self._exchange.dispatch(handle, tokens, topk_weights)
    rows = dot(swiglu(dot(rows, w_gate), dot(rows, w_up)), w_down)
    return self._exchange.combine(handle, rows, weights)


class OwnExperts:
  """Passes a function that computes the experts of `ep` to `moe_layer`."""

  def __init__(self, layer: ep.EpLayerConfig):
    self._layer = layer

  def moe(self, topk_idx, tokens, topk_weights, *matrices):
    def experts(segments, matrices, rows):
      w_gate, w_up, w_down = matrices

      @jax.checkpoint
      def down(gate, up):
        return segments.matmul(segments.map(swiglu, gate, up), w_down)

      return down(*segments.matmul(rows, [w_gate, w_up]))

    return ep.moe_layer(
      self._layer,
      tokens,
      topk_idx,
      topk_weights,
      experts=experts,
      params=matrices,
    )


class OneHot:
  """A layer that dispatches by a product with a one-hot array, as in GShard.

  Each rank has a block of `expert_rows` rows per expert (Lepikhin et al.,
  "GShard", arXiv 2006.16668, algorithm 1, whose groups are the ranks).
  """

  def __init__(self, layout: Layout):
    self._layout = layout

  def moe(self, topk_idx, tokens, topk_weights, w_gate, w_up, w_down):
    layout, shape = self._layout, self._layout.shape
    choices = jax.nn.one_hot(topk_idx, shape.num_experts, dtype=jnp.int32)
    chosen = choices.sum(1)  # [T, E]
    place = jnp.where(chosen, jnp.cumsum(chosen, 0) - 1, layout.expert_rows)
    dispatch = jax.nn.one_hot(place, layout.expert_rows, dtype=tokens.dtype)
    weights = jnp.einsum("tke,tk->te", choices, topk_weights)
    combine = dispatch * weights[..., None].astype(tokens.dtype)

    blocks = jnp.einsum("ter,th->erh", dispatch, tokens)
    by_rank = layout.ranks, layout.num_local_experts, *blocks.shape[1:]
    rows = lax.all_to_all(
      blocks.reshape(by_rank), AXIS, 0, 0
    )  # [P, L, rows, H]
    dot = functools.partial(jnp.einsum, "plrh,lhf->plrf")
    rows = dot(swiglu(dot(rows, w_gate), dot(rows, w_up)), w_down)
    rows = lax.all_to_all(rows, AXIS, 0, 0).reshape(blocks.shape)
    return jnp.einsum("ter,erh->th", combine, rows)
