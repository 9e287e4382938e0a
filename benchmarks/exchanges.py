# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine, written by hand in JAX.

contenders.py specifies the methods. `prepare` computes all values that depend
only on the routing. Padding rows of a block have arbitrary values, because no
code reads them. The derivatives are gathers, because JAX would turn the
derivative of a gather into a scatter-add.
"""

from __future__ import annotations

import jax
from jax import lax
from jax.custom_derivatives import linear_call
import jax.numpy as jnp

from benchmarks.workload import AXIS, Layout


def sort_choices(topk_idx, num_experts):
  """Returns the choices sorted by expert `[T * K]`, and counts `[P, E]`.

  Choice `k` of token `t` has the number `t * K + k`. Unused choices are
  last. `counts[p, e]` is how often the tokens of rank `p` choose expert `e`.
  """
  experts = topk_idx.reshape(-1)
  experts = jnp.where(experts < 0, num_experts, experts)
  counts = jnp.zeros(num_experts, jnp.int32).at[experts].add(1, mode="drop")
  order = jnp.argsort(experts, stable=True).astype(jnp.int32)
  return order, lax.all_gather(counts, AXIS)


def starts(counts, axis):
  """Returns the start of each run, for adjacent runs of `counts` elements."""
  return jnp.cumsum(counts, axis) - counts


def take(rows, index, *, zeros):
  """Returns `rows[index]`; indices past the end give zeros or any rows."""
  if not zeros:
    return rows.at[index].get(mode="clip")
  return rows.at[index].get(mode="fill", fill_value=0)


def scale(rows, weights):
  """Returns the rows times their weights; without weights, the rows."""
  if weights is None:
    return rows
  return (rows.astype(jnp.float32) * weights[:, None]).astype(rows.dtype)


class _Exchange:
  """The methods of a contender, by the four exchanges of a subclass.

  `_to_ranks` sends tokens, `_sum_at_home` is its transpose, and
  `_weights_to_ranks` and `_weights_at_home` are a pair for routing weights.
  """

  def __init__(self, layout: Layout):
    self._layout = layout

  def dispatch(self, handle, tokens, topk_weights):
    def send(handle, args):
      tokens, weights = args
      weights = self._weights_to_ranks(handle, weights)
      return self._to_ranks(handle, tokens), weights

    def send_back(handle, args):
      rows, weights = args
      weights = self._weights_at_home(handle, weights)
      return self._sum_at_home(handle, rows), weights

    return linear_call(send, send_back, handle, (tokens, topk_weights))

  def combine(self, handle, rows, weights=None):
    rows = scale(rows, weights)
    return linear_call(self._sum_at_home, self._to_ranks, handle, rows)


class PaddedScatter(_Exchange):
  """An exchange by sort, padded all_to_all, and scatter-add in float32.

  A rank sorts its choices by expert, which groups them by destination rank.
  Each rank sends every rank a block of `S = pair_rows` rows: first the rows of
  choices, then padding. In prepare the ranks exchange the number of rows per
  expert. The receiver computes the slot of every received row from these
  counts.
  """

  def prepare(self, topk_idx):
    layout, shape = self._layout, self._layout.shape
    size = shape.tokens * shape.top_k
    order, counts = sort_choices(topk_idx, shape.num_experts)
    me = lax.axis_index(AXIS)
    # The axes are now [source rank, destination rank, local expert].
    counts = counts.reshape(layout.ranks, layout.ranks, -1)
    place = jnp.arange(layout.pair_rows, dtype=jnp.int32)  # row in a block

    sent = counts[me].sum(-1, dtype=jnp.int32)[:, None]
    choice = take(order, starts(sent, 0) + place, zeros=False)
    choice = jnp.where(place < sent, choice, size)

    came = counts[:, me]  # received rows, [source rank, local expert]
    by_expert = came.sum(0, dtype=jnp.int32)
    slab = starts(by_expert, 0) + starts(came, 0)  # start, [source, expert]
    ends = jnp.cumsum(came, 1)
    expert = jax.vmap(lambda ends: jnp.searchsorted(ends, place, side="right"))
    expert = expert(ends).clip(max=layout.num_local_experts - 1)
    first = slab - starts(came, 1)
    slot = jnp.take_along_axis(first, expert, 1) + place
    slot = jnp.where(place < ends[:, -1:], slot, layout.capacity)

    places = jnp.arange(choice.size, dtype=jnp.int32).reshape(choice.shape)
    source = jnp.full(layout.capacity, choice.size, jnp.int32)
    home = jnp.full(size, choice.size, jnp.int32)
    return {
      # The choices to send and the slots of received rows, both [P, S].
      "choice": choice,
      "slot": slot,
      # The block row, an index in P * S, of each slot [C] and choice [T, K].
      "source": source.at[slot].set(places, mode="drop"),
      "home": home.at[choice].set(places, mode="drop").reshape(topk_idx.shape),
    }

  def _to_ranks(self, handle, tokens):
    token = handle["choice"] // self._layout.shape.top_k
    return self._to_slots(handle, take(tokens, token, zeros=False))

  def _weights_to_ranks(self, handle, weights):
    weights = take(weights.reshape(-1), handle["choice"], zeros=False)
    return self._to_slots(handle, weights)

  def _sum_at_home(self, handle, rows):
    shape = self._layout.shape
    token = handle["choice"] // shape.top_k
    blocks = self._to_home(handle, rows).astype(jnp.float32)
    total = jnp.zeros((shape.tokens, shape.hidden), jnp.float32)
    return total.at[token].add(blocks, mode="drop").astype(rows.dtype)

  def _weights_at_home(self, handle, weights):
    weights = self._to_home(handle, weights).reshape(-1)
    return take(weights, handle["home"], zeros=True)

  def _to_slots(self, handle, blocks):
    blocks = lax.all_to_all(blocks, AXIS, 0, 0)
    rows = blocks.reshape(-1, *blocks.shape[2:])
    return take(rows, handle["source"], zeros=self._layout.zero_tail)

  def _to_home(self, handle, rows):
    return lax.all_to_all(take(rows, handle["slot"], zeros=False), AXIS, 0, 0)


class Gathered(_Exchange):
  """An exchange by all-gather in dispatch and reduce-scatter in combine.

  Every rank receives all tokens and selects the tokens of its experts. In
  combine each rank sums its experts' outputs per token, and a reduce-scatter
  adds the sums of all ranks. The ranks exchange P rows per token instead of K,
  in regular blocks.
  """

  def prepare(self, topk_idx):
    layout = self._layout
    all_idx = lax.all_gather(topk_idx, AXIS, tiled=True)  # [P * T, K]
    local = all_idx.reshape(-1) - lax.axis_index(AXIS) * (
      layout.num_local_experts
    )
    mine = (local >= 0) & (local < layout.num_local_experts)
    # Sort the choices of local experts by expert, then by global token.
    key = jnp.where(mine, local, layout.num_local_experts)
    order = jnp.argsort(key, stable=True).astype(jnp.int32)
    slots = jnp.arange(layout.capacity, dtype=jnp.int32)
    order = order[: layout.capacity]
    choice = jnp.where(slots < mine.sum(), order, mine.size)
    slot = jnp.full(mine.size, layout.capacity, jnp.int32)
    return {
      "choice": choice,  # [C], the choice of each slot, among all ranks
      "slot": slot.at[choice].set(slots, mode="drop").reshape(all_idx.shape),
    }

  def _to_ranks(self, handle, tokens):
    tokens = lax.all_gather(tokens, AXIS, tiled=True)
    token = handle["choice"] // self._layout.shape.top_k
    return take(tokens, token, zeros=self._layout.zero_tail)

  def _weights_to_ranks(self, handle, weights):
    weights = lax.all_gather(weights, AXIS, tiled=True).reshape(-1)
    return take(weights, handle["choice"], zeros=self._layout.zero_tail)

  def _sum_at_home(self, handle, rows):
    total = jnp.float32(0)
    for slot in handle["slot"].T:  # one of the K choices of all tokens
      total += take(rows, slot, zeros=True).astype(jnp.float32)
    return lax.psum_scatter(total.astype(rows.dtype), AXIS, tiled=True)

  def _weights_at_home(self, handle, weights):
    weights = take(weights, handle["slot"], zeros=True)
    return lax.psum_scatter(weights, AXIS, tiled=True)
