# SPDX-License-Identifier: Apache-2.0
"""Moves rows to slots in one byte an element, as a layer's `wire` says."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from ep._src.base import compat, quantizers
from ep._src.base.backend import OpParams
from ep._src.matmul.row_map import map_used_rows
from ep._src.ops import packing


def move(
  of_bytes: compat.Primitive,
  format: str,
  params: OpParams,
  mem: jax.Array,
  group_sizes: jax.Array,
  rows: jax.Array,
  *weights: jax.Array,
) -> list[jax.Array]:
  """Returns the slots of rows [T, H], and of their weights, if there are any.

  `of_bytes` moves what `ep.quant.quantize` makes of them.
  """
  parts = quantizers.quantize(rows, format)
  moved, *weights = of_bytes.bind(
    mem, group_sizes, packing.packed(parts), *weights, params=params
  )
  # In one loop, XLA:CPU would compute a block's scale again for each element.
  columns = packing.columns(parts)
  factors = map_used_rows(_Factors(columns), group_sizes, moved)
  read = _Rows(columns, rows.dtype)
  rows = map_used_rows(read, group_sizes, moved, factors, tail=params.tail)
  return [rows, *weights]


@dataclasses.dataclass(frozen=True)
class _Factors:
  """A function of blocks: packed rows to the factors of their scales."""

  columns: tuple[packing.Columns, ...]

  def __call__(self, moved: jax.Array) -> jax.Array:
    rows, scales = packing.unpacked(moved, self.columns)
    return quantizers.factors(scales, rows.dtype)


@dataclasses.dataclass(frozen=True)
class _Rows:
  """A function of blocks: packed rows and their factors to rows of `dtype`."""

  columns: tuple[packing.Columns, ...]
  dtype: jnp.dtype

  def __call__(self, moved: jax.Array, factors: jax.Array) -> jax.Array:
    rows, _ = packing.unpacked(moved, self.columns)
    return quantizers.multiply(rows, factors, self.dtype)
