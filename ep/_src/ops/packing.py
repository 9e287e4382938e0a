# SPDX-License-Identifier: Apache-2.0
"""Packs rows of several arrays, such as elements and scales, into bytes.

Dispatch moves the bytes of a row as they are, so what is in one row arrives in
one row, on every backend.
"""

from __future__ import annotations

from collections.abc import Sequence
import math
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np


class Columns(NamedTuple):
  """The columns of an array [n, width], and their dtype."""

  width: int
  dtype: str

  @property
  def num_bytes(self) -> int:
    """The bytes of a row."""
    return self.width * jnp.dtype(self.dtype).itemsize


def columns(arrays: Sequence[jax.Array]) -> tuple[Columns, ...]:
  """Returns what `unpacked` needs to know of arrays [n, ...]."""
  return tuple(Columns(x.shape[1], x.dtype.name) for x in arrays)


def packed(arrays: Sequence[jax.Array]) -> jax.Array:
  """Returns the rows of arrays [n, ...] side by side: uint8 [n, bytes].

  The bytes are an even number: native backends move them in pairs.
  """
  if not len(arrays[0]):
    # Shardy of jaxlib 0.10.2 cannot partition a function all of whose operands
    # are empty, unless it does not use them.
    num_bytes = sum(c.num_bytes for c in columns(arrays))
    return jnp.zeros((0, num_bytes + num_bytes % 2), jnp.uint8)
  parts = [lax.bitcast_convert_type(x, jnp.uint8) for x in arrays]
  parts = [x.reshape(len(x), math.prod(x.shape[1:])) for x in parts]
  rows = jnp.concatenate(parts, axis=1)
  return jnp.pad(rows, ((0, 0), (0, rows.shape[1] % 2)))


def unpacked(
  rows: jax.Array, columns: Sequence[Columns]
) -> tuple[jax.Array, ...]:
  """Returns the arrays of which `packed` made the rows."""
  ends = np.cumsum([c.num_bytes for c in columns])
  parts = jnp.split(rows, ends, axis=1)[:-1]
  return tuple(_typed(x, *c) for x, c in zip(parts, columns, strict=True))


def _typed(part: jax.Array, width: int, dtype: str) -> jax.Array:
  size = jnp.dtype(dtype).itemsize
  shape = (len(part), width, size) if size > 1 else (len(part), width)
  return lax.bitcast_convert_type(part.reshape(shape), jnp.dtype(dtype))
