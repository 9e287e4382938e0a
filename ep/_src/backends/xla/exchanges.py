# SPDX-License-Identifier: Apache-2.0
"""Sends rows between the ranks of a domain along a plan, for the backend "xla".

XLA's ragged all-to-all writes each slice of rows to its final place: slots on
the rank of the expert, or the sorted choices of the source rank. So each row is
gathered once, before it is sent to a slot or after it returned. XLA:CPU has no
such collective, and runs padded.py.
"""

from __future__ import annotations

from collections.abc import Callable
import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from ep._src.backends.xla import padded
from ep._src.backends.xla.plans import Plan, Slices, sources, take
from ep._src.base.arrays import expanded, iota
from ep._src.base.group import Sizes

# A function that sends rows to slots, or back to choices.
_Send = Callable[..., list[jax.Array]]


def to_slots(
  sizes: Sizes,
  on_cpus: bool | None,
  plan: Plan,
  is_sound: jax.Array,
  tokens: jax.Array,
  *weights: jax.Array,
) -> list[jax.Array]:
  """Sends rows of tokens [T, H] and weights of choices [T, K] to slots [C].

  A rank where `is_sound` is False sends NaN, and its weights are NaN. Offsets
  and sizes are clipped, so a wrong plan cannot access memory out of bounds.
  `on_cpus` is whether the program is for CPUs; None if also for others.
  """
  send = _choose(sizes, on_cpus, padded.to_slots, _ragged_to_slots)
  words = (x.reshape(-1) for x in weights)
  return send(plan, is_sound, tokens, *words)


def to_choices(
  sizes: Sizes,
  on_cpus: bool | None,
  plan: Plan,
  is_sound: jax.Array,
  *arrays: jax.Array,
) -> list[jax.Array]:
  """Sends arrays [C, ...] of slots back to choices, as [K, T, ...].

  Choices without a slot get zeros. A rank where `is_sound` is False gets NaN.
  """
  send = _choose(sizes, on_cpus, padded.to_choices, _ragged_to_choices)
  return send(plan, is_sound, *arrays)


def _choose(
  sizes: Sizes, on_cpus: bool | None, in_buckets: _Send, ragged: _Send
) -> _Send:
  in_buckets = functools.partial(in_buckets, sizes)
  ragged = functools.partial(ragged, sizes)
  if on_cpus or sizes.P == 1:
    return in_buckets
  if on_cpus is False:
    return ragged
  return functools.partial(
    lax.platform_dependent, cpu=in_buckets, default=ragged
  )


def _ragged_to_slots(
  sizes: Sizes, plan: Plan, is_sound: jax.Array, *arrays: jax.Array
) -> list[jax.Array]:
  outs = []
  indices = sources(sizes, plan, len(arrays))
  for x, index in zip(arrays, indices, strict=True):
    x = padded.sound(is_sound, x)
    unsent = _unsent(sizes, plan, is_sound, x)
    rows = take(x, index)
    outs.append(_send(sizes, rows, unsent, plan.choices, plan.slots))
  rows, *weights = outs
  return [rows, *(padded.sound(is_sound, w) for w in weights)]


def _ragged_to_choices(
  sizes: Sizes, plan: Plan, is_sound: jax.Array, *arrays: jax.Array
) -> list[jax.Array]:
  place = plan.place.reshape(sizes.T, sizes.K).T
  outs = []
  for x in arrays:
    unsent = _unwritten(x, plan.order.size)
    received = _send(sizes, x, unsent, plan.slots, plan.choices)
    rows = take(received, place.reshape(-1))
    rows = rows.reshape(*place.shape, *x.shape[1:])
    is_sent = expanded(place < place.size, rows.ndim)
    rows = jnp.where(is_sent, rows, jnp.zeros_like(rows))
    outs.append(padded.sound(is_sound, rows))
  return outs


def _send(
  sizes: Sizes,
  rows: jax.Array,
  unsent: jax.Array,
  sender: Slices,
  receiver: Slices,
) -> jax.Array:
  """Returns `unsent`, overwritten where this rank receives rows."""
  start = sender.start.clip(0, len(rows))
  remote = sender.remote.clip(0, len(unsent))
  most = jnp.minimum(len(rows) - start, len(unsent) - remote)
  size = jnp.minimum(sender.size.clip(0), most)
  received: jax.Array = lax.ragged_all_to_all(
    rows,
    unsent,
    start,
    size,
    remote,
    receiver.size.clip(0, len(unsent)),
    axis_name=sizes.group.axis_name,
  )
  return received


def _unsent(
  sizes: Sizes, plan: Plan, is_sound: jax.Array, x: jax.Array
) -> jax.Array:
  """Returns slots [C, ...] with zeros or NaNs for rows that no rank sends."""
  if sizes.tail == "unspecified" and sizes.alignment == 1:
    return _unwritten(x, sizes.C)
  # Zeros that depend on `x`; `_unwritten` says why.
  first = x.reshape(-1)[0]
  zero = jnp.where(is_sound, jnp.zeros_like(first), first)
  slots = jnp.broadcast_to(zero, (sizes.C, *x.shape[1:]))
  if sizes.tail != "nan":
    return slots
  is_tail = expanded(iota(sizes.C) >= plan.used, slots.ndim)
  return jnp.where(is_tail, padded.nan(slots.dtype), slots)


def _unwritten(x: jax.Array, num: int) -> jax.Array:
  """Returns `num` rows of arbitrary values, to be overwritten or never read.

  The value depends on the array `x` whose rows are sent. XLA would build a
  constant array outside of a loop, share it between exchanges, and copy it for
  each.
  """
  return jnp.broadcast_to(x.reshape(-1)[0], (num, *x.shape[1:]))


def share(sizes: Sizes, *arrays: jax.Array) -> list[jax.Array]:
  """All-gathers vectors [n] to [P, n], all of them in one collective."""
  mine = jnp.concatenate(arrays)[None]
  if sizes.P > 1:
    mine = lax.all_gather(mine, sizes.group.axis_name, tiled=True)
  return jnp.split(mine, np.cumsum([a.size for a in arrays])[:-1], axis=1)
