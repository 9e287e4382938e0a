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

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from ep._src import ordered_sum, row_buffers

_MIN_HEIGHT, _MAX_HEIGHT = 16, 128  # rows; 64 and more were measured fastest
_FIXED_HEIGHT = 64  # with segments


def expand(sizes, segments, rows, matrices, tail):
  """Returns [C, G] for each of the matrices [L, F, G]: rows [C, F] times it."""
  dtype, num_rows = rows.dtype, rows.shape[0]
  used = sizes.sum(dtype=jnp.int32)
  rows = row_buffers.Reader(rows, used)

  def step(tile, outs):
    x = tile.read(rows)
    return [
      tile.write(out, _dot(x, tile.matrix(w), 1, 0).astype(dtype))
      for out, w in zip(outs, matrices, strict=True)
    ]

  outs = [
    row_buffers.new((num_rows, w.shape[2]), dtype, tail) for w in matrices
  ]
  height = _height(num_rows, segments)
  outs = _for_each_tile(_starts(sizes), sizes, num_rows, height, step, outs)
  return [row_buffers.finish(out, dtype, used, tail) for out in outs]


def contract(sizes, segments, outs, matrices, tail):
  """Returns [C, F]: the sum of each of `outs` [C, G] times its [L, F, G]^T."""
  dtype, num_rows = outs[0].dtype, outs[0].shape[0]
  used = sizes.sum(dtype=jnp.int32)
  outs = [row_buffers.Reader(y, used) for y in outs]

  def step(tile, rows):
    terms = [
      _dot(tile.read(y), tile.matrix(w), 1, 1)
      for y, w in zip(outs, matrices, strict=True)
    ]
    return tile.write(rows, functools.reduce(jnp.add, terms).astype(dtype))

  rows = row_buffers.new((num_rows, matrices[0].shape[1]), dtype, tail)
  height = _height(num_rows, segments)
  rows = _for_each_tile(_starts(sizes), sizes, num_rows, height, step, rows)
  return row_buffers.finish(rows, dtype, used, tail)


def outer(sizes, segments, rows, outs):
  """Returns [L, F, G] for each of `outs` [C, G]: a slab's rows^T times it."""
  dtype, (num_rows, num_in) = rows.dtype, rows.shape
  nums_out, num_segments = [y.shape[1] for y in outs], segments.shape[1]
  height = _height(num_rows, segments)
  used = sizes.sum(dtype=jnp.int32)
  rows, *outs = (row_buffers.Reader(x, used) for x in (rows, *outs))

  def zeros(*lead):
    return [jnp.zeros((*lead, num_in, n), jnp.float32) for n in nums_out]

  def add_tile(tile, sums):
    read = tile.read_aligned if num_segments else tile.read_inside
    x = read(rows)
    terms = (_dot(x, read(y), 0, 0) for y in outs)
    return [s.at[tile.slab].add(t) for s, t in zip(sums, terms, strict=True)]

  def add_slab(slab, sums):
    parts = _for_each_tile(
      _at(starts, slab) + _starts(_at(segments, slab)),
      _at(segments, slab),
      num_rows,
      height,
      add_tile,
      zeros(num_segments),
    )
    trees = map(ordered_sum.tree_sum, parts)
    return [s.at[slab].set(t) for s, t in zip(sums, trees, strict=True)]

  starts, sums = _starts(sizes), zeros(sizes.shape[0])
  if num_segments:
    sums = lax.fori_loop(0, sizes.shape[0], add_slab, sums)
  else:
    sums = _for_each_tile(starts, sizes, num_rows, height, add_tile, sums)
  return [s.astype(dtype) for s in sums]


def _dot(x, y, x_axis, y_axis):
  return lax.dot_general(x, y, (((x_axis,), (y_axis,)), ((), ())))


class _Tile:
  """Consecutive rows of a buffer, those from `first` to `end` of `slab`."""

  def __init__(self, num_rows, height, slab, first, end):
    self.slab = slab
    self._height = height
    self._stored = min(height, num_rows)
    # The last tile of all starts early enough to end with the last row.
    self._start = jnp.minimum(first, num_rows - self._stored)
    self._early = first - self._start
    row = self._start + jnp.arange(self._stored)
    self._inside = (first <= row) & (row < end)

  def read(self, rows):
    """Returns the tile's rows, also those outside the slab."""
    return _padded(self._read(rows), self._height)

  def read_inside(self, rows):
    """Returns the tile's rows, with zeros for those outside the slab."""
    return jnp.where(self._inside[:, None], self._read(rows), 0)

  def read_aligned(self, rows):
    """Returns what `read_inside` does, with row `first` at the top."""
    rows = _padded(self.read_inside(rows), self._stored + self._height)
    return lax.dynamic_slice_in_dim(
      rows, self._early, self._height, allow_negative_indices=False
    )

  def _read(self, rows):
    return rows(self._start, self._stored).astype(jnp.float32)

  def matrix(self, matrices):
    """Returns the slab's own of the matrices."""
    return _at(matrices, self.slab).astype(jnp.float32)

  def write(self, buffer, rows):
    """Returns the buffer with the tile's rows inside replaced."""
    rows = rows[: self._stored]
    return row_buffers.write(buffer, rows, self._start, self._inside)


def _padded(rows, height):
  return jnp.pad(rows, ((0, height - rows.shape[0]), (0, 0)))


def _for_each_tile(
  starts: jax.Array,
  sizes: jax.Array,
  num_rows: int,
  height: int,
  step: Callable[[_Tile, Any], Any],
  outs: Any,
) -> Any:
  """Folds `step(tile, outs)` over all tiles of slabs of `sizes` at `starts`."""
  tiles = lax.div(sizes + (height - 1), jnp.int32(height))
  tiles_start = _starts(tiles)
  # One table of all possible tiles is cheaper than computing each in its step.
  index = jnp.arange(num_rows // height + sizes.shape[0], dtype=jnp.int32)
  is_later = tiles_start + tiles <= index[:, None]
  slab = is_later.sum(axis=1, dtype=jnp.int32)
  slabs = jnp.stack([starts - height * tiles_start, starts + sizes], axis=1)
  first, end = slabs.at[slab].get(mode="clip").T
  table = jnp.stack([slab, first + height * index, end], axis=1)

  def fold(i, outs):
    return step(_Tile(num_rows, height, *_at(table, i)), outs)

  return lax.fori_loop(0, tiles.sum(dtype=jnp.int32), fold, outs)


# JAX takes an index as one from the end if it is negative, unless told that
# none is.
_at = functools.partial(
  lax.dynamic_index_in_dim, keepdims=False, allow_negative_indices=False
)


def _starts(sizes):
  return jnp.cumsum(sizes) - sizes


def _height(num_rows, segments):
  """Returns a tile's height: the rows of an average slab, within limits."""
  num_slabs, num_segments = segments.shape
  if num_segments:
    return _FIXED_HEIGHT
  average = max(num_rows // num_slabs, 1)
  height = 1 << (average - 1).bit_length()
  return min(max(height, _MIN_HEIGHT), _MAX_HEIGHT, num_rows)
