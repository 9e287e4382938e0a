# SPDX-License-Identifier: Apache-2.0
"""Sends rows between the ranks of a domain along a plan, for the backend "xla".

Rows are sent as integers, so that no platform flushes a denormal or changes a
NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

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
  """Sends rows, stream by stream, and returns the received rows.

  Each of `parts` is an array and a sequence of indices: a sent row consists of
  the columns of `array[sequence]` of all parts. They share one exchange,
  because XLA compiles an exchange of one column no faster.

  If `is_sound` is False, the rank sends and returns only NaN rows. Indices are
  clipped, so a wrong plan cannot read out of bounds.
  """
  arrays = [array for array, _ in parts]
  # Bytes are sent as uint16, in pairs. XLA rejects a program if it merges casts
  # of uint8 [n, 4] to float32 [n] and of float32 [n] to uint16 [n, 2].
  unit = f"uint{8 * max(2, min(array.dtype.itemsize for array in arrays))}"
  bits = [_words(x, unit) for x in arrays]
  nan = jnp.array(jnp.iinfo(unit).max, unit)
  B, codes = dims.B, receiver.codes

  def rows(bits: Sequence[jax.Array], at: jax.Array | None = None) -> jax.Array:
    """Returns all rows to send, or only the rows at the indices `at`."""
    columns = [
      take(x, sequence if at is None else take(sequence, at))
      for x, (_, sequence) in zip(bits, parts, strict=True)
    ]
    return jnp.where(is_sound, jnp.concatenate(columns, -1), nan)

  def padded(*bits: jax.Array) -> jax.Array:
    """Sends a bucket of B rows to each rank, by `all_to_all`."""
    sent = rows(bits, sender.start[:, None] + iota(B))
    if dims.P > 1:
      sent = lax.all_to_all(lax.optimization_barrier(sent), dims.axis, 0, 0)
    return take(sent.reshape(dims.no_code, -1), codes)

  def ragged(*bits: jax.Array) -> jax.Array:
    """Sends only the rows of each stream, by `ragged_all_to_all`."""
    sent = rows(bits)
    num = codes.size
    start = sender.start.clip(0, len(sent))
    remote_start = receiver.remote.clip(0, num)
    most = jnp.minimum(len(sent) - start, num - remote_start)
    size = jnp.minimum(sender.size.clip(0), most)
    # Unwritten rows are never read, so any value will do. XLA would hoist a
    # constant out of a loop, and copy the constant in each iteration.
    unwritten = jnp.broadcast_to(sent.reshape(-1)[0], (num, *sent.shape[1:]))
    received = lax.ragged_all_to_all(
      sent,
      unwritten,
      start,
      size,
      remote_start,
      receiver.size.clip(0, num),
      axis_name=dims.axis,
    )
    rank = div(codes, B)
    start = take(receiver.start, rank)
    return take(received, start + codes - rank * B)

  if dims.P == 1:
    out = padded(*bits)
  else:
    out = lax.platform_dependent(*bits, cpu=padded, default=ragged)

  # The filler is a variable, because XLA:CPU loses bits of a bfloat16 that it
  # selects beside a constant: for a traced bool s and uint16 [7] x,
  #
  #   bitcast_convert_type(jnp.where(s, x, jnp.uint16(65535)), jnp.bfloat16)
  #
  # flushes a denormal, and makes a NaN quiet, in the last element. LLVM selects
  # after the cast, and on x86 converts the bfloat16 to float32 and back.
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
  """Returns words [n, m] as rows of the shape and dtype of `like`."""
  shape = len(words), *like.shape[1:]
  if like.dtype.itemsize > words.dtype.itemsize:
    words = words.reshape(*shape, -1)
  return lax.bitcast_convert_type(words, like.dtype).reshape(shape)


def share(dims: Dims, *arrays: jax.Array) -> list[jax.Array]:
  """All-gathers vectors [n] to [P, n], all of them in one collective."""
  mine = jnp.concatenate(arrays)[None]
  if dims.P > 1:
    mine = lax.all_gather(mine, dims.axis, tiled=True)
  return jnp.split(mine, np.cumsum([a.size for a in arrays])[:-1], axis=1)
