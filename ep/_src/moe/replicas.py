# SPDX-License-Identifier: Apache-2.0
"""replica_slots: each step copies hot experts to ranks with free rows.

The group of such a layer has P * (L + S) slots: each of the P ranks has L slots
for its experts, then S slots for copies. All ranks compute the same copies, in
integers, from the number of choices of each expert by each rank.

A *donor*, a rank with more rows than its limit, gives rows to other ranks, as
in Vose's alias method (1991): each rank takes rows of one donor only. A donor
that gives more than its excess takes rows of another donor itself. So no rank
has experts of two other ranks, and S = L slots are enough for any routing.
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
from ep._src.base.identities import keep_routing
from ep._src.group.group import EpLayerConfig
from ep._src.moe.config import MoEConfig
from ep._src.moe.placement import Placement
from ep._src.ops.dispatch import ep_dispatch
from ep._src.ops.handle import EpHandle
from ep._src.ops.prepare import ep_prepare


class Division(NamedTuple):
  """The rows that each rank takes from its donor, a rank with too many rows.

  A donor's rows are numbered expert by expert, its largest expert first.

  Attributes:
    first: int32 [P, L], the number of the first row of each expert.
    donor: int32 [P], the donor of each rank.
    start, end: int32 [P], the numbers of the donor's rows that a rank takes.
    slots: int32 [P, L], for each expert of the rank's donor, the slot in which
      the rank has a copy, from 0 to S - 1, or -1.
  """

  first: jax.Array
  donor: jax.Array
  start: jax.Array
  end: jax.Array
  slots: jax.Array


def divide(rows: jax.Array, limit: jax.Array | int, num_slots: int) -> Division:
  """Divides rows [P, L] of experts among ranks, so that none exceeds `limit`.

  The fullest ranks give first, and the emptiest ranks take first. `given` and
  `taken` are cumulative sums in this order. A rank takes from the first donor
  that has excess rows left. If the rank takes more than this excess, the donor
  takes from the next donor. With fewer than L slots, only the experts with the
  most moved rows get a copy.
  """
  P, L = rows.shape
  load = rows.sum(1, dtype=jnp.int32)
  order = jnp.argsort(load)
  rank = jnp.zeros(P, jnp.int32).at[order].set(iota(P))
  given = jnp.maximum(load - limit, 0)[order[::-1]].cumsum()
  taken = jnp.maximum(limit - load, 0)[order].cumsum()
  taken = jnp.minimum(taken, given[-1])
  from_, to = jnp.append(0, taken)[rank], taken[rank]
  # A donor that gives more than its excess takes excess rows of other donors.
  all_given = given[P - 1 - rank]
  i = jnp.searchsorted(taken, all_given).clip(max=P - 1)
  gives = load > limit
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
  """The copies of experts in a step, and the slots of a rank's choices.

  Attributes:
    layer: the configuration of the layer, whose group counts slots.
    ids: int [..., K], the slot of each choice.
    copies: int32 [L, P], the slot on each rank that gets a copy of each expert
      of this rank, or -1.
    experts: int32 [L + S], the expert in each slot of this rank, as its slot in
      a group without copies.
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
    """Chooses copies for ids [..., K]. Collective over the EP domain."""
    axis = layer.group.axis_name
    ids = ids if placement is None else placement.slots_of(ids)
    S, P, me = config.replica_slots, layer.ep_size, lax.axis_index(axis)
    L = layer.num_local_experts - S
    is_expert = ids >= 0
    flat = jnp.where(is_expert, ids, P * L).ravel()
    sorted_ids, place = lax.sort((flat, iota(flat.size)), num_keys=1)
    start = jnp.searchsorted(sorted_ids, iota(P * L + 1)).astype(jnp.int32)
    position = jnp.zeros(flat.size, jnp.int32)
    position = position.at[place].set(iota(flat.size) - start[sorted_ids])
    with jax.named_scope("ep_replicate"):
      counts = lax.all_gather(jnp.diff(start), axis)
    counts = keep_routing(counts)
    rows = counts.sum(0, dtype=jnp.int32).reshape(P, L)
    limit = -(-rows.sum(dtype=jnp.int32) // P)
    if config.capacity_factor is not None:
      num_tokens = math.prod(ids.shape[:-1])
      padding = layer.num_local_experts * (layer.alignment - 1)
      limit = layer.capacity_for(num_tokens) - padding
    division = divide(rows, limit, S)
    earlier = jnp.where(iota(P)[:, None] < me, counts, 0)
    earlier = earlier.sum(0, dtype=jnp.int32)
    position += jnp.append(earlier, 0)[flat]
    slots = _slots(division, rows, flat, position, S)
    ids = jnp.where(is_expert, slots.reshape(ids.shape), ids)

    slot = division.slots
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
    """Copies the parameters [L, ...] of a rank's experts to slots [L + S, ...].

    Slots without a copy get zeros. Linear: the gradient of an expert is the
    gradient of its first slot plus the sum of the gradients of its copies, by
    ascending rank.
    """
    L, P = self.copies.shape
    S = self.layer.num_local_experts - L
    most = self.layer.group.max_tokens_per_rank
    most = None if most is None else most // L

    @functools.cache
    def handle(height: int) -> EpHandle:
      """Prepares an exchange that copies `height` rows of each expert."""
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
      return ep_prepare(layer, ids)

    def of(x: jax.Array) -> jax.Array:
      # Not in the loop: the transpose of `vary_together` is a collective, which
      # XLA:CPU would not order with dispatch (ep.assert_ordered_collectives).
      x, _ = compat.vary_together(x, self.copies)
      rows = -(-math.prod(x.shape[1:]) // hidden)
      num_parts = -(-rows // (most or rows))
      height = -(-rows // num_parts)
      parts = x.reshape(L, -1)
      missing = num_parts * height * hidden - parts.shape[1]
      parts = jnp.pad(parts, ((0, 0), (0, missing)))
      parts = parts.reshape(L, num_parts, height, hidden).swapaxes(0, 1)
      no_weights = jnp.zeros((L, height, P))

      def send(part: jax.Array) -> jax.Array:
        return ep_dispatch(handle(height), part, no_weights)[0][: S * height]

      handle(height)  # prepares outside of the loop
      sent = lax.map(send, parts) if num_parts > 1 else send(parts[0])[None]
      sent = sent.reshape(num_parts, S, -1).swapaxes(0, 1).reshape(S, -1)
      sent = sent[:, : math.prod(x.shape[1:])].reshape(S, *x.shape[1:])
      return jnp.concatenate(compat.vary_together(x, sent))

    return {name: of(x) for name, x in params.items()}


def _slots(
  division: Division,
  rows: jax.Array,
  ids: jax.Array,
  position: jax.Array,
  num_slots: int,
) -> jax.Array:
  """Returns slots [N] of choices, given `position` among an expert's rows."""
  P, L = rows.shape
  load = rows.sum(1, dtype=jnp.int32)
  base = load.cumsum() - load  # rows of all ranks are numbered consecutively
  none = jnp.iinfo(jnp.int32).max
  start = (base[division.donor] + division.start).astype(jnp.int32)
  start = jnp.where(division.end > division.start, start, none)
  by_start = jnp.argsort(start).astype(jnp.int32)
  end = base[division.donor] + division.end
  rank, local = jnp.divmod(ids.clip(max=P * L - 1), L)
  at = base[rank] + division.first[rank, local] + position
  i = jnp.searchsorted(start[by_start], at, side="right") - 1
  taker = by_start[i.clip(0)]
  slot = division.slots[taker, local]
  is_taken = (i >= 0) & (at < end[taker]) & (slot >= 0)
  rank = jnp.where(is_taken, taker, rank)
  return rank * (L + num_slots) + jnp.where(is_taken, L + slot, local)
