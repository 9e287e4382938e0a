# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls on TPUs: Pallas kernels.

The functions are the same as in tiles.py. The rows are cut into blocks of
equal height. A *visit* is a block and an expert segment with rows in the block:

    block 0         block 1         block 2         block 3
    |---------------|---------------|---------------|---------------|
    |  segment 0              |  segment 1  |  segment 2  |  unused ...
    visit 0         visit 1   visit 2       visit 3 and 4

A kernel masks the rows of a block that are outside of the segment. The grid has
one step for each visit, so blocks of unused rows are neither read nor written.
`lax.ragged_dot` visits all rows, and libtpu 0.0.42 computes the gradient of the
matrices as a masked product of all rows for each matrix. JAX's megablox has the
same visits, but one pair of operands for each kernel: the sum of two products
takes two float32 arrays of rows.

TPUs round float32 operands to bfloat16, unless `jax.default_matmul_precision`
says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import itertools
from typing import Any, NamedTuple

import jax
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from ep._src.base.arrays import iota
from ep._src.matmul.unwritten_rows import cut

_Arrays = Sequence[Array]

# Candidate tiles: rows, columns of the left operand, columns of the result. The
# last one is for many matrices.
_TILES = [
  *itertools.product((1024, 512, 256), (1024, 512, 256), (1024, 512)),
  (256, 128, 128),
]
# The most bytes for two buffers of each operand and result, and float32 sums.
# TPU v5e has the least VMEM of all TPUs, 16 MiB.
_VMEM = 14 << 20
# Rows of a part of a block. A kernel skips parts without rows of the segment.
_PART = 128


def expand(
  sizes: Array, rows: Array, matrices: _Arrays, tail: str
) -> list[Array]:
  outs = _products(sizes, [rows], matrices, len(matrices), 0)
  return [cut(out, sizes.sum(dtype=jnp.int32), tail) for out in outs]


def contract(
  sizes: Array, outs: _Arrays, matrices: _Arrays, tail: str
) -> Array:
  (rows,) = _products(sizes, outs, matrices, 1, 1)
  return cut(rows, sizes.sum(dtype=jnp.int32), tail)


def outer(
  sizes: Array, rows: Array, outs: _Arrays, dtype: jnp.dtype
) -> list[Array]:
  return [_outer(sizes, rows, y, dtype) for y in outs]


class _Visits(NamedTuple):
  """Visits, int32 [V], of which the first `num` are used.

  A visit has the rows `begin` to `end` of a block, clipped to the block.
  """

  slab: Array
  block: Array
  begin: Array
  end: Array
  num: Array

  @property
  def tables(self) -> list[Array]:
    return list(self[:4])


def _visits(sizes: Array, num_blocks: int, height: int, least: int) -> _Visits:
  """Returns the visits of slabs in order, at least `least` for each slab."""
  ends = jnp.cumsum(sizes, dtype=jnp.int32)
  starts = ends - sizes
  first = lax.div(starts, jnp.int32(height))
  after = lax.div(ends + (height - 1), jnp.int32(height))
  counts = jnp.where(sizes > 0, after - first, least)
  up_to = jnp.cumsum(counts, dtype=jnp.int32)
  visit = iota(num_blocks + len(sizes))
  slab = (up_to[None] <= visit[:, None]).sum(1, dtype=jnp.int32)
  slab = jnp.minimum(slab, len(sizes) - 1)
  block = (first - up_to + counts)[slab] + visit
  block = block.clip(0, num_blocks - 1)
  origin = block * height
  return _Visits(
    slab, block, starts[slab] - origin, ends[slab] - origin, up_to[-1]
  )


