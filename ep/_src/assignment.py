# SPDX-License-Identifier: Apache-2.0
"""Decides which choices get a row where not all can, before `ep_prepare`.

A choice gets a row if its expert has room: a free row in the last block of its
slab, or a block of `alignment` rows that its rank has not given away. Choices
are taken one after the other, and `drop_by` is the order; `reference.assign`
is that loop. Here nothing is sequential, because blocks are alike. However
choices are ordered, an expert keeps the first of its own, as many as fit into
its blocks; so it is enough to know how many blocks each expert gets, its
*quota*.

All ranks of a domain know all choices of the domain and compute the same, so
that the op is given choices that fit, whatever the backend. They share the
choices only if those do not fit; what they share always is how many choices
each expert has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from ep._src import primitive
from ep._src.backend import OpParams
from ep._src.config import LayerConfig


class Wanted(NamedTuple):
  """Counts what the choices of a domain want, before any is dropped or moved.

  Attributes:
    total: int32 [1], rows that this rank would receive with an unlimited
      capacity, padding included.
    largest: int32 [1], the largest total of a rank of the domain.
    dropped_counts: int32 [L], choices of each local expert that are dropped.
  """

  total: jax.Array
  largest: jax.Array
  dropped_counts: jax.Array


class Assignment(NamedTuple):
  """The choices of a rank, and which of them get no row.

  Attributes:
    chosen: int [T, K], the expert of each choice, after moves.
    is_dropped: bool [T, K]; the op must get -1 for these. None if it decides.
    candidate: int32 [T, K], the candidate that each choice uses, its own if it
      is dropped or unused; None if there are no candidates but the choices.
    wanted: None if it is what the op finds wanted.
  """

  chosen: jax.Array
  is_dropped: jax.Array | None = None
  candidate: jax.Array | None = None
  wanted: Wanted | None = None


def assign(
  params: OpParams, topk_idx: jax.Array, weights: jax.Array | None
) -> Assignment:
  """Assigns the choices of a rank, in the local view.

  Collective over the EP domain, unless any routing has room or the op itself
  drops by slot. Where an id of any rank is out of range, or one is repeated in
  a token's K choices, no choice is dropped or moved, and the op finds the
  fault. It finds one of a further candidate in the place of the last choice. A
  further candidate that repeats an earlier one is none.

  Args:
    params: those of the op.
    topk_idx: int [T, M], candidates of each token, of which the first K are its
      choices.
    weights: float [T, M], which are not read if `drop_by` is "slot".
  """
  layer, K = params.layer, params.layer.top_k
  spills = topk_idx.shape[1] > K
  if spills:
    topk_idx = _with_faults(layer, _without_repeats(layer, topk_idx))
  choices = topk_idx[:, :K]
  own = jnp.broadcast_to(_iota(K), choices.shape) if spills else None
  if not (spills or layer.drop_by != "slot") or _any_fits(params):
    return Assignment(choices, candidate=own)
  experts = layer.group.num_experts
  is_valid = (topk_idx >= -1) & (topk_idx < experts)
  ids = jnp.where(is_valid, topk_idx, experts).astype(jnp.int32)
  by_slot = layer.drop_by == "slot"
  order = ids[:, :0] if by_slot else _by_weight(weights)
  candidate, is_dropped, *wanted = primitive.bind(_assign_p, params, ids, order)
  return Assignment(
    jnp.take_along_axis(topk_idx, candidate, axis=1),
    is_dropped,
    candidate if spills else None,
    Wanted(*wanted),
  )


def _any_fits(params: OpParams) -> bool:
  """Returns whether any routing of so many tokens fits the capacity."""
  T = params.num_tokens
  return not T or params.layer.worst_case(T) <= params.capacity


def _without_repeats(layer: LayerConfig, ids: jax.Array) -> jax.Array:
  """Puts -1 for each further candidate that an earlier one is equal to."""
  M = ids.shape[1]
  is_earlier = jnp.arange(M) < jnp.arange(M)[:, None]
  repeats = ((ids[:, :, None] == ids[:, None, :]) & is_earlier).any(2)
  return jnp.where(repeats & (_iota(M) >= layer.top_k), -1, ids)


def _with_faults(layer: LayerConfig, ids: jax.Array) -> jax.Array:
  """Puts an id that is out of range after column K into column K - 1."""
  K = layer.top_k
  further = ids[:, K:]
  is_wrong = (further < -1) | (further >= layer.group.num_experts)
  first = jnp.argmax(is_wrong, axis=1)[:, None]
  fault = jnp.take_along_axis(further, first, axis=1)[:, 0]
  last = jnp.where(is_wrong.any(1), fault, ids[:, K - 1])
  return ids.at[:, K - 1].set(last)


def _by_weight(weights: jax.Array) -> jax.Array:
  """Returns int32 numbers that ascend as weights descend; NaNs are last.

  Zeros of both signs are equal. Whole numbers compare alike on all platforms.
  """
  weights = weights.astype(jnp.float32)
  largest = np.int32(np.iinfo(np.int32).max)
  bits = lax.bitcast_convert_type(weights, jnp.int32)
  is_nan = (bits & largest) > np.float32(np.inf).view(np.int32)
  bits = jnp.where(bits & largest == 0, 0, bits)
  ascending = jnp.where(bits < 0, bits ^ largest, bits)
  return jnp.where(is_nan, largest, ~ascending)


def _assign(params: OpParams, ids, order) -> list[jax.Array]:
  layer, axis = params.layer, params.layer.group.axis_name
  P, L, E = layer.ep_size, layer.num_local_experts, layer.group.num_experts
  T, K = ids.shape[0], layer.top_k

  def share(x):
    return lax.all_gather(x, axis) if P > 1 else x[None]

  def count(experts):
    """Returns [E] how often each id is in `experts`; others are left out."""
    others = jnp.where(experts < 0, E, experts).reshape(-1)
    return jnp.zeros(E, jnp.int32).at[others].add(1, mode="drop")

  own = jnp.broadcast_to(_iota(K), (T, K))
  no_drops = own, jnp.zeros((T, K), bool), jnp.zeros(L, jnp.int32)
  me = lax.axis_index(axis)
  counts = share(count(ids[:, :K])).sum(0, dtype=jnp.int32).reshape(P, L)
  totals = _sum(_blocks(layer, counts))[:, 0] * layer.alignment

  def place():
    shared = share(jnp.concatenate([ids, order], axis=1))
    all_ids, all_order = jnp.split(shared.reshape(P * T, -1), [ids.shape[1]], 1)
    choices = all_ids[:, :K]
    assigned = _place(params, all_ids, all_order)
    is_dropped = (choices >= 0) & (assigned < 0)
    if layer.overflow == "error":  # the op fails if one of them finds no room
      is_dropped = jnp.zeros_like(is_dropped)
    dropped = count(jnp.where(is_dropped, choices, -1)).reshape(P, L)[me]
    assigned, is_dropped = (
      lax.dynamic_slice_in_dim(x, me * T, T) for x in (assigned, is_dropped)
    )
    candidate = jnp.where(assigned < 0, own, assigned)
    is_faulty = _has_fault(E, choices)
    return tuple(
      jnp.where(is_faulty, x, y)
      for x, y in zip(no_drops, (candidate, is_dropped, dropped), strict=True)
    )

  candidate, is_dropped, dropped = lax.cond(
    (totals > params.capacity).any(), place, lambda: no_drops
  )
  return [candidate, is_dropped, totals[me][None], totals.max()[None], dropped]


def _has_fault(num_experts: int, choices: jax.Array) -> jax.Array:
  """Returns whether one of [N, K] is out of range, or repeated in its row."""
  K = choices.shape[1]
  before = jnp.arange(K) < jnp.arange(K)[:, None]
  repeats = (choices[:, :, None] == choices[:, None, :]) & before
  repeats = repeats.any(2) & (choices >= 0)
  return ((choices == num_experts) | repeats).any()


def _place(params: OpParams, ids: jax.Array, order: jax.Array) -> jax.Array:
  """Returns int32 [N, K], the candidate that gets a row for each choice, or -1.

  Args:
    params: those of the op.
    ids: [N, M], candidates of all N tokens of a domain.
    order: [N, M], what orders them; [N, 0] if `drop_by` is "slot".
  """
  E, K = params.layer.group.num_experts, params.layer.top_k
  if not order.size:
    order = jnp.zeros_like(ids)
  choices = _iota(K)
  used = ids[:, :K] >= 0

  def offer(rows, experts, order):
    """Offers [n] candidates; returns the new [E] rows, and who gets one."""
    experts = jnp.where((experts >= 0) & (experts < E), experts, E)
    return _take_turns(params, rows, experts, order)

  rows, gets_one = offer(
    jnp.zeros(E, jnp.int32), ids[:, :K].reshape(-1), order[:, :K].reshape(-1)
  )
  assigned = jnp.where(gets_one.reshape(used.shape), choices, -1)

  def spill(state, candidates):
    rows, assigned = state
    m, experts, order = candidates
    waits = used & (assigned < 0)
    first = choices == jnp.argmax(waits, axis=1)[:, None]
    experts = jnp.where(waits.any(1), experts, E)
    rows, gets_one = offer(rows, experts, order)
    assigned = jnp.where(waits & first & gets_one[:, None], m, assigned)
    return (rows, assigned), None

  if ids.shape[1] > K:
    further = _iota(ids.shape[1])[K:]
    candidates = further, ids[:, K:].T, order[:, K:].T
    (_, assigned), _ = lax.scan(spill, (rows, assigned), candidates)
  return assigned


class _Offers(NamedTuple):
  """[n] candidates by expert, then in the order in which the expert takes them.

  Those that are not offered have the expert E.
  """

  expert: jax.Array
  order: jax.Array  # what orders candidates, before their index
  index: jax.Array
  row: jax.Array  # its row in the slab, if all of the expert get one


def _take_turns(params, rows, experts, order):
  """Gives out rows to candidates [n], where `rows` [E] are given away already.

  Returns the new rows, and bool [n] who gets one.
  """
  layer = params.layer
  P, L, E = layer.ep_size, layer.num_local_experts, layer.group.num_experts
  index = _iota(experts.size)
  expert, order, index = lax.sort((experts, order, index), num_keys=3)
  start = jnp.searchsorted(expert, _iota(E + 1)).astype(jnp.int32)
  wanted = rows + jnp.diff(start)
  row = jnp.append(rows, 0)[expert] + _iota(index.size) - start[expert]
  has = _blocks(layer, rows).reshape(P, L)
  wants = _blocks(layer, wanted).reshape(P, L)
  offers = _Offers(expert, order, index, row)
  quota = _QUOTAS[layer.drop_by](params, has, wants, offers).reshape(E)
  room = jnp.append(quota * layer.alignment, 0)[expert]
  gets_one = jnp.zeros(index.shape, bool).at[index].set(row < room)
  return jnp.minimum(wanted, quota * layer.alignment), gets_one


def _quota_by_slot(params, has, wants, offers):
  """Gives blocks to the first experts of a rank, as many as they want."""
  del offers
  more = wants - has
  free = _capacity(params) - _sum(has)
  return has + (free - _sum_before(more)).clip(0, more)


def _quota_fairly(params, has, wants, offers):
  """Gives one block to each expert in turn, as long as it wants one.

  That fills all experts up to a level, but for those that have more or want
  less, and the rest, less than one block for each, goes to the first of those
  that stand at the level and want more.
  """
  del offers
  capacity = _capacity(params)

  def filled(level):
    return jnp.maximum(has, jnp.minimum(wants, level))

  def raise_level(i, level):
    """Adds a bit, from the highest to the lowest, if the blocks suffice."""
    higher = level + (1 << (30 - i))
    fits = _sum(filled(higher)) <= capacity
    return jnp.where(fits, higher, level)

  level = jnp.zeros((len(has), 1), jnp.int32)
  level = lax.fori_loop(0, 31, raise_level, level)
  quota = filled(level)
  wants_more = (quota == level) & (wants > quota)
  rest = capacity - _sum(quota)
  return quota + (wants_more & (_sum_before(wants_more) < rest))


def _quota_by_weight(params, has, wants, offers):
  """Gives blocks in the order of the choices that would open them."""
  del wants
  layer = params.layer
  P, L, E = layer.ep_size, layer.num_local_experts, layer.group.num_experts
  opens = (offers.row % layer.alignment == 0) & (offers.expert < E)
  rank = jnp.where(opens, offers.expert // L, P)
  rank, _, _, expert = lax.sort(
    (rank, offers.order, offers.index, offers.expert), num_keys=3
  )
  start = jnp.searchsorted(rank, _iota(P + 1)).astype(jnp.int32)
  turn = _iota(rank.size) - start[rank]
  free = jnp.append(_capacity(params) - _sum(has)[:, 0], 0)
  expert = jnp.where(turn < free[rank], expert, E)
  return has.reshape(E).at[expert].add(1, mode="drop")


_QUOTAS: dict[str, Callable[..., jax.Array]] = {
  "slot": _quota_by_slot,
  "weight": _quota_by_weight,
  "fair": _quota_fairly,
}


def _capacity(params: OpParams) -> int:
  """Returns the blocks of a rank."""
  return params.capacity // params.layer.alignment


def _blocks(layer: LayerConfig, rows: jax.Array) -> jax.Array:
  return -(-rows // layer.alignment)


def _iota(n: int) -> jax.Array:
  return jnp.arange(n, dtype=jnp.int32)


def _sum(x: jax.Array) -> jax.Array:
  return x.sum(1, keepdims=True, dtype=jnp.int32)


def _sum_before(x: jax.Array) -> jax.Array:
  return x.cumsum(1, dtype=jnp.int32) - x


def _out_types(params: OpParams, ids, order):
  del order
  choices = ids.shape[0], params.layer.top_k
  one = jax.ShapeDtypeStruct((1,), jnp.int32)
  return [
    jax.ShapeDtypeStruct(choices, jnp.int32),
    jax.ShapeDtypeStruct(choices, jnp.bool_),
    one,
    one,
    jax.ShapeDtypeStruct((params.layer.num_local_experts,), jnp.int32),
  ]


_assign_p = primitive.of_rank("ep_assign", _out_types, _assign)
