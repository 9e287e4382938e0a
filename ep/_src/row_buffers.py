# SPDX-License-Identifier: Apache-2.0
"""Arrays of rows that a loop on XLA:CPU fills, block by block.

XLA:CPU lacks two operations that do nothing, and offers only slower ones:

  * an array that nobody writes. It fills one with zeros, so that each of its
    pages takes time and memory, also those that no row ever reaches.
  * bits under another type. It updates an array of 16-bit floats by conversion
    of the whole array to float32 and back. So a buffer holds such rows as whole
    numbers, which at the end it would copy.

Both are calls of `ep_nothing` in the native library, which leaves its result as
it is. A program without the library, or for another process, takes XLA's way.
"""

from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp

from ep._src import compat, ffi


def new(shape: tuple[int, ...], dtype, tail: str) -> jax.Array:
  """Returns a buffer of rows of `dtype`, whose rows are zero, NaN or unwritten.

  `tail` is "zero", "nan" or "unspecified", and all rows are of that kind.
  """
  if tail == "unspecified":
    return _unwritten_p.bind(shape=shape, dtype=_storage(dtype))
  value = {"zero": 0, "nan": jnp.nan}[tail]
  return _encode(jnp.full(shape, value, dtype))


def write(
  buffer: jax.Array, rows: jax.Array, start: jax.Array, inside=None
) -> jax.Array:
  """Returns the buffer with `rows` at `start`; only those `inside`, if given."""
  rows = _encode(rows)
  if inside is not None:
    before = lax.dynamic_slice_in_dim(buffer, start, rows.shape[0])
    inside = inside.reshape(-1, *[1] * (rows.ndim - 1))
    rows = jnp.where(inside, rows, before)
  return lax.dynamic_update_slice_in_dim(buffer, rows, start, 0)


def finish(buffer: jax.Array, dtype) -> jax.Array:
  """Returns the rows of a buffer, which is not used after that."""
  same = buffer.dtype == dtype
  return buffer if same else _retyped_p.bind(buffer, dtype=jnp.dtype(dtype))


def _storage(dtype):
  dtype = jnp.dtype(dtype)
  is_short = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
  return jnp.dtype(f"uint{8 * dtype.itemsize}") if is_short else dtype


def _encode(rows):
  storage = _storage(rows.dtype)
  same = rows.dtype == storage
  return rows if same else lax.bitcast_convert_type(rows, storage)


def _nothing(name, out_type, otherwise):
  """Makes a primitive that `ep_nothing` or `otherwise` computes.

  It is for the lowerings of other primitives, so it has no other rules.
  """
  primitive = compat.Primitive(name)
  primitive.def_abstract_eval(out_type)
  lower = compat.mlir.lower_fun(otherwise, multiple_results=False)

  def lower_to_nothing(ctx, *operands, **params):
    if not compat.can_call_python(ctx) or not ffi.has_library("host"):
      return lower(ctx, *operands, **params)
    aliases = {i: i for i in range(len(operands))}
    rule = jax.ffi.ffi_lowering("ep_nothing", operand_output_aliases=aliases)
    return rule(ctx, *operands)

  compat.mlir.register_lowering(primitive, lower_to_nothing, "cpu")
  return primitive


_unwritten_p = _nothing(
  "ep_unwritten",
  lambda *, shape, dtype: jax.core.ShapedArray(shape, dtype),
  lambda *, shape, dtype: jnp.zeros(shape, dtype),
)
_retyped_p = _nothing(
  "ep_retyped",
  lambda buffer, *, dtype: buffer.update(dtype=dtype),
  lambda buffer, *, dtype: lax.bitcast_convert_type(buffer, dtype),
)