def _products(
  sizes: Array, lefts: _Arrays, matrices: _Arrays, num_outs: int, axis: int
) -> list[Array]:
  """Multiplies rows by matrices; sums over `axis` of each matrix.

  Returns the product of one left operand with each matrix, or the sum of the
  products of pairs: `num_outs` arrays [C, n].
  """
  (num_rows, k), dtype = lefts[0].shape, lefts[0].dtype
  n = matrices[0].shape[2 - axis]
  matrices = [w.astype(dtype) for w in matrices]

  def vmem(height: int, tk: int, tn: int) -> int:
    blocks = len(lefts) * height * tk + len(matrices) * tk * tn
    sums = num_outs * height * tn
    return 2 * dtype.itemsize * (blocks + sums) + 4 * sums

  def traffic(height: int, tk: int, tn: int) -> int:
    del tk
    num_visits = pl.cdiv(num_rows, height) + len(sizes)
    read = len(lefts) * num_rows * k * pl.cdiv(n, tn)
    read += len(matrices) * k * n * num_visits
    return dtype.itemsize * (read + num_outs * num_rows * n)

  height, tk, tn = _tile((num_rows, k, n), vmem, traffic)
  num_steps = pl.cdiv(k, tk)
  visits = _visits(sizes, pl.cdiv(num_rows, height), height, 0)

  def kernel(slab: Any, block: Any, begin: Any, end: Any, *refs: Any) -> None:
    del slab, block
    xs, ws = refs[: len(lefts)], refs[len(lefts) :][: len(matrices)]
    outs, sums = refs[-2 * num_outs : -num_outs], refs[-num_outs:]
    step, visit = pl.program_id(2), pl.program_id(1)

    @pl.when(step == 0)
    def _() -> None:
      for s in sums:
        s[...] = jnp.zeros_like(s)

    # Where a tile exceeds the summed axis, its values are undefined.
    left = k - step * tk if k % tk else None
    for part in _parts(height, begin[visit], end[visit]):

      @part.when
      def _(rows: Any = part.rows) -> None:
        for i, w in enumerate(ws):
          x = _cut(xs[i % len(xs)][rows, :], 1, left)
          y = _cut(w[...], axis, left)
          sums[i % num_outs][rows, :] += _dot(x, y, 1, axis)

    @pl.when(step == num_steps - 1)
    def _() -> None:
      row = lax.broadcasted_iota(jnp.int32, (height, tn), 0)
      inside = (row >= begin[visit]) & (row < end[visit])
      for out, s in zip(outs, sums, strict=True):
        kept = out[...].astype(jnp.float32)
        out[...] = jnp.where(inside, s[...], kept).astype(dtype)

  def at_left(j: Any, v: Any, step: Any, slab: Any, block: Any, *_: Any) -> Any:
    return block[v], step

  def at_matrix(j: Any, v: Any, step: Any, slab: Any, *_: Any) -> Any:
    return slab[v], *((step, j) if axis == 0 else (j, step))

  def at_out(j: Any, v: Any, step: Any, slab: Any, block: Any, *_: Any) -> Any:
    return block[v], j

  num_columns = pl.cdiv(n, tn)
  tile = (None, tk, tn) if axis == 0 else (None, tn, tk)
  products: list[Array] = pl.pallas_call(
    kernel,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(visits.tables),
      grid=(num_columns, visits.num, num_steps),
      in_specs=[
        *[pl.BlockSpec((height, tk), at_left)] * len(lefts),
        *[pl.BlockSpec(tile, at_matrix)] * len(matrices),
      ],
      out_specs=[pl.BlockSpec((height, tn), at_out)] * num_outs,
      scratch_shapes=[pltpu.VMEM((height, tn), jnp.float32)] * num_outs,
    ),
    out_shape=[jax.ShapeDtypeStruct((num_rows, n), dtype)] * num_outs,
    compiler_params=_PARAMS,
    cost_estimate=pl.CostEstimate(
      flops=2 * num_rows * k * n * len(matrices),
      bytes_accessed=traffic(height, tk, tn),
      transcendentals=0,
    ),
  )(*visits.tables, *lefts, *matrices)
  return products


