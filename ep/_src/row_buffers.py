# SPDX-License-Identifier: Apache-2.0
"""Arrays that a loop on XLA:CPU fills with blocks of rows.

XLA:CPU has no update in place of an array of a 16-bit float: it would convert
all of it to float32 and back for every block. So these hold the bits of such
rows as whole numbers.
"""

from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp


def zeros(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
  """Returns a buffer of rows of `dtype` that are zero."""
  return jnp.zeros(shape, _storage(dtype))


def encode(rows: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
  """Returns rows as a buffer stores those of `dtype`."""
  rows = rows.astype(dtype)
  storage = _storage(dtype)
  return rows if dtype == storage else lax.bitcast_convert_type(rows, storage)


def finish(buffer: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
  """Returns the rows of a buffer as an array of `dtype`."""
  same = buffer.dtype == dtype
  return buffer if same else lax.bitcast_convert_type(buffer, dtype)


def _storage(dtype):
  dtype = jnp.dtype(dtype)
  is_short = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
  return jnp.dtype(f"uint{8 * dtype.itemsize}") if is_short else dtype
