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

from collections.abc import Callable, Mapping
import dataclasses
import functools
import math
from typing import NamedTuple

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from ep._src.base import compat
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
  load = rows.sum(1)
  order = jnp.argsort(load)
  rank = jnp.zeros(P, jnp.int32).at[order].set(_iota(P))
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
  taken_of = (
    jnp.minimum(end[:, None], (first + rows)[donor])
    - jnp.maximum(start[:, None], first[donor])
  )
  num_rows, experts = lax.top_k(taken_of, min(num_slots, L))
  slots = jnp.where(num_rows > 0, _iota(experts.shape[1]), -1)
  slots = jnp.full((P, L), -1, jnp.int32).at[_iota(P)[:, None], experts].set(
    slots
  )
  return Division(first, donor, start, end, slots)


def _iota(n: int) -> jax.Array:
  return jnp.arange(n, dtype=jnp.int32)
