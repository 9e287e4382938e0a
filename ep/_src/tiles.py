# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls on CPUs: a loop over tiles, in time linear in the rows.

XLA:CPU computes `lax.ragged_dot` as one masked matmul per matrix, at a cost of
rows x matrices. Here a loop over blocks of rows takes its place:

    block 0          block 1          block 2          block 3
    |---------------|---------------|---------------|---------------|
    |  slab 0                 |  slab 1     |  slab 2  |  unused ...
    |---------------|---------|     |-------|     |----|
    tile 0           tile 1    tile 2        tile 3

Each slab is cut into tiles of a block's height, the last of which reads past
the slab's end and keeps only what is inside. The loop ends with the last tile
of the last slab, so unused rows cost nothing and are never read.

No function transposes a matrix: the dot contracts the axis that it needs.

With segments, the bits of a result depend on its slab's rows alone. A tile has
a fixed height and starts where its slab or segment does, so a dot of the same
shape has the same rows at the same places, wherever these lie in the buffer.
And sums over rows are made of one sum per segment, which are added as a
balanced tree: a sum of trees of half of the segments is the tree of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from ep._src import ordered_sum, row_buffers

_MIN_HEIGHT, _MAX_HEIGHT = 16, 128  # rows
_FIXED_HEIGHT = 64  # with segments


