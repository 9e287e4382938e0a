# SPDX-License-Identifier: Apache-2.0
"""backend="xla": sends rows by XLA's ragged all-to-all, not on CPUs.

XLA's ragged all-to-all writes each slice of rows to its final place: slots on
the rank of the expert, or the sorted choices of the source rank. So each row is
gathered once, before it is sent to a slot or after it returned. Offsets and
sizes are clipped, so a wrong plan cannot access memory out of bounds.
"""

from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from ep._src.backends.xla.plans import Plan, Slices, take
from ep._src.base.arrays import expanded
from ep._src.base.group import Sizes


def to_slots(
  sizes: Sizes,
  plan: Plan,
  is_sound: jax.Array,
  rows: jax.Array,
  *weights: jax.Array,
) -> list[jax.Array]:
  """Sends rows of tokens [T, H] and weights of choices [T, K] to slots [C].

  A rank where `is_sound` is False sends NaN, and its weights are NaN.
  """

  def send(x: jax.Array, index: jax.Array) -> jax.Array:
    x = _sound(is_sound, x)
    unsent = _unsent(sizes, plan, is_sound, x)
    return _send(sizes, take(x, index), unsent, plan.choices, plan.slots)

  outs = [send(rows, lax.div(plan.order, np.int32(sizes.K)))]
  for x in weights:
    outs.append(_sound(is_sound, send(x.reshape(-1), plan.order)))
  return outs


def to_choices(
  sizes: Sizes, plan: Plan, is_sound: jax.Array, *arrays: jax.Array
) -> list[jax.Array]:
  """Sends arrays [C, ...] of slots back to choices, as [K, T, ...].

  Choices without a slot get zeros. A rank where `is_sound` is False gets NaN.
  """
  place = plan.place.reshape(sizes.T, sizes.K).T
  outs = []
  for x in arrays:
    unsent = _unwritten(x, plan.order.size)
    received = _send(sizes, x, unsent, plan.slots, plan.choices)
    rows = take(received, place.reshape(-1))
    rows = rows.reshape(*place.shape, *x.shape[1:])
    is_sent = expanded(place < place.size, rows.ndim)
    rows = jnp.where(is_sent, rows, jnp.zeros_like(rows))
    outs.append(_sound(is_sound, rows))
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
  is_tail = expanded(lax.iota(jnp.int32, sizes.C) >= plan.used, slots.ndim)
  return jnp.where(is_tail, _nan(slots.dtype), slots)


def _unwritten(x: jax.Array, num: int) -> jax.Array:
  """Returns `num` rows of arbitrary values, to be overwritten or never read.

  The value depends on the array `x` whose rows are sent. XLA would build a
  constant array outside of a loop, share it between exchanges, and copy it for
  each.
  """
  return jnp.broadcast_to(x.reshape(-1)[0], (num, *x.shape[1:]))


def _sound(is_sound: jax.Array, x: jax.Array) -> jax.Array:
  """Returns `x` if `is_sound`, and otherwise NaN."""
  return jnp.where(is_sound, x, _nan(x.dtype))


def _nan(dtype: jnp.dtype) -> jax.Array:
  """Returns NaN; for an integer dtype, bits that are NaN in any float dtype."""
  if jnp.issubdtype(dtype, jnp.floating):
    return jnp.array(jnp.nan, dtype)
  return jnp.array(jnp.iinfo(dtype).max, dtype)
