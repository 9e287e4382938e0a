# SPDX-License-Identifier: Apache-2.0
"""backend="xla": moves rows between the ranks of a domain, along a plan.

Rows travel as whole numbers, so that no platform flushes a denormal or changes
a NaN.
"""

from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from ep._src.backends.xla.plans import Dims, div, End, take
from ep._src.base.arrays import iota


def exchange(
  dims: Dims,
  sender: End,
  receiver: End,
  is_sound: jax.Array,
  is_nan: jax.Array,
  *parts: tuple[jax.Array, jax.Array],
) -> list[jax.Array]:
  """Sends rows, stream by stream, and returns the wanted rows.

  A row has columns from each part, which are an array and a sequence: it sends
  `array[sequence]`. XLA takes as long to compile an exchange of one column as
  of many, so all parts travel together.

  On a rank where `is_sound` is False, i.e. whose plan is not its own, every row
  that is sent or returned is NaN. Any index is kept in range, whatever the plan
  says.
  """
  arrays = [array for array, _ in parts]
  # Bytes travel in pairs. XLA refuses programs in which it would simplify two
  # casts, uint8 [n, 4] to float32 [n] and that to uint16 [n, 2], to one.
  unit = f"uint{8 * max(2, min(array.dtype.itemsize for array in arrays))}"
  bits = [_words(x, unit) for x in arrays]
  nan = jnp.array(jnp.iinfo(unit).max, unit)
  B, codes = dims.B, receiver.codes

  def rows(bits, at=None):
    """Returns all rows in sequence, or those at some places of it."""
    columns = [
      take(x, sequence if at is None else take(sequence, at))
      for x, (_, sequence) in zip(bits, parts, strict=True)
    ]
    return jnp.where(is_sound, jnp.concatenate(columns, -1), nan)

  def padded(*bits):
    """Sends one bucket of B rows to each rank."""
    sent = rows(bits, sender.start[:, None] + iota(B))
    if dims.P > 1:
      sent = lax.all_to_all(lax.optimization_barrier(sent), dims.axis, 0, 0)
    return take(sent.reshape(dims.no_code, -1), codes)

  def ragged(*bits):
    """Sends each stream in its own length."""
    sent = rows(bits)
    room = codes.size
    start = sender.start.clip(0, len(sent))
    remote_start = receiver.remote.clip(0, room)
    size = sender.size.clip(0)
    size = jnp.minimum(
      size, jnp.minimum(len(sent) - start, room - remote_start)
    )
    # Rows that no rank writes are never read, so any value will do. XLA would
    # build a constant once, outside of a loop, and copy it in each turn.
    unwritten = jnp.broadcast_to(sent.reshape(-1)[0], (room, *sent.shape[1:]))
    received = lax.ragged_all_to_all(
      sent,
      unwritten,
      start,
      size,
      remote_start,
      receiver.size.clip(0, room),
      axis_name=dims.axis,
    )
    rank = div(codes, B)
    start = take(receiver.start, rank)
    return take(received, start + codes - rank * B)

  if dims.P == 1:
    out = padded(*bits)
  else:
    out = lax.platform_dependent(*bits, cpu=padded, default=ragged)

  # In bfloat16 this selects between two variables, for with a constant XLA:CPU
  # loses bits. In the last element, denormals are flushed and NaNs quietened by
  #
  #   bitcast_convert_type(jnp.where(s, x, jnp.uint16(65535)), jnp.bfloat16)
  #
  # for a traced bool s and uint16 [7] x: a cast of a choice with a constant is
  # to LLVM a choice of casts, and if a bfloat16 is not only loaded and stored,
  # but one of two in a register, its code for x86 goes by way of float32.
  is_row = is_sound & (codes < dims.no_code)
  filler = jnp.where(is_nan | ~is_sound, nan, jnp.zeros_like(nan))
  out = jnp.where(is_row[:, None], out, filler.reshape(-1, 1))
  starts = np.cumsum([x.shape[1] for x in bits])[:-1]
  columns = jnp.split(out, starts, axis=1)
  return [*map(_of_words, columns, arrays)]


def _words(array: jax.Array, unit: str) -> jax.Array:
  """Returns the bits of rows [n, ...] as words [n, m] of the type `unit`."""
  if array.dtype.itemsize < np.dtype(unit).itemsize:
    array = array.reshape(len(array), -1, 2)
  return lax.bitcast_convert_type(array, unit).reshape(len(array), -1)


def _of_words(words: jax.Array, like: jax.Array) -> jax.Array:
  """Returns rows of words as rows like those of an array."""
  shape = len(words), *like.shape[1:]
  if like.dtype.itemsize > words.dtype.itemsize:
    words = words.reshape(*shape, -1)
  return lax.bitcast_convert_type(words, like.dtype).reshape(shape)


def share(dims: Dims, *arrays: jax.Array) -> list[jax.Array]:
  """Returns vectors of all ranks, as [P, n], in one collective."""
  mine = jnp.concatenate(arrays)[None]
  if dims.P > 1:
    mine = lax.all_gather(mine, dims.axis, tiled=True)
  return jnp.split(mine, np.cumsum([a.size for a in arrays])[:-1], axis=1)
