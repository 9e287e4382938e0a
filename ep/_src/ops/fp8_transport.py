# SPDX-License-Identifier: Apache-2.0
"""Packs fp8 or int8 rows with their scales, and sends a layer's rows as fp8."""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from ep._src.base import compat
from ep._src.base.group import Sizes
from ep._src.ops import quantizers
from ep._src.ops.row_map import map_used_rows


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


def unpack(
  packed: jax.Array, rows: Any, scales: Any
) -> tuple[jax.Array, jax.Array]:
  """Inverts `pack`: returns rows and scales, of the widths and dtypes given."""
  H, S, size = rows.shape[1], scales.shape[1], scales.dtype.itemsize
  row_bytes, scale_bytes, _ = jnp.split(packed, [H, H + S * size], axis=1)
  shape = len(packed), S
  return (
    lax.bitcast_convert_type(row_bytes, rows.dtype),
    lax.bitcast_convert_type(
      scale_bytes.reshape(*shape, size), scales.dtype
    ).reshape(shape),
  )


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
  types = tuple(map(jax.typeof, quantized))
  factors_of, rows_of = _readers(types, rows.dtype)
  # Two loops: in one loop, XLA:CPU would recompute a scale for each element.
  factors = map_used_rows(factors_of, group_sizes, received)
  rows = map_used_rows(rows_of, group_sizes, received, factors, tail=sizes.tail)
  return [rows, *weights]


@functools.cache  # JAX lowers equal functions once for all ops of a program
def _readers(
  types: tuple[Any, Any], dtype: jnp.dtype
) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
  """Returns functions that dequantize blocks of packed rows of `types`.

  The first returns the scales as float32 factors; the second returns the rows
  in `dtype`, given the factors.
  """

  def factors_of(packed: jax.Array) -> jax.Array:
    rows, scales = unpack(packed, *types)
    return quantizers.factors(scales, rows.dtype)

  def rows_of(packed: jax.Array, factors: jax.Array) -> jax.Array:
    rows, _ = unpack(packed, *types)
    return quantizers.multiply(rows, factors, dtype)

  return factors_of, rows_of
