# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls on Hopper and Blackwell GPUs: kernels of Pallas Mosaic GPU.

The functions are the same as in by_tiles.py, for bfloat16 and float16. A kernel
runs one thread block on each multiprocessor; each thread block loops over
blocks of the result. A pipeline copies blocks of the operands to shared memory
(TMA), and the tensor cores add products of blocks in float32. Hopper (WGMMA)
adds in registers, Blackwell (tcgen05) in tensor memory: the function
`accumulate` is the only difference.

  * expand and contract loop over the tiles of row_tiles.py. A tile may include
    rows of other slabs and unused rows, which the kernel does not store.
  * outer loops over the matrices and sums over rows. It sets the rows of other
    slabs to zero in both operands, because NaN times zero is NaN.

Tensor cores read blocks in shared memory by rows or by columns, so no matrix is
transposed in memory. The last block of columns ends with the matrix, and may
compute columns of the block before again, with the same bits.

A copy to shared memory begins at a multiple of 8 rows and 64 columns. So the
number of rows must be a multiple of 8, and widths multiples of 64, both at
least 64. On Blackwell both are at least 128, the rows of a block. `segments`
has no effect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from ep._src.matmul import row_tiles
from ep._src.matmul.unwritten_rows import TAILS

_Arrays = Sequence[Array]
_Shape = tuple[int, int]
_AddAll = Callable[[Callable[..., None], Callable[..., None]], None]
_Accumulate = Callable[[_Shape, _AddAll], Array]


@dataclasses.dataclass(frozen=True)
class Blocks:
  """Block sizes of a kernel.

  Attributes:
    rows: rows of a result block, 64 or 128; on Blackwell 128.
    columns: columns of a result block, a multiple of 64.
    inner: columns (rows for `outer`) whose products one pipeline step adds; a
      divisor of the number of columns.
    steps: pipeline steps with blocks in shared memory, 2 or more.
    panel: adjacent column blocks that the kernel computes before the next row
      of blocks, so that their operands stay in the cache.
  """

  rows: int = 128
  columns: int = 192
  inner: int = 64
  steps: int = 4
  panel: int = 8

  @classmethod
  def of(cls, op: str, height: int, width: int) -> Blocks:
    """Returns the block sizes for results [height, width]."""
    columns = (128, 64) if op == "outer" else (192, 128, 64)
    return cls(
      next(n for n in (128, 64) if n <= height),
      next(n for n in columns if n <= width),
    )


def expand(
  sizes: Array,
  segments: Array,
  rows: Array,
  matrices: _Arrays,
  tail: str,
  **options: Any,
) -> list[Array]:
  del segments
  return [
    _products("expand", sizes, [rows], [w], tail, **options) for w in matrices
  ]


def contract(
  sizes: Array,
  segments: Array,
  outs: _Arrays,
  matrices: _Arrays,
  tail: str,
  **options: Any,
) -> Array:
  del segments
  return _products("contract", sizes, outs, matrices, tail, **options)


def outer(
  sizes: Array,
  segments: Array,
  rows: Array,
  outs: _Arrays,
  dtype: jnp.dtype,
  **options: Any,
) -> list[Array]:
  del segments
  return [_outer(sizes, rows, y, dtype, **options) for y in outs]