def _outer(sizes: Array, rows: Array, y: Array, dtype: jnp.dtype) -> Array:
  (num_rows, k), n, num_slabs = rows.shape, y.shape[1], len(sizes)

  def vmem(height: int, tk: int, tn: int) -> int:
    blocks = height * (tk + tn) * rows.dtype.itemsize
    return 2 * (blocks + tk * tn * dtype.itemsize) + 4 * tk * tn

  def traffic(height: int, tk: int, tn: int) -> int:
    read = num_rows * (k * pl.cdiv(n, tn) + n * pl.cdiv(k, tk))
    return rows.dtype.itemsize * read + dtype.itemsize * num_slabs * k * n

  height, tk, tn = _tile((num_rows, k, n), vmem, traffic)
  visits = _visits(sizes, pl.cdiv(num_rows, height), height, 1)

  def kernel(
    slab: Any,
    block: Any,
    begin: Any,
    end: Any,
    x: Any,
    y: Any,
    out: Any,
    s: Any,
  ) -> None:
    del block
    visit, last = pl.program_id(2), pl.num_programs(2) - 1
    before = slab[jnp.maximum(visit - 1, 0)]
    after = slab[jnp.minimum(visit + 1, last)]

    @pl.when((visit == 0) | (before != slab[visit]))
    def _() -> None:
      s[...] = jnp.zeros_like(s)

    for part in _parts(height, begin[visit], end[visit]):

      @part.when
      def _(part: Any = part) -> None:
        s[...] += _dot(part.of(x), part.of(y), 0, 0)

    @pl.when((visit == last) | (after != slab[visit]))
    def _() -> None:
      out[...] = s[...].astype(out.dtype)

  def at_x(i: Any, j: Any, v: Any, slab: Any, block: Any, *_: Any) -> Any:
    return block[v], i

  def at_y(i: Any, j: Any, v: Any, slab: Any, block: Any, *_: Any) -> Any:
    return block[v], j

  def at_out(i: Any, j: Any, v: Any, slab: Any, *_: Any) -> Any:
    return slab[v], i, j

  out: Array = pl.pallas_call(
    kernel,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(visits.tables),
      grid=(pl.cdiv(k, tk), pl.cdiv(n, tn), visits.num),
      in_specs=[
        pl.BlockSpec((height, tk), at_x),
        pl.BlockSpec((height, tn), at_y),
      ],
      out_specs=pl.BlockSpec((None, tk, tn), at_out),
      scratch_shapes=[pltpu.VMEM((tk, tn), jnp.float32)],
    ),
    out_shape=jax.ShapeDtypeStruct((num_slabs, k, n), dtype),
    compiler_params=_PARAMS,
    cost_estimate=pl.CostEstimate(
      flops=2 * num_rows * k * n,
      bytes_accessed=traffic(height, tk, tn),
      transcendentals=0,
    ),
  )(*visits.tables, rows, y)
  return out


# The cores of a TPU may split the first axis of a Pallas grid.
_PARAMS = pltpu.CompilerParams(
  dimension_semantics=("parallel", "arbitrary", "arbitrary")
)


def _tile(
  sizes: tuple[int, int, int],
  vmem: Callable[[int, int, int], int],
  traffic: Callable[[int, int, int], int],
) -> tuple[int, int, int]:
  """Returns the tile with the least memory traffic that fits into VMEM.

  `sizes` are the sizes of the three axes; a tile exceeds none by much.
  """
  fitting = [tile for tile in _TILES if vmem(*tile) <= _VMEM]
  height, tk, tn = min(fitting, key=lambda tile: traffic(*tile))
  num_rows, k, n = sizes
  return min(height, pl.cdiv(num_rows, _PART) * _PART), min(tk, k), min(tn, n)


class _Part(NamedTuple):
  """Some rows of a block; only the block's rows `begin` to `end` are wanted."""

  rows: Any
  begin: Any
  end: Any

  @property
  def when(self) -> Callable[[Callable[[], None]], None]:
    """Returns a decorator that runs a function if any row is wanted."""
    has_rows = (self.begin < self.rows.stop) & (self.end > self.rows.start)
    when: Callable[[Callable[[], None]], None] = pl.when(has_rows)
    return when

  def of(self, block: Any) -> Array:
    """Returns these rows of a block, with zeros for unwanted rows."""
    values = block[self.rows, :]
    row = lax.broadcasted_iota(jnp.int32, values.shape, 0) + self.rows.start
    return _kept((row >= self.begin) & (row < self.end), values)


def _parts(height: int, begin: Any, end: Any) -> list[_Part]:
  starts = range(0, height, _PART)
  return [_Part(slice(i, i + _PART), begin, end) for i in starts]


def _cut(x: Array, axis: int, bound: Any) -> Array:
  """Returns `x` with zeros at indices >= `bound` of `axis`."""
  if bound is None:
    return x
  return _kept(lax.broadcasted_iota(jnp.int32, x.shape, axis) < bound, x)


def _kept(mask: Array, x: Array) -> Array:
  # TPU v5e can only select between 32-bit values.
  return jnp.where(mask, x.astype(jnp.float32), 0).astype(x.dtype)


def _dot(x: Array, y: Array, x_axis: int, y_axis: int) -> Array:
  product: Array = lax.dot_general(
    x,
    y,
    (((x_axis,), (y_axis,)), ((), ())),
    # A product of bfloat16 is exact, so `jax.default_matmul_precision`, which
    # Pallas refuses for it, has no effect.
    precision=None if x.dtype == jnp.float32 else lax.Precision.DEFAULT,
    preferred_element_type=jnp.float32,
  )
  return product
