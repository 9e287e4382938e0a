# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls on Hopper and Blackwell GPUs: kernels of Pallas Mosaic GPU.

The functions are the same as in by_tiles.py, for bfloat16 and float16. Their
kernels loop over blocks of the result, which mosaic_sums.py computes.

  * expand and contract loop over the tiles of row_tiles.py. A tile may include
    rows of other slabs and unused rows, which the kernel does not store.
  * outer loops over the matrices and sums over rows. At the borders of a slab,
    it sets the rows of other slabs to zero in both operands, because NaN times
    zero is NaN.

Tensor cores read blocks in shared memory by rows or by columns, so no matrix is
transposed in memory. The last block of columns ends with the matrix, and may
compute columns of the block before again, with the same bits.

A copy to shared memory begins at a multiple of 8 rows and 64 columns. So the
number of rows must be a multiple of 8, and widths multiples of 64, both at
least 64. On Blackwell both are at least 128, the rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
from jax import Array, lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from ep._src.matmul import mosaic_sums, row_tiles
from ep._src.matmul.mosaic_sums import Block, Blocks
from ep._src.matmul.unwritten_rows import TAILS

_Arrays = Sequence[Array]


def expand(
  sizes: Array, rows: Array, matrices: _Arrays, tail: str, **options: Any
) -> list[Array]:
  return [
    _products("expand", sizes, [rows], [w], tail, **options) for w in matrices
  ]


def contract(
  sizes: Array, outs: _Arrays, matrices: _Arrays, tail: str, **options: Any
) -> Array:
  return _products("contract", sizes, outs, matrices, tail, **options)


def outer(
  sizes: Array, rows: Array, outs: _Arrays, dtype: jnp.dtype, **options: Any
) -> list[Array]:
  return [_outer(sizes, rows, y, dtype, **options) for y in outs]


def _products(
  op: str,
  sizes: Array,
  lefts: _Arrays,
  matrices: _Arrays,
  tail: str,
  *,
  blocks: Blocks | None = None,
  **options: Any,
) -> Array:
  """Returns the sum of the products of lefts and matrices, rounded once."""
  is_transposed = op == "contract"
  (num_rows, depth), dtype = lefts[0].shape, lefts[0].dtype
  num_slabs, *shape = matrices[0].shape
  width = shape[0 if is_transposed else 1]
  b = blocks or Blocks.of(num_rows, width)
  if tail != "unspecified":  # Treat the tail as one more slab.
    sizes = jnp.append(sizes, num_rows - sizes.sum(dtype=jnp.int32))
  tiles = row_tiles.tiles(sizes, num_rows, b.rows)
  num_columns = pl.cdiv(width, b.columns)

  def plan(
    count: Any, slabs: Any, starts: Any, begins: Any, ends: Any, *operands: Any
  ) -> tuple[Array, Callable[[Array], Block]]:
    lefts, rights = operands[: len(matrices)], operands[len(matrices) : -1]

    def block(index: Array) -> Block:
      tile, column = _place(index, count[0], num_columns, b.panel)
      slab, start = slabs[tile], _aligned_row(starts[tile])
      column = _start(column, b.columns, width)

      def source(left: Any, right: Any, step: Array) -> tuple[Any, Any]:
        inner, columns = (
          pl.ds(step * b.inner, b.inner),
          pl.ds(column, b.columns),
        )
        place = (columns, inner) if is_transposed else (inner, columns)
        return left.at[pl.ds(start, b.rows), inner], right.at[slab, *place]

      num_steps = jnp.where(slab < num_slabs, jnp.int32(depth // b.inner), 0)
      return Block(
        [
          functools.partial(source, *x) for x in zip(lefts, rights, strict=True)
        ],
        num_steps,
        [(0, num_steps * len(matrices), None)],
        operands[-1],
        (start, begins[tile], ends[tile]),
        column,
      )

    return count[0] * num_columns, block

  def product(x: Any, w: Any, rows: Any) -> tuple[Any, Any]:
    return x.at[rows], w.transpose((1, 0)) if is_transposed else w

  matrix = b.columns, b.inner
  shapes = (b.rows, b.inner), matrix if is_transposed else matrix[::-1]
  out_type = jax.ShapeDtypeStruct((num_rows, width), dtype)
  operands = *tiles, *lefts, *(w.astype(dtype) for w in matrices)
  return mosaic_sums.sums(
    plan, product, shapes, TAILS[tail], out_type, operands, b, **options
  )


def _outer(
  sizes: Array,
  rows: Array,
  outs: Array,
  dtype: jnp.dtype,
  *,
  blocks: Blocks | None = None,
  **options: Any,
) -> Array:
  num_rows, height = rows.shape
  width = outs.shape[1]
  b = blocks or Blocks.of(height, width)
  num_blocks = pl.cdiv(height, b.rows), pl.cdiv(width, b.columns)
  per_slab = num_blocks[0] * num_blocks[1]

  def plan(
    starts: Any, begins: Any, ends: Any, left: Any, right: Any, out: Any
  ) -> tuple[int, Callable[[Array], Block]]:
    def block(index: Array) -> Block:
      slab = lax.div(index, jnp.int32(per_slab))
      row, column = _place(index - slab * per_slab, *num_blocks, b.panel)
      row = _start(row, b.rows, height)
      column = _start(column, b.columns, width)
      start, begin, end = _aligned_row(starts[slab]), begins[slab], ends[slab]

      def source(step: Array) -> tuple[Any, Any]:
        rows = pl.ds(start + step * b.inner, b.inner)
        return (
          left.at[rows, pl.ds(row, b.rows)],
          right.at[rows, pl.ds(column, b.columns)],
        )

      def mask(step: Array, ref: Any) -> Array:
        place = step * b.inner + lax.broadcasted_iota(jnp.int32, ref.shape, 0)
        inside = (place >= begin) & (place < end)
        return jnp.where(inside, ref[...], jnp.zeros_like(ref))

      num_steps = jnp.where(end > begin, pl.cdiv(end, b.inner), 0)
      first = lax.min(num_steps, jnp.where(begin > 0, jnp.int32(1), 0))
      last = lax.max(first, lax.div(end, jnp.int32(b.inner)))
      steps = (0, first, mask), (first, last, None), (last, num_steps, mask)
      to = out.at[slab], (row, 0, b.rows), column
      return Block([source], num_steps, steps, *to)

    return len(sizes) * per_slab, block

  def product(x: Any, y: Any, rows: Any) -> tuple[Any, Any]:
    return x.at[:, rows].transpose((1, 0)), y

  shapes = (b.inner, b.rows), (b.inner, b.columns)
  out_type = jax.ShapeDtypeStruct((len(sizes), height, width), dtype)
  operands = *row_tiles.slabs(sizes, num_rows), rows, outs
  return mosaic_sums.sums(
    plan, product, shapes, 0, out_type, operands, b, **options
  )


def _place(
  index: Array, num_rows: int, num_columns: int, panel: int
) -> tuple[Array, Array]:
  """Returns row and column of a block; `index` counts blocks panel by panel."""
  before = lax.div(index, num_rows * panel) * panel
  index -= before * num_rows
  columns = lax.min(jnp.int32(panel), num_columns - before)
  return lax.div(index, columns), before + lax.rem(index, columns)


def _start(index: Array, size: int, length: int) -> Array:
  """Returns the start of a block; the last block ends where the array ends."""
  start = lax.min(index * size, jnp.int32(length - size))
  return pl.multiple_of(start, 64)


def _aligned_row(row: Array) -> Array:
  return pl.multiple_of(row, row_tiles.ALIGNMENT)
