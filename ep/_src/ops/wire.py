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
  read = _Read(packing.columns(parts), rows.dtype)
  rows = map_used_rows(read, group_sizes, moved, tail=params.tail)
  return [rows, *weights]


@dataclasses.dataclass(frozen=True)
class _Read:
  """A function of blocks: packed rows to rows of `dtype`."""

  columns: tuple[packing.Columns, ...]
  dtype: jnp.dtype

  def __call__(self, rows: jax.Array) -> jax.Array:
    rows, scales = packing.unpacked(rows, self.columns)
    return quantizers.dequantize(rows, scales, self.dtype)
