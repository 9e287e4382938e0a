# SPDX-License-Identifier: Apache-2.0
"""Packs fp8 or int8 rows with their scales, and sends a layer's rows as fp8."""

from __future__ import annotations

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from ep._src.base import compat
from ep._src.base.group import Sizes
from ep._src.ops import quantizers
from ep._src.ops.row_map import map_used_rows


class Layout(NamedTuple):
  """The sizes and dtypes of fp8 or int8 rows [n, H] and their scales [n, S]."""

  width: int
  dtype: str
  num_scales: int
  scale_dtype: str

  @classmethod
  def of(cls, rows: jax.Array, scales: jax.Array) -> Layout:
    """Returns the layout of rows [n, H] and scales [n, S]."""
    H, S = rows.shape[1], scales.shape[1]
    return cls(H, rows.dtype.name, S, scales.dtype.name)


def pack(rows: jax.Array, scales: jax.Array) -> jax.Array:
  """Returns each row and its scales side by side, as uint8 [n, bytes].

  The number of bytes is even, because native backends copy pairs of bytes.
  """
  num_bytes = rows.shape[1] + scales.shape[1] * scales.dtype.itemsize
  if not len(rows):
    # Workaround (seen in jax 0.12.0): Shardy cannot partition some functions
    # whose operands are all empty. So the result is a constant.
    return jnp.zeros((0, num_bytes + num_bytes % 2), jnp.uint8)
  parts = [lax.bitcast_convert_type(x, jnp.uint8) for x in (rows, scales)]
  packed = jnp.concatenate([x.reshape(len(x), -1) for x in parts], axis=1)
  return jnp.pad(packed, ((0, 0), (0, num_bytes % 2)))


def unpack(packed: jax.Array, layout: Layout) -> tuple[jax.Array, jax.Array]:
  """Inverts `pack`: returns rows [n, H] and scales [n, S]."""
  H, dtype, S, scale_dtype = layout
  size = jnp.dtype(scale_dtype).itemsize
  rows, scales, _ = jnp.split(packed, [H, H + S * size], axis=1)
  shape = len(packed), S
  scales = lax.bitcast_convert_type(scales.reshape(*shape, size), scale_dtype)
  return lax.bitcast_convert_type(rows, dtype), scales.reshape(shape)


def send(
  of_bytes: compat.Primitive,
  sizes: Sizes,
  mem: jax.Array,
  group_sizes: jax.Array,
  rows: jax.Array,
  *weights: jax.Array,
) -> list[jax.Array]:
  """Quantizes rows [T, H], sends them by `of_bytes`, and dequantizes them.

  Returns the received rows and, if `weights` are given, the received weights.
  """
  assert sizes.wire is not None
  quantized = quantizers.quantize(rows, sizes.wire)
  received, *weights = of_bytes.bind(
    mem, group_sizes, pack(*quantized), *weights, sizes=sizes
  )
  layout, dtype = Layout.of(*quantized), rows.dtype

  def factors_of(packed: jax.Array) -> jax.Array:
    rows, scales = unpack(packed, layout)
    return quantizers.factors(scales, rows.dtype)

  def rows_of(packed: jax.Array, factors: jax.Array) -> jax.Array:
    rows, _ = unpack(packed, layout)
    return quantizers.multiply(rows, factors, dtype)

  # Two loops: in one loop, XLA:CPU would recompute a scale for each element.
  factors = map_used_rows(factors_of, group_sizes, received)
  rows = map_used_rows(rows_of, group_sizes, received, factors, tail=sizes.tail)
  return [rows, *weights]
