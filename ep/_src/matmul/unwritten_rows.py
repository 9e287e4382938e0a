# SPDX-License-Identifier: Apache-2.0
"""Arrays of rows that a loop on XLA:CPU fills, block by block.

The native library has two operations that XLA:CPU lacks:

  * an uninitialized array. XLA:CPU fills a new array with zeros, which takes
    time and memory for all pages, also for pages without used rows.
  * a bitcast of the used rows of an array. Loops access 16-bit floats as
    integers, because XLA:CPU would convert the whole array to float32 in each
    step. XLA's bitcast copies all rows.

Without the library, or for another process, a program uses XLA's operations.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ep._src.base import compat
from ep._src.base.arrays import expanded, iota
from ep._src.lax import primitive
from ep._src.native import ffi

# The value of rows after the last slab, where XLA must write these rows.
TAILS = {"unspecified": 0, "zero": 0, "nan": jnp.nan}
_FILLED_ROWS = 128  # rows that one step of `finish` fills


# If negative indices are allowed, JAX adds operations to handle them.
slice_rows = functools.partial(
  lax.dynamic_slice_in_dim, allow_negative_indices=False
)


def new(shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
  """Returns a buffer of unwritten rows of `dtype`."""
  buffer: jax.Array = _unwritten_p.bind(shape=shape, dtype=_storage(dtype))[0]
  return buffer


def write(
  buffer: jax.Array,
  rows: jax.Array,
  start: jax.Array,
  inside: jax.Array | None = None,
) -> jax.Array:
  """Returns `buffer` with `rows`, or those in the mask `inside`, at `start`."""
  rows = _retyped(rows, buffer.dtype)
  if inside is not None:
    before = slice_rows(buffer, start, rows.shape[0])
    rows = jnp.where(expanded(inside, rows.ndim), rows, before)
  return lax.dynamic_update_slice_in_dim(
    buffer, rows, start, 0, allow_negative_indices=False
  )


def finish(
  buffer: jax.Array, dtype: DTypeLike, num_used: jax.Array, tail: str
) -> jax.Array:
  """Returns a buffer, whose first `num_used` rows were written, as `dtype`.

  The remaining rows become zero or NaN, or stay unwritten if `tail` is
  "unspecified".
  """
  if tail == "unspecified":
    return _retyped(buffer, dtype, num_used)
  num_rows = buffer.shape[0]
  height = min(_FILLED_ROWS, num_rows)
  filling = jnp.full((height, *buffer.shape[1:]), TAILS[tail], dtype)

  def fill(i: jax.Array, buffer: jax.Array) -> jax.Array:
    start = jnp.minimum(num_used + i * height, num_rows - height)
    return write(buffer, filling, start, start + iota(height) >= num_used)

  num_blocks = lax.div(num_rows - num_used + (height - 1), jnp.int32(height))
  return _retyped(lax.fori_loop(0, num_blocks, fill, buffer), dtype)


def cut(rows: jax.Array, num_used: jax.Array, tail: str = "zero") -> jax.Array:
  """Returns the rows, with zeros or NaNs after the first `num_used`."""
  if tail == "unspecified":
    return rows
  used = iota(rows.shape[0]) < num_used
  return jnp.where(expanded(used, rows.ndim), rows, TAILS[tail])


class Reader:
  """A function that reads blocks of the first `num_used` rows of an array."""

  def __init__(self, rows: jax.Array, num_used: jax.Array):
    self._dtype = rows.dtype
    self._buffer = _retyped(rows, _storage(rows.dtype), num_used)

  def __call__(self, start: jax.Array, height: int) -> jax.Array:
    return _retyped(slice_rows(self._buffer, start, height), self._dtype)


def _retyped(
  array: jax.Array, dtype: DTypeLike, num_used: jax.Array | None = None
) -> jax.Array:
  """Bitcasts all rows, or at least the first `num_used` rows, to `dtype`."""
  if array.dtype == dtype:
    return array
  if num_used is None:
    return lax.bitcast_convert_type(array, dtype)
  array = _retyped_p.bind(array, num_used, dtype=jnp.dtype(dtype))[0]
  return array


def _storage(dtype: DTypeLike) -> jnp.dtype:
  dtype = jnp.dtype(dtype)
  is_short = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
  return jnp.dtype(f"uint{8 * dtype.itemsize}") if is_short else dtype


def _primitive(
  name: str,
  out_type: Callable[..., Any],
  otherwise: Callable[..., Any],
  **options: Any,
) -> compat.Primitive:
  """Makes a primitive that lowers to the library's `name`, or to `otherwise`.

  The primitive has no derivatives, because only lowerings of other primitives
  use it. `jax.ffi.ffi_lowering` takes the options.
  """
  lower_otherwise = compat.lower_local(
    lambda *operands, **params: [otherwise(*operands, **params)]
  )
  lower_natively = jax.ffi.ffi_lowering(name, **options)

  def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
    if ffi.is_native(ctx):
      return lower_natively(ctx, *operands)
    return lower_otherwise(ctx, *operands, **params)

  return primitive.new(
    name,
    lambda *operands, **params: [out_type(*operands, **params)],
    lower_otherwise,
    on_cpu=lower,
  )


_unwritten_p = _primitive(
  "ep_unwritten",
  lambda *, shape, dtype: jax.core.ShapedArray(shape, dtype),
  lambda *, shape, dtype: jnp.zeros(shape, dtype),
  # Without a side effect, XLA would hoist the array out of a scan over layers,
  # and copy the array in each layer.
  has_side_effect=True,
)
_retyped_p = _primitive(
  "ep_retyped",
  lambda buffer, num_used, *, dtype: buffer.update(dtype=dtype),
  lambda buffer, num_used, *, dtype: lax.bitcast_convert_type(buffer, dtype),
)