def _products(
  op: str,
  sizes: Array,
  lefts: _Arrays,
  matrices: _Arrays,
  tail: str,
  *,
  num_cores: int,
  accumulate: _Accumulate,
  blocks: Blocks | None = None,
) -> Array:
  """Returns the sum of the products of lefts and matrices, rounded once."""
  is_transposed = op == "contract"
  (num_rows, _), dtype = lefts[0].shape, lefts[0].dtype
  num_slabs, *shape = matrices[0].shape
  width = shape[0 if is_transposed else 1]
  b = blocks or Blocks.of(op, num_rows, width)
  if tail != "unspecified":  # Treat the tail as one more slab.
    sizes = jnp.append(sizes, num_rows - sizes.sum(dtype=jnp.int32))
  tiles = row_tiles.tiles(sizes, num_rows, b.rows)

  def body(
    count: Any, slabs: Any, starts: Any, begins: Any, ends: Any, *operands: Any
  ) -> None:
    lefts, rights = operands[: len(matrices)], operands[len(matrices) : -1]

    def compute(tile: Array, column: Array) -> None:
      slab, start = slabs[tile], _aligned_row(starts[tile])
      column = _start(column, b.columns, width)

      def add_all(add: Callable[..., Any], wait: Callable[..., Any]) -> None:
        def multiply(step: Array, x: Any, w: Any) -> None:
          add(step, x, w.transpose((1, 0)) if is_transposed else w)

        for left, right in zip(lefts, rights, strict=True):
          columns = pl.ds(column, b.columns)
          x = left.at[pl.ds(start, b.rows)], (b.rows, b.inner), 1
          if is_transposed:
            w = right.at[slab, columns], (b.columns, b.inner), 1
          else:
            w = right.at[slab, :, columns], (b.inner, b.columns), 0
          num_steps = left.shape[1] // b.inner
          _pipeline(multiply, wait, num_steps, [x, w], b.steps)

      def store(values: Array) -> None:
        rows = start, begins[tile], ends[tile]
        _store(values.astype(dtype), operands[-1], rows, column)

      @pl.when(slab < num_slabs)
      def _() -> None:
        store(accumulate((b.rows, b.columns), add_all))

      if tail != "unspecified":

        @pl.when(slab == num_slabs)
        def _() -> None:
          store(jnp.full((b.rows, b.columns), TAILS[tail], jnp.float32))

    num_columns = pl.cdiv(width, b.columns)

    @plgpu.nd_loop((count[0] * num_columns,), collective_axes="core")
    def _(loop: Any) -> None:
      compute(*_place(loop.index[0], count[0], num_columns, b.panel))

  out_type = jax.ShapeDtypeStruct((num_rows, width), dtype)
  operands = *tiles, *lefts, *(w.astype(dtype) for w in matrices)
  out: Array = run(body, out_type, num_cores, *operands)
  return out


def _outer(
  sizes: Array,
  rows: Array,
  outs: Array,
  dtype: jnp.dtype,
  *,
  num_cores: int,
  accumulate: _Accumulate,
  blocks: Blocks | None = None,
) -> Array:
  num_rows, height = rows.shape
  width = outs.shape[1]
  b = blocks or Blocks.of("outer", height, width)

  def body(
    starts: Any, begins: Any, ends: Any, left: Any, right: Any, out: Any
  ) -> None:
    def compute(slab: Array, row: Array, column: Array) -> None:
      row = _start(row, b.rows, height)
      column = _start(column, b.columns, width)
      begin, end = begins[slab], ends[slab]
      rows = pl.ds(_aligned_row(starts[slab]), num_rows)

      def add_all(add: Callable[..., Any], wait: Callable[..., Any]) -> None:
        def multiply(step: Array, x: Any, y: Any) -> None:
          first = step * b.inner

          @pl.when((first < begin) | (first + b.inner > end))
          def _() -> None:
            for ref in (x, y):
              place = first + lax.broadcasted_iota(jnp.int32, ref.shape, 0)
              inside = (place >= begin) & (place < end)
              ref[...] = jnp.where(inside, ref[...], jnp.zeros_like(ref))
            plgpu.commit_smem()

          add(step, x.transpose((1, 0)), y)

        x = left.at[rows, pl.ds(row, b.rows)], (b.inner, b.rows), 0
        y = right.at[rows, pl.ds(column, b.columns)], (b.inner, b.columns), 0

        @pl.when(end > begin)
        def _() -> None:
          num_steps = pl.cdiv(end, b.inner)
          _pipeline(multiply, wait, num_steps, [x, y], b.steps)

      values = accumulate((b.rows, b.columns), add_all)
      _store(values.astype(dtype), out.at[slab], (row, 0, b.rows), column)

    num_blocks = pl.cdiv(height, b.rows), pl.cdiv(width, b.columns)

    @plgpu.nd_loop(
      (len(sizes), num_blocks[0] * num_blocks[1]), collective_axes="core"
    )
    def _(loop: Any) -> None:
      slab, index = loop.index
      compute(slab, *_place(index, *num_blocks, b.panel))

  out_type = jax.ShapeDtypeStruct((len(sizes), height, width), dtype)
  slabs = row_tiles.slabs(sizes, num_rows)
  out: Array = run(body, out_type, num_cores, *slabs, rows, outs)
  return out


