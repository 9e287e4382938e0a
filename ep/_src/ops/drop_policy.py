# SPDX-License-Identifier: Apache-2.0
"""Decides which choices get a row where not all can.

A choice gets a row if its expert has room: a free row in the last block of its
slab, or a block of `alignment` rows that its rank has not given away. Choices
are taken one after the other, and `drop_by` is the order; `reference.assign`
is that loop. Here nothing is sequential, because blocks are alike. However
choices are ordered, an expert keeps the first of its own, as many as fit into
its blocks; so it is enough to know how many blocks each expert gets, its
*quota*.

All ranks of a domain share their choices, which are valid, and compute the
same. So the op is then given choices that fit, whatever the backend.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from ep._src.base.arrays import iota
from ep._src.base.backend import OpParams
from ep._src.base.config import LayerConfig

_QuotaOf = Callable[..., jax.Array]


class Assignment(NamedTuple):
  """The experts and candidates that the choices of a rank use.

  Attributes:
    chosen: int32 [T, K], the expert of each choice, for the op: -1 if it is
      dropped or unused.
    candidate: int32 [T, K], the candidate of each choice, its own if it is
      dropped or unused.
    dropped_counts: int32 [L], choices of the domain that are dropped, by the
      local expert that they chose first.
  """

  chosen: jax.Array
  candidate: jax.Array
  dropped_counts: jax.Array


def may_be_needed(
  params: OpParams, num_candidates: int, is_ordered: bool
) -> bool:
  """Returns whether a routing may have to be assigned.

  It need not be if the op itself decides what is dropped, by slot and not as
  weights order it, or if any routing of the tokens fits the capacity.
  """
  layer, T = params.layer, params.num_tokens
  decides = is_ordered or num_candidates > layer.top_k
  return decides and layer.worst_case(T) > params.capacity


def dropped(
  layer: LayerConfig, tokens: np.ndarray, capacity: int
) -> np.ndarray:
  """Returns how many tokens [N, L] of each rank's experts get no row, as [N].

  It knows no weights: "weight" counts as "slot", and None as "fair".

  Args:
    layer: its alignment and policy count, and its capacity does not.
    tokens: of each local expert, in NumPy.
    capacity: C, rows of a rank.
  """
  is_fair = layer.drop_by in (None, "fair")
  quota_of = _quota_fairly if is_fair else _quota_by_slot
  wants = _blocks(layer, tokens)
  has = np.zeros_like(wants)
  quota = quota_of(layer, capacity // layer.alignment, has, wants)
  return (tokens - quota * layer.alignment).clip(0).sum(axis=1)


def with_faults(layer: LayerConfig, ids: jax.Array) -> jax.Array:
  """Puts an id that is out of range after column K into column K - 1.

  So the op, which gets the K choices, finds it.
  """
  K = layer.top_k
  further = ids[:, K:]
  is_wrong = (further < -1) | (further >= layer.group.num_experts)
  first = jnp.argmax(is_wrong, axis=1)[:, None]
  fault = jnp.take_along_axis(further, first, axis=1)[:, 0]
  last = jnp.where(is_wrong.any(1), fault, ids[:, K - 1])
  return ids.at[:, K - 1].set(last)


def repeated(ids: jax.Array) -> jax.Array:
  """Returns bool [T, M]: whether an earlier column of the token has the id."""
  M = ids.shape[1]
  is_earlier = iota(M) < iota(M)[:, None]
  return ((ids[:, :, None] == ids[:, None, :]) & is_earlier).any(2)


def assign(
  params: OpParams, topk_idx: jax.Array, weights: jax.Array | None
) -> Assignment:
  """Assigns the choices of a rank. Collective over the EP domain.

  Layers that are alike but for their names share one function in a program,
  and JAX traces it once for all programs.

  Args:
    params: the parameters of the op. If the op does not drop, neither does
      this: the op gets the choices without a row, and fails.
    topk_idx: int [T, M], candidates of each token, of which the first K are its
      choices. All are in -1..E-1, and the choices of a token are distinct. A
      further candidate that repeats an earlier one is none.
    weights: float [T, M], or None if the rule is "slot".
  """
  nameless = dataclasses.replace(params.layer, name="any")
  return _assign(nameless, params.drop, topk_idx, weights)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _assign(
  layer: LayerConfig,
  drop: bool,
  topk_idx: jax.Array,
  weights: jax.Array | None,
) -> Assignment:
  axis = layer.group.axis_name
  L, E = layer.num_local_experts, layer.group.num_experts
  T, K = len(topk_idx), layer.top_k
  ids = _without_repeats(layer, topk_idx.astype(jnp.int32))
  # Without weights, the ids of an expert are all equal, and order nothing.
  orders = [] if weights is None else [_by_weight(weights)]
  shared = jnp.stack([ids, *orders], axis=2)
  if layer.ep_size > 1:
    shared = lax.all_gather(shared, axis, tiled=True)
  all_ids, all_order = shared[..., 0], shared[..., -1]
  choices = all_ids[:, :K]
  quota_of = functools.partial(
    _QUOTAS[layer.rule(weights is not None)],
    layer,
    layer.capacity_for(T) // layer.alignment,
  )
  assigned = _place(layer, all_ids, all_order, quota_of)
  is_dropped = (choices >= 0) & (assigned < 0) & drop
  dropped = jnp.where(is_dropped, choices, E)
  dropped_counts = jnp.zeros(E, jnp.int32).at[dropped].add(1, mode="drop")
  candidate = jnp.where(assigned < 0, iota(K), assigned)
  chosen = jnp.take_along_axis(all_ids, candidate, axis=1)
  chosen = jnp.where(is_dropped, -1, chosen)
  me = lax.axis_index(axis)

  def mine(x, size):
    return lax.dynamic_slice_in_dim(x, me * size, size)

  return Assignment(
    mine(chosen, T), mine(candidate, T), mine(dropped_counts, L)
  )


def _without_repeats(layer: LayerConfig, ids: jax.Array) -> jax.Array:
  """Puts -1 for each further candidate that repeats an earlier one."""
  is_further = iota(ids.shape[1]) >= layer.top_k
  return jnp.where(repeated(ids) & is_further, -1, ids)


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


def _place(
  layer: LayerConfig, ids: jax.Array, order: jax.Array, quota_of: _QuotaOf
) -> jax.Array:
  """Returns int32 [N, K], the candidate that gets a row for each choice, or -1.

  Args:
    layer: the layer.
    ids: [N, M], candidates of all N tokens of a domain.
    order: [N, M], numbers by which the candidates of an expert are ordered;
      equal numbers keep the order of the candidates.
    quota_of: the rule, of the blocks of a rank.
  """
  E, K = layer.group.num_experts, layer.top_k
  choices = iota(K)
  used = ids[:, :K] >= 0

  def offer(rows, experts, order):
    """Offers [n] candidates; returns what `_take_turns` does."""
    experts = jnp.where(experts < 0, E, experts)
    return _take_turns(layer, rows, experts, order, quota_of)

  rows, gets_one = offer(
    jnp.zeros(E, jnp.int32), ids[:, :K].reshape(-1), order[:, :K].reshape(-1)
  )
  assigned = jnp.where(gets_one.reshape(used.shape), choices, -1)

  def spill(state, candidates):
    rows, assigned = state
    m, experts, order = candidates
    waits = used & (assigned < 0)
    first = choices == lax.argmax(waits, 1, jnp.int32)[:, None]
    experts = jnp.where(waits.any(1), experts, E)
    rows, gets_one = offer(rows, experts, order)
    assigned = jnp.where(waits & first & gets_one[:, None], m, assigned)
    return (rows, assigned), None

  if ids.shape[1] > K:
    further = iota(ids.shape[1])[K:]
    candidates = further, ids[:, K:].T, order[:, K:].T
    (_, assigned), _ = lax.scan(spill, (rows, assigned), candidates)
  return assigned


class _Offers(NamedTuple):
  """[n] candidates by expert, then in the order in which the expert takes them.

  Those that are not offered have the expert E.
  """

  expert: jax.Array
  order: jax.Array  # candidates are ordered by it, then by place
  place: jax.Array  # among the n, before they were sorted
  row: jax.Array  # its row in the slab, if all of the expert get one


def _take_turns(layer, rows, experts, order, quota_of):
  """Gives out rows to candidates [n], where `rows` [E] are given away already.

  Returns the new rows, and bool [n], whether each candidate gets a row.
  """
  P, L, E = layer.ep_size, layer.num_local_experts, layer.group.num_experts
  place = iota(experts.size)
  expert, order, place = lax.sort((experts, order, place), num_keys=3)
  start = jnp.searchsorted(expert, iota(E + 1)).astype(jnp.int32)
  wanted = rows + jnp.diff(start)
  row = jnp.append(rows, 0)[expert] + iota(place.size) - start[expert]
  has = _blocks(layer, rows).reshape(P, L)
  wants = _blocks(layer, wanted).reshape(P, L)
  offers = _Offers(expert, order, place, row)
  quota = quota_of(has, wants, offers).reshape(E)
  room = jnp.append(quota * layer.alignment, 0)[expert]
  gets_one = jnp.zeros(place.shape, bool).at[place].set(row < room)
  return jnp.minimum(wanted, quota * layer.alignment), gets_one


# The rules get the blocks that each expert of a rank has and wants, [P, L], and
# return the blocks that it has then. Those without offers take NumPy, too.


def _quota_by_slot(layer, capacity, has, wants, offers=None):
  """Gives the experts of a rank what they want, in order, while blocks last."""
  del layer, offers
  more = wants - has
  free = capacity - _sum(has)
  return has + (free - _sum_before(more)).clip(0, more)


def _quota_fairly(layer, capacity, has, wants, offers=None):
  """Gives one block to each expert in turn, as long as it wants one.

  So all experts are filled up to a common level of blocks, except that some
  have more already or want fewer. The blocks that are left, fewer than one for
  each expert, go to the first experts that are at the level and want more.
  """
  del layer, offers
  xp = wants.__array_namespace__()

  def filled(level):
    return xp.maximum(has, xp.minimum(wants, level))

  def raise_level(i, level):
    """Sets bit number i from the top, if the blocks suffice for that level."""
    higher = level + (1 << (bits - 1 - i))
    fits = _sum(filled(higher)) <= capacity
    return xp.where(fits, higher, level)

  level, bits = xp.zeros((len(has), 1), np.int32), capacity.bit_length()
  if isinstance(level, np.ndarray):
    level = functools.reduce(lambda x, i: raise_level(i, x), range(bits), level)
  else:
    level = lax.fori_loop(0, bits, raise_level, level)
  quota = filled(level)
  wants_more = (quota == level) & (wants > quota)
  rest = capacity - _sum(quota)
  before = _sum_before(wants_more.astype(np.int32))
  return quota + (wants_more & (before < rest)).astype(np.int32)


def _quota_by_weight(layer, capacity, has, wants, offers):
  """Gives blocks in the order of the choices that would open them."""
  del wants
  P, L, E = layer.ep_size, layer.num_local_experts, layer.group.num_experts
  opens = (offers.row % layer.alignment == 0) & (offers.expert < E)
  rank = jnp.where(opens, offers.expert // L, P)
  rank, _, _, expert = lax.sort(
    (rank, offers.order, offers.place, offers.expert), num_keys=3
  )
  start = jnp.searchsorted(rank, iota(P + 1)).astype(jnp.int32)
  turn = iota(rank.size) - start[rank]
  free = jnp.append(capacity - _sum(has)[:, 0], 0)
  expert = jnp.where(turn < free[rank], expert, E)
  return has.reshape(E).at[expert].add(1, mode="drop")


_QUOTAS: dict[str, _QuotaOf] = {
  "slot": _quota_by_slot,
  "weight": _quota_by_weight,
  "fair": _quota_fairly,
}


def _blocks(layer, rows):
  return -(-rows // layer.alignment)


def _sum(x):
  return x.sum(1, keepdims=True, dtype=jnp.int32)


def _sum_before(x):
  return x.cumsum(1, dtype=jnp.int32) - x
