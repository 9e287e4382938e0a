# SPDX-License-Identifier: Apache-2.0
"""replica_slots: hot experts are copied to ranks with room, in each step.

A group of such a layer has E + P * S slots: rank r of P has those of its L own
experts, then S for copies. Everything is decided by whole numbers, on all ranks
alike, from the choices of each expert by each rank.

A rank with more rows than it has room for gives some away. They move as in
Vose's alias method (1991): a rank with room is filled from one other rank, even
if that one then has room itself and is filled from a third. So no rank has the
experts of two others, and S = L slots are enough for any routing.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
import math
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from ep._src.base import compat
from ep._src.base.arrays import iota
from ep._src.base.contexts import trace_callback
from ep._src.base.identities import keep_routing
from ep._src.group.group import EpLayerConfig
from ep._src.moe.config import MoEConfig
from ep._src.moe.placement import Placement
from ep._src.ops.dispatch import ep_dispatch
from ep._src.ops.prepare import ep_prepare


class Division(NamedTuple):
  """Which rows go where. A donor's rows are a line: its largest expert first.

  Attributes:
    first: int32 [P, L], where the rows of an expert begin on the line.
    donor: int32 [P], the rank from which each rank takes rows.
    start, end: int32 [P], the part of the donor's line that it takes.
    slots: int32 [P, L], which slot of the rank has an expert of its donor, or
      -1 if none has.
  """

  first: jax.Array
  donor: jax.Array
  start: jax.Array
  end: jax.Array
  slots: jax.Array


def divide(rows: jax.Array, room: jax.Array | int, num_slots: int) -> Division:
  """Divides rows [P, L] of ranks' experts, so that ranks have `room` at most.

  The fullest ranks give first, and the emptiest take first. On an axis of all
  rows that move, `given[j]` is where rank j has given what it has too much of,
  and `taken[i]` where rank i is full: a rank takes from the first rank that has
  not given all. What it takes beyond makes room there, which is filled from the
  next one. With fewer than L slots the largest parts move.
  """
  P, L = rows.shape
  load = rows.sum(1, dtype=jnp.int32)
  order = jnp.argsort(load)
  rank = jnp.zeros(P, jnp.int32).at[order].set(iota(P))
  given = jnp.maximum(load - room, 0)[order[::-1]].cumsum()
  taken = jnp.maximum(room - load, 0)[order].cumsum()
  taken = jnp.minimum(taken, given[-1])
  from_, to = jnp.append(0, taken)[rank], taken[rank]
  # A rank that has given all, and more, is filled from there on.
  all_given = given[P - 1 - rank]
  i = jnp.searchsorted(taken, all_given).clip(max=P - 1)
  gives = load > room
  from_ = jnp.where(gives, all_given, from_)
  to = jnp.where(gives, jnp.maximum(taken[i], all_given), to)
  j = jnp.searchsorted(given, from_, side="right").clip(max=P - 1)
  start = from_ - jnp.append(0, given)[j]
  donor, end = order[::-1][j].astype(jnp.int32), start + to - from_

  by_size = jnp.argsort(-rows, axis=1)
  size = jnp.take_along_axis(rows, by_size, axis=1)
  first = jnp.put_along_axis(
    rows, by_size, size.cumsum(1) - size, axis=1, inplace=False
  )
  taken_of = jnp.minimum(end[:, None], (first + rows)[donor]) - jnp.maximum(
    start[:, None], first[donor]
  )
  num_rows, experts = lax.top_k(taken_of, min(num_slots, L))
  slots = jnp.where(num_rows > 0, iota(experts.shape[1]), -1)
  slots = (
    jnp.full((P, L), -1, jnp.int32).at[iota(P)[:, None], experts].set(slots)
  )
  return Division(first, donor, start, end, slots)


@dataclasses.dataclass(frozen=True)
class Replicas:
  """The copies of a step, and the slots of a rank's choices.

  Attributes:
    layer: the layer's, whose group counts slots.
    ids: int [..., K], the slot of each choice.
    copies: int32 [L, P], the slots on each rank that get a copy of each of this
      rank's own experts, or -1.
    experts: int32 [L + S], what each slot of this rank holds, by the number
      that it has where each expert has one slot.
  """

  layer: EpLayerConfig
  ids: jax.Array
  copies: jax.Array
  experts: jax.Array

  @classmethod
  def of(
    cls,
    layer: EpLayerConfig,
    config: MoEConfig,
    ids: jax.Array,
    placement: Placement | None,
  ) -> Replicas:
    """Decides on copies for choices [..., K]. Collective over the EP domain."""
    ids = ids if placement is None else placement.slots_of(ids)
    E, S, P = config.num_experts, config.replica_slots, layer.ep_size
    L, me = E // P, lax.axis_index(layer.group.axis_name)
    is_expert = ids >= 0
    flat = jnp.where(is_expert, ids, E).ravel()
    sorted_ids, place = lax.sort((flat, iota(flat.size)), num_keys=1)
    start = jnp.searchsorted(sorted_ids, iota(E + 1)).astype(jnp.int32)
    turn = jnp.zeros(flat.size, jnp.int32)
    turn = turn.at[place].set(iota(flat.size) - start[sorted_ids])
    with jax.named_scope("ep_replicate"):
      counts = lax.all_gather(jnp.diff(start), layer.group.axis_name)
    counts = keep_routing(counts)
    rows = counts.sum(0, dtype=jnp.int32).reshape(P, L)
    room = -(-rows.sum(dtype=jnp.int32) // P)
    if config.capacity_factor is not None:
      num_tokens = math.prod(ids.shape[:-1])
      padding = layer.num_local_experts * (layer.alignment - 1)
      room = layer.capacity_for(num_tokens) - padding
    division = divide(rows, room, S)
    earlier = jnp.where(iota(P)[:, None] < me, counts, 0)
    earlier = earlier.sum(0, dtype=jnp.int32)
    turn += jnp.append(earlier, 0)[flat]
    slots = _slots_of_turns(division, rows, flat, turn, S)
    ids = jnp.where(is_expert, slots.reshape(ids.shape), ids)

    slot = division.slots  # [P, L], of what the donor has
    number = iota(P)[:, None] * (L + S) + L + slot
    is_mine = (division.donor == me)[:, None] & (slot >= 0)
    taken = division.donor[me] * L + iota(L)
    experts = jnp.append(me * L + iota(L), jnp.zeros(S, jnp.int32))
    at = jnp.where(slot[me] >= 0, L + slot[me], L + S)
    experts = experts.at[at].set(taken, mode="drop")
    copies = jnp.where(is_mine, number, -1).T
    return cls(layer, ids, copies, keep_routing(experts))

  def copied(
    self, params: Mapping[str, jax.Array], hidden: int
  ) -> dict[str, jax.Array]:
    """Returns parameters [L + S, ...] of slots, given a rank's own [L, ...].

    The entries of slots without a copy are zeros. Linear: a gradient is that of
    the expert's own slot plus the sum of its copies', by ascending rank.
    """
    L, P = self.copies.shape
    S = self.layer.num_local_experts - L
    most = self.layer.group.max_tokens_per_rank
    most = None if most is None else most // L

    @functools.cache
    def handle(height):
      """Prepares copies of `height` rows of each expert."""
      rows = max(S * height, L + S)
      layer = EpLayerConfig(
        self.layer.group,
        top_k=P,
        alignment=1,
        recv_capacity_per_rank=rows,
        overflow="error",
        name=f"{self.layer.name}.replicas",
      )
      ids = jnp.broadcast_to(self.copies[:, None], (L, height, P))
      with trace_callback(None):  # these are no tokens
        return ep_prepare(layer, ids)

    def of(x):
      # A cast to vary over more mesh axes is a sum over them in the backward
      # pass. In the loop it would be a collective beside our op, which XLA:CPU
      # does not order (unordered_collectives.py).
      x, _ = compat.vary_together(x, self.copies)
      rows = -(-math.prod(x.shape[1:]) // hidden)
      num_parts = -(-rows // (most or rows))
      height = -(-rows // num_parts)
      parts = x.reshape(L, -1)
      missing = num_parts * height * hidden - parts.shape[1]
      parts = jnp.pad(parts, ((0, 0), (0, missing)))
      parts = parts.reshape(L, num_parts, height, hidden).swapaxes(0, 1)
      no_weights = jnp.zeros((L, height, P))

      def send(part):
        return ep_dispatch(handle(height), part, no_weights)[0][: S * height]

      handle(height)  # outside of the loop
      sent = lax.map(send, parts) if num_parts > 1 else send(parts[0])[None]
      sent = sent.reshape(num_parts, S, -1).swapaxes(0, 1).reshape(S, -1)
      sent = sent[:, : math.prod(x.shape[1:])].reshape(S, *x.shape[1:])
      return jnp.concatenate(compat.vary_together(x, sent))

    return {name: of(x) for name, x in params.items()}


def _slots_of_turns(division, rows, ids, turn, num_slots):
  """Returns [N] the slots of choices, of which each is an expert's n-th."""
  P, L = rows.shape
  load = rows.sum(1, dtype=jnp.int32)
  base = load.cumsum() - load  # all lines are one, one after another
  none = jnp.iinfo(jnp.int32).max
  start = (base[division.donor] + division.start).astype(jnp.int32)
  start = jnp.where(division.end > division.start, start, none)
  by_start = jnp.argsort(start).astype(jnp.int32)
  end = base[division.donor] + division.end
  rank, local = jnp.divmod(ids.clip(max=P * L - 1), L)
  at = base[rank] + division.first[rank, local] + turn
  i = jnp.searchsorted(start[by_start], at, side="right") - 1
  taker = by_start[i.clip(0)]
  slot = division.slots[taker, local]
  moves = (i >= 0) & (at < end[taker]) & (slot >= 0)
  rank = jnp.where(moves, taker, rank)
  return rank * (L + num_slots) + jnp.where(moves, L + slot, local)
