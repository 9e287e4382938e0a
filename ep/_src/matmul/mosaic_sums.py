# SPDX-License-Identifier: Apache-2.0
"""Kernels of Pallas Mosaic GPU that write sums of products of blocks.

A kernel runs one thread block on each multiprocessor; each thread block loops
over blocks of the result. Its warpgroups share a ring of stages in shared
memory:

    memory warpgroup      waits until a stage is free, then copies a block of
                          each operand to the stage (TMA)
    adding warpgroups     wait until a stage is filled, have the tensor cores
                          add the product of its blocks in float32, then free
                          the stage; after the last step, write the sum

The memory warpgroup does not wait for a block of the result: while the others
write a sum, the memory warpgroup fills the ring for the next block.

On Hopper (WGMMA) two warpgroups add half of the rows each, in registers. On
Blackwell (tcgen05) one warpgroup adds all rows, in tensor memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

_Shape = tuple[int, int]
_Mask = Callable[[Array, Any], Array]


@dataclasses.dataclass(frozen=True)
class Blocks:
  """Block sizes of a kernel.

  Attributes:
    rows: rows of a result block, 64 or 128; on Blackwell 128.
    columns: columns of a result block, a multiple of 64, at most 256.
    inner: columns (rows for `outer`) whose products one step adds; a divisor of
      the number of columns.
    stages: stages of the ring in shared memory, 2 or more.
    panel: adjacent column blocks that the kernel computes before the next row
      of blocks, so that their operands stay in the cache.
  """

  rows: int = 128
  columns: int = 256
  inner: int = 64
  stages: int = 4
  panel: int = 8

  @classmethod
  def of(cls, height: int, width: int) -> Blocks:
    """Returns the block sizes for results [height, width].

    Picks the columns for which a kernel copies least to shared memory.
    """
    rows = next(n for n in (128, 64) if n <= height)
    columns = (n for n in (256, 192, 128, 64) if n <= width)
    return cls(rows, min(columns, key=lambda n: -(-width // n) * (rows + n)))


class Block(NamedTuple):
  """A block of the result: a sum of products of blocks of the operands.

  Attributes:
    sources: for each pair of operands, a function from a step to the blocks
      that the step multiplies.
    num_steps: the number of steps of each source.
    steps: ranges of all steps in order, (first, last + 1, mask); `mask(step,
      ref)` returns the values of a block to multiply; None keeps them.
    out: the array [rows, columns] to write to.
    rows: (start, begin, end); the kernel writes the rows `start + begin` to
      `start + end`.
    column: the start of the columns.
  """

  sources: Sequence[Callable[[Array], tuple[Any, Any]]]
  num_steps: Any
  steps: Sequence[tuple[Any, Any, _Mask | None]]
  out: Any
  rows: tuple[Any, Any, Any]
  column: Array


class Accumulate(NamedTuple):
  """Adds products of blocks on a kind of GPU.

  Attributes:
    rows: most rows of a result block that one warpgroup adds.
    add: adds all products; see `_add_in_registers`.
    scratch: returns the types of further arguments of `add`.
    is_tensor_core_free: whether the tensor cores free the stages of the ring.
  """

  rows: int
  add: Callable[..., Callable[[slice], Array]]
  scratch: Callable[[Blocks], Sequence[Any]]
  is_tensor_core_free: bool


def sums(
  plan: Callable[..., tuple[Any, Callable[[Array], Block]]],
  product: Callable[[Any, Any, Any], tuple[Any, Any]],
  shapes: tuple[_Shape, _Shape],
  empty: float,
  out_type: Any,
  operands: Sequence[Array],
  b: Blocks,
  *,
  num_cores: int,
  accumulate: Accumulate,
) -> Array:
  """Runs a kernel that writes sums of products of blocks.

  Args:
    plan: returns, for the refs of operands and result, the number of result
      blocks, and a function from an index to a block.
    product: returns the factors of some rows of the block, for two stages.
    shapes: of a block of each operand.
    empty: the values of a block without steps.
    out_type: the type of the result.
    operands: the arguments of the kernel.
    b: the sizes of blocks.
    num_cores: multiprocessors of the GPU.
    accumulate: adds products on this kind of GPU.
  """
  adders = b.rows // accumulate.rows
  height = b.rows // adders
  scratch = [
    *(plgpu.SMEM((b.stages, *x), operands[-1].dtype) for x in shapes),
    plgpu.Barrier(num_arrivals=2, num_barriers=b.stages),
    plgpu.Barrier(
      num_arrivals=adders,
      num_barriers=b.stages,
      orders_tensor_core=accumulate.is_tensor_core_free,
    ),
    plgpu.Barrier(num_arrivals=adders),
    # Two slices of 128 bytes of each row.
    plgpu.SMEM(
      (adders, 2, height, 128 // out_type.dtype.itemsize), out_type.dtype
    ),
    *accumulate.scratch(b),
  ]

  def body(*refs: Any) -> None:
    count, block_at = plan(*refs[: -len(scratch)])
    left, right, filled, freed, masked, staged, *others = refs[-len(scratch) :]
    warpgroup = lax.axis_index("warpgroup")

    def stage(n: Array) -> Array:
      return lax.rem(n, jnp.int32(b.stages))

    def copy(block: Block, n: Array) -> Array:
      def step(source: Any, i: Array, n: Array) -> Array:
        pl.when(n >= b.stages)(lambda: plgpu.barrier_wait(freed.at[stage(n)]))
        for ref, to in zip(source(i), (left, right), strict=True):
          plgpu.copy_gmem_to_smem(ref, to.at[stage(n)], filled.at[stage(n)])
        return n + 1

      for source in block.sources:
        of_source = functools.partial(step, source)
        n = lax.fori_loop(0, block.num_steps, of_source, n)
      return n

    def add(block: Block, n: Array) -> Any:
      num_steps = len(block.sources) * block.num_steps
      row = pl.multiple_of(warpgroup * height, height)

      def add_all(add_step: Callable[..., None]) -> None:
        def step(mask: Any, i: Array, _: None) -> None:
          plgpu.barrier_wait(filled.at[stage(n + i)])
          x, w = left.at[stage(n + i)], right.at[stage(n + i)]
          if mask is not None:
            for ref, adder in ((x, 0), (w, adders - 1)):

              @pl.when(warpgroup == adder)
              def _(ref: Any = ref) -> None:
                for column in range(0, ref.shape[1], 64):  # in few registers
                  part = ref.at[:, pl.ds(column, 64)]
                  part[...] = mask(i, part)

            plgpu.commit_smem()
            plgpu.barrier_arrive(masked)
            plgpu.barrier_wait(masked)
          x, w = product(x, w, pl.ds(row, height))
          add_step(i, x, w)

        for lower, upper, mask in block.steps:
          lax.fori_loop(lower, upper, functools.partial(step, mask), None)

      start, begin, end = block.rows
      rows = start + row, *(jnp.clip(x - row, 0, height) for x in (begin, end))

      def write(values: Callable[[slice], Array]) -> None:
        _store(values, staged.at[warpgroup], block, rows, b.columns)

      @pl.when(num_steps > 0)
      def _() -> None:
        shape, at = (height, b.columns), lambda i: freed.at[stage(n + i)]
        write(accumulate.add(shape, num_steps, at, add_all, *others))

      @pl.when(num_steps == 0)
      def _() -> None:
        dtype = jnp.float32
        write(lambda x: jnp.full((height, x.stop - x.start), empty, dtype))

      return n + num_steps

    def loop_over_blocks(do: Callable[[Block, Any], Any]) -> Any:
      loop: Any = plgpu.nd_loop(
        (count,), collective_axes="core", init_carry=jnp.int32(0)
      )
      return loop(lambda at, carry: do(block_at(at.index[0]), carry))

    @pl.when(warpgroup == adders)
    def _() -> None:
      if adders > 1:
        plgpu.set_max_registers(40, action="decrease")
      n = loop_over_blocks(copy)

      def wait(i: Array, _: None) -> None:
        plgpu.barrier_wait(freed.at[stage(i)])

      # A thread that has waited for a barrier has to see all its phases.
      lax.fori_loop(lax.max(n - b.stages, 0), n, wait, None)

    @pl.when(warpgroup < adders)
    def _() -> None:
      if adders > 1:
        plgpu.set_max_registers(232, action="increase")
      loop_over_blocks(add)
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)

  out: Array = run(
    body,
    out_type,
    num_cores,
    *operands,
    num_threads=adders + 1,
    thread_name="warpgroup",
    scratch_types=scratch,
  )
  return out


def run(
  body: Callable[..., Any],
  out_type: Any,
  num_blocks: int,
  *operands: Any,
  **options: Any,
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
    **options,
  )
  with jax.enable_x64(False):  # Pallas mixes Python integers with int32.
    return kernel(*operands)


def _add_in_registers(
  shape: _Shape, num_steps: Array, freed: Callable[..., Any], add_all: Any
) -> Callable[[slice], Array]:
  """Adds products in registers, on Hopper (WGMMA).

  `add_all(add)` calls `add(step, x, y)` in each step. A stage may be refilled
  after an arrival at the barrier `freed(step)`. Returns a function that returns
  some columns of the sum.
  """

  def sums(acc: Any) -> Any:
    def add(step: Array, x: Any, y: Any) -> None:
      plgpu.wgmma(acc, x, y)
      plgpu.wgmma_wait(1)  # Until the step before has read its stage.
      pl.when(step > 0)(lambda: plgpu.barrier_arrive(freed(step - 1)))

    add_all(add)
    return acc[...]

  total = pl.run_scoped(sums, plgpu.WGMMAAccumulatorRef(shape))
  plgpu.barrier_arrive(freed(num_steps - 1))
  return lambda columns: total[:, columns]


def _add_in_tensor_memory(
  shape: _Shape,
  num_steps: Array,
  freed: Callable[..., Any],
  add_all: Any,
  acc: Any,
  done: Any,
) -> Callable[[slice], Array]:
  """Adds products in tensor memory, on Blackwell; see `_add_in_registers`."""

  def add(step: Array, x: Any, y: Any) -> None:
    plgpu.tcgen05_mma(acc, x, y, freed(step), accumulate=step > 0)

  # The threads have read the last sum before one of them starts the next one.
  plgpu.barrier_arrive(done)
  plgpu.barrier_wait(done)
  add_all(add)
  plgpu.tcgen05_commit_arrive(done)
  plgpu.barrier_wait(done)

  def values(columns: slice) -> Array:
    part: Array = plgpu.async_load_tmem(acc.at[: shape[0], columns])
    plgpu.wait_load_tmem()
    return part

  return values


in_registers = Accumulate(64, _add_in_registers, lambda _: (), False)
in_tensor_memory = Accumulate(
  128,
  _add_in_tensor_memory,
  lambda b: (
    plgpu.TMEM((b.rows, b.columns), jnp.float32),
    plgpu.Barrier(orders_tensor_core=True),
  ),
  True,
)


def _store(
  values: Callable[[slice], Array],
  staged: Any,
  block: Block,
  rows: tuple[Any, Any, Any],
  num_columns: int,
) -> None:
  """Writes the rows `begin` to `end` of values, in slices of columns."""
  width = staged.shape[-1]
  for i in range(num_columns // width):
    part, column = staged.at[i % 2], i * width
    # Wait until part can be overwritten: part may have the last block's slice.
    plgpu.wait_smem_to_gmem(min(i, 1), wait_read_only=True)
    part[...] = values(slice(column, column + width)).astype(part.dtype)
    plgpu.commit_smem()
    out = block.out.at[:, pl.ds(block.column + column, width)]
    _copy_rows(part, out, rows)
    plgpu.commit_smem_to_gmem_group()


def _copy_rows(part: Any, out: Any, rows: tuple[Any, Any, Any]) -> None:
  """Writes rows in copies of 2^i rows: the length of a copy is static."""
  start, begin, end = rows
  row, size = begin, part.shape[0]
  while size:
    has_copy = (end - begin) & size

    @pl.when(has_copy != 0)
    def _(row: Any = row, size: int = size) -> None:
      to = out.at[pl.ds(start + row, size)]
      plgpu.copy_smem_to_gmem(part.at[pl.ds(row, size)], to, commit_group=False)

    row += has_copy
    size //= 2