def run(
  body: Callable[..., Any], out_type: Any, num_blocks: int, *operands: Any
) -> Any:
  """Runs the kernel `body` in `num_blocks` thread blocks."""
  kernel = plgpu.kernel(
    body,
    out_type=out_type,
    grid=(num_blocks,),
    grid_names=("core",),
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Warpgroup
    ),
  )
  with jax.enable_x64(False):  # Pallas mixes Python integers with int32.
    return kernel(*operands)


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


def in_registers(shape: _Shape, add_all: _AddAll) -> Array:
  """Adds products in registers, on Hopper (WGMMA), and returns the sum.

  `add_all(add, wait)` runs pipelines. A pipeline calls `add(step, x, y)` in
  each step, then `wait(num_steps)`. The pipeline may overwrite the blocks of a
  step after the next step.
  """

  def sums(acc: Any) -> Any:
    add_all(
      lambda _, x, y: plgpu.wgmma(acc, x, y), lambda _: plgpu.wgmma_wait(0)
    )
    return acc[...]

  total: Array = pl.run_scoped(sums, plgpu.WGMMAAccumulatorRef(shape))
  return total


def in_tensor_memory(shape: _Shape, add_all: _AddAll) -> Array:
  """Adds products in tensor memory, on Blackwell, and returns the sum."""

  def sums(acc: Any, done: Any) -> Any:
    def wait(num_steps: Array) -> None:
      plgpu.barrier_wait(done.at[lax.rem(num_steps - 1, jnp.int32(2))])

    def add(step: Array, x: Any, y: Any) -> None:
      plgpu.tcgen05_mma(acc, x, y, done.at[lax.rem(step, jnp.int32(2))])
      pl.when(step > 0)(lambda: wait(step))

    zeros = jnp.zeros(shape, jnp.float32)
    plgpu.async_store_tmem(acc, plgpu.layout_cast(zeros, plgpu.Layout.TCGEN05))
    plgpu.commit_tmem()
    add_all(add, wait)
    values = plgpu.async_load_tmem(acc)
    plgpu.wait_load_tmem()
    return values

  total: Array = pl.run_scoped(
    sums,
    plgpu.TMEM(shape, jnp.float32),
    plgpu.Barrier(num_barriers=2, orders_tensor_core=True),
  )
  return total


def _pipeline(
  multiply: Callable[..., Any],
  wait: Callable[..., Any],
  num_steps: Array,
  operands: Sequence[Any],
  max_concurrent_steps: int,
) -> None:
  """Calls `multiply(step, *blocks)` for the blocks of operands, pipelined.

  Each operand is (ref, shape of a block, axis along which the steps go).
  """

  def spec(shape: _Shape, axis: int) -> Any:
    def index(step: Array) -> Any:
      return (step, 0) if axis == 0 else (0, step)

    return plgpu.BlockSpec(shape, index, delay_release=1)

  plgpu.emit_pipeline(
    lambda steps, *blocks: multiply(*steps, *blocks),
    grid=(num_steps,),
    in_specs=[spec(shape, axis) for _, shape, axis in operands],
    max_concurrent_steps=max_concurrent_steps,
  )(*(ref for ref, _, _ in operands))
  wait(num_steps)  # The next pipeline uses the same shared memory.


def _store(
  values: Array, out: Any, rows: tuple[Any, Any, Any], column: Array
) -> None:
  """Writes the rows `begin` to `end` of a block, in copies of 2^i rows each.

  The number of rows of a copy is static.
  """
  start, begin, end = rows
  height, width = values.shape

  @functools.partial(
    pl.run_scoped, staged=plgpu.SMEM(values.shape, values.dtype)
  )
  def _(staged: Any) -> None:
    staged[...] = values
    plgpu.commit_smem()
    row, size = begin, height
    while size:

      @pl.when(((end - begin) & size) != 0)
      def _(row: Any = row, size: int = size) -> None:
        plgpu.copy_smem_to_gmem(
          staged.at[pl.ds(row, size)],
          out.at[pl.ds(start + row, size), pl.ds(column, width)],
        )

      row += (end - begin) & size
      size //= 2
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