class Block:
  """Rows that lie in one slab, and so are multiplied by the same matrices.

  A function of blocks gets one as its first argument.
  """

  def multiply(
    self, rows: jax.Array, matrices: Sequence[jax.Array]
  ) -> list[jax.Array]:
    """Returns rows [B, F] times each matrix [F, G]; see `grouped_matmuls`.

    Rows outside the slab are zero in the product, so they add nothing to the
    gradients of the matrices.
    """
    dtype, rows = rows.dtype, self.inside(rows.astype(jnp.float32))
    return [self.inside(_dot(rows, w, 1, 0)).astype(dtype) for w in matrices]

  def inside(self, rows: jax.Array) -> jax.Array:
    """Returns the rows, with zeros for those outside the slab."""
    return rows

  def matrix_type(self, shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
    """Returns the type in a block of the matrices [L, *shape] of `dtype`."""
    del dtype
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def block_types(
  operands: Sequence[Any], is_matrix: Sequence[bool], height: int
) -> list[jax.ShapeDtypeStruct]:
  """Returns the types of what a block of `height` rows has of operands."""
  return [
    Block().matrix_type(x.shape[1:], x.dtype)
    if m
    else jax.ShapeDtypeStruct((height, *x.shape[1:]), x.dtype)
    for x, m in zip(operands, is_matrix, strict=True)
  ]


def apply(
  fn: Callable[..., Sequence[jax.Array]],
  sizes: jax.Array,
  segments: jax.Array,
  operands: Sequence[jax.Array],
  is_matrix: Sequence[bool],
  sums: Sequence[Any],
  tail: str,
) -> list[jax.Array]:
  """Returns what `fn(block, *operands)` makes of all blocks, in one loop.

  An operand is an array of rows [C, ...], or matrices [L, F, G]. A block has
  its own matrix, rounded to the dtype of the first rows, in float32. A result
  is made of the rows [B, ...] of each block; or if `sums` has a dtype for it,
  it is the sum [L, F, G] of the float32 terms [F, G] of a slab's blocks. With
  segments, rows and sums are made by a loop each.
  """
  first = operands[list(is_matrix).index(False)]
  dtype, num_rows = first.dtype, first.shape[0]
  used = sizes.sum(dtype=jnp.int32)
  height, num_segments = _height(num_rows, segments), segments.shape[1]
  sources = [
    x if m else row_buffers.Reader(x, used)
    for x, m in zip(operands, is_matrix, strict=True)
  ]
  types = jax.eval_shape(
    functools.partial(fn, Block()), *block_types(operands, is_matrix, height)
  )
  tiles = _Tiles(0, sizes, num_rows, height)

  # The keys are places in the list of results.
  rows, totals = {}, {}
  for i, (t, s) in enumerate(zip(types, sums, strict=True)):
    if s is None:
      rows[i] = row_buffers.new((num_rows, *t.shape[1:]), t.dtype)
    else:
      totals[i] = row_buffers.new((*sizes.shape, *t.shape), t.dtype)

  def update(tile, outs, slab):
    """Updates rows and sums with a tile's; of segments, these are parts."""
    values = fn(
      tile,
      *(
        _rounded(_at(x, slab), dtype) if m else tile.read(x)
        for x, m in zip(sources, is_matrix, strict=True)
      ),
    )
    return {
      i: tile.write(out, values[i])
      if i in rows
      else _add_at(out, values[i], tile.slab)
      for i, out in outs.items()
    }

  def update_tile(tile, outs):
    return update(tile, outs, tile.slab)

  def update_slab(slab, outs):
    # Sums are zeroed right before terms are added, while they are in a cache.
    zeroed = {
      i: _set_at(outs[i], jnp.zeros_like(types[i]), slab) for i in totals
    }
    return tiles.fold(update_tile, outs | zeroed, slab)

  def sum_segments(slab, outs):
    zeros = {
      i: jnp.zeros((num_segments, *types[i].shape), types[i].dtype)
      for i in outs
    }
    start, counts = _at(tiles.starts, slab), _at(segments, slab)
    parts = _Tiles(start, counts, num_rows, height, aligned=True).fold(
      lambda tile, parts: update(tile, parts, slab), zeros
    )
    return {
      i: _set_at(out, ordered_sum.tree_sum(parts[i]), slab)
      for i, out in outs.items()
    }

  num_slabs = sizes.shape[0]
  if not totals:
    outs = tiles.fold(update_tile, rows)
  elif not num_segments:
    outs = lax.fori_loop(0, num_slabs, update_slab, rows | totals)
  else:
    outs = lax.fori_loop(0, num_slabs, sum_segments, totals)
    if rows:
      outs |= tiles.fold(update_tile, rows)
  return [
    row_buffers.finish(outs[i], t.dtype, used, tail)
    if i in rows
    else outs[i].astype(s)
    for i, (t, s) in enumerate(zip(types, sums, strict=True))
  ]


def _rounded(matrix, dtype):
  """Returns a matrix in float32, rounded to `dtype` if its own is another.

  XLA may leave out a conversion and its inverse, but not this.
  """
  matrix, is_rounded = matrix.astype(jnp.float32), matrix.dtype == dtype
  info = jnp.finfo(dtype)
  if is_rounded:
    return matrix
  return lax.reduce_precision(matrix, info.nexp, info.nmant)


def expand(sizes, segments, rows, matrices, tail):
  """Returns [C, G] for each of the matrices [L, F, G]: rows [C, F] times it."""

  def fn(tile, x, *matrices):
    return tile.multiply(x, matrices)

  n = len(matrices)
  kinds = [False] + [True] * n, [None] * n
  return apply(fn, sizes, segments, [rows, *matrices], *kinds, tail)


def contract(sizes, segments, outs, matrices, tail):
  """Returns [C, F]: the sum of each of `outs` [C, G] times its [L, F, G]^T."""
  n = len(outs)

  def fn(tile, *operands):
    del tile
    terms = (
      _dot(y.astype(jnp.float32), w, 1, 1)
      for y, w in zip(operands[:n], operands[n:], strict=True)
    )
    return [functools.reduce(jnp.add, terms).astype(operands[0].dtype)]

  kinds = [False] * n + [True] * n, [None]
  (rows,) = apply(fn, sizes, segments, [*outs, *matrices], *kinds, tail)
  return rows


def outer(sizes, segments, rows, outs):
  """Returns [L, F, G] for each of `outs` [C, G]: a slab's rows^T times it."""

  def fn(tile, *blocks):
    x, *ys = (tile.inside(b.astype(jnp.float32)) for b in blocks)
    return [_dot(x, y, 0, 0) for y in ys]

  n = len(outs)
  kinds = [False] * (1 + n), [rows.dtype] * n
  return apply(fn, sizes, segments, [rows, *outs], *kinds, "unspecified")


def _dot(x, y, x_axis, y_axis):
  return lax.dot_general(x, y, (((x_axis,), (y_axis,)), ((), ())))


class _Tile(Block):
  """Consecutive rows of a buffer, those from `first` to `end` of `slab`."""

  def __init__(self, num_rows, height, aligned, slab, first, end):
    self.slab = slab
    self._height = height
    self._aligned = aligned
    self._stored = min(height, num_rows)
    # The last tile of all starts early enough to end with the last row.
    self._start = jnp.minimum(first, num_rows - self._stored)
    self._early = first - self._start
    row = (first if aligned else self._start) + jnp.arange(height)
    self._inside = (first <= row) & (row < end)

  def read(self, rows):
    """Returns the tile's rows, also those outside the slab.

    If the tile is aligned, row `first` is at the top.
    """
    rows = rows(self._start, self._stored)
    if not self._aligned:
      return _padded(rows, self._height)
    return lax.dynamic_slice_in_dim(
      _padded(rows, self._stored + self._height),
      self._early,
      self._height,
      allow_negative_indices=False,
    )

  def inside(self, rows):
    return jnp.where(self._inside[:, None], rows, 0)

  def write(self, buffer, rows):
    """Returns the buffer with the rows inside a tile that is not aligned."""
    n = self._stored
    return row_buffers.write(buffer, rows[:n], self._start, self._inside[:n])


def _padded(rows, height):
  return jnp.pad(rows, ((0, height - rows.shape[0]), (0, 0)))


class _Tiles:
  """All tiles of slabs of `sizes`, which lie one after another from `start`.

  There is one table of them, since that is cheaper than computing each in its
  step. Its sums and those before it take the place of sorts and gathers,
  because XLA compiles few operations sooner.
  """

  def __init__(self, start, sizes, num_rows, height, aligned=False):
    self._tile = functools.partial(_Tile, num_rows, height, aligned)
    self._height = height
    tiles = lax.div(sizes + (height - 1), jnp.int32(height))
    self._counts = jnp.stack([tiles, sizes])
    slab = jnp.arange(sizes.shape[0], dtype=jnp.int32)
    self._before = _sum_where(slab < slab[:, None], self._counts[:, None])
    tiles_before, rows_before = self._before
    self.starts = start + rows_before
    index = jnp.arange(num_rows // height + sizes.shape[0], dtype=jnp.int32)
    of_slab = index[:, None] - tiles_before
    first = self.starts - height * tiles_before
    self._table = _sum_where(
      (0 <= of_slab) & (of_slab < tiles),
      jnp.stack([slab, first, self.starts + sizes])[:, None],
    )

  def fold(self, step, outs, slab=None):
    """Folds `step(tile, outs)` over all tiles, or over those of a slab."""

    def fold(i, outs):
      slab, first, end = _at(self._table, i, axis=1)
      return step(self._tile(slab, first + self._height * i, end), outs)

    if slab is None:
      first, number = 0, self._counts[0].sum(dtype=jnp.int32)
    else:
      first, number = (_at(x[0], slab) for x in (self._before, self._counts))
    return lax.fori_loop(first, first + number, fold, outs)


def _sum_where(condition, values):
  return jnp.where(condition, values, 0).sum(axis=-1, dtype=jnp.int32)


# JAX takes an index as one from the end if it is negative, unless told that
# none is.
_at = functools.partial(
  lax.dynamic_index_in_dim, keepdims=False, allow_negative_indices=False
)
_set_at = functools.partial(
  lax.dynamic_update_index_in_dim, axis=0, allow_negative_indices=False
)


def _add_at(array, value, place):
  """Returns the array with the value added at a place of its first axis."""
  slab = lax.dynamic_slice_in_dim(array, place, 1, allow_negative_indices=False)
  return lax.dynamic_update_slice_in_dim(
    array, slab + value[None], place, 0, allow_negative_indices=False
  )


def _height(num_rows, segments):
  """Returns a height of which most slabs fill one tile, or a few.

  If all slabs are equally likely for a row, few of them have more rows than the
  average and two of its square roots, which are two standard deviations.
  """
  num_slabs, num_segments = segments.shape
  if num_segments:
    return _FIXED_HEIGHT
  average = num_rows // num_slabs
  most = average + 2 * math.isqrt(average)
  num_tiles = max(-(-most // _MAX_HEIGHT), 1)
  height = -(-most // (8 * num_tiles)) * 8  # a multiple of 8, as of vectors
  return min(max(height, _MIN_HEIGHT), num_rows)
