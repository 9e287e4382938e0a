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
"""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from ep._src import row_buffers

_MIN_HEIGHT, _MAX_HEIGHT = 16, 128  # rows; 64 and more were measured fastest


def expand(sizes, rows, matrices, tail):
  """Returns [C, G] for each of the matrices [L, F, G]: rows [C, F] times it."""
  dtype, num_rows = rows.dtype, rows.shape[0]

  def step(tile, outs):
    x = tile.read(rows)
    return [
      tile.write(out, _dot(x, tile.matrix(w), 1, 0).astype(dtype))
      for out, w in zip(outs, matrices, strict=True)
    ]

  outs = [
    row_buffers.new((num_rows, w.shape[2]), dtype, tail) for w in matrices
  ]
  outs = _for_each_tile(sizes, num_rows, step, outs)
  return [row_buffers.finish(out, dtype) for out in outs]


def contract(sizes, outs, matrices, tail):
  """Returns [C, F]: the sum of each of `outs` [C, G] times its [L, F, G]^T."""
  dtype, num_rows = outs[0].dtype, outs[0].shape[0]

  def step(tile, rows):
    terms = [
      _dot(tile.read(y), tile.matrix(w), 1, 1)
      for y, w in zip(outs, matrices, strict=True)
    ]
    return tile.write(rows, functools.reduce(jnp.add, terms).astype(dtype))

  rows = row_buffers.new((num_rows, matrices[0].shape[1]), dtype, tail)
  rows = _for_each_tile(sizes, num_rows, step, rows)
  return row_buffers.finish(rows, dtype)


def outer(sizes, rows, outs):
  """Returns [L, F, G] for each of `outs` [C, G]: each slab's rows^T times it."""

  def step(tile, sums):
    x = tile.read_inside(rows)
    terms = (_dot(x, tile.read_inside(y), 0, 0) for y in outs)
    return [s.at[tile.slab].add(t) for s, t in zip(sums, terms, strict=True)]

  shape = sizes.shape[0], rows.shape[1]
  sums = [jnp.zeros((*shape, y.shape[1]), jnp.float32) for y in outs]
  sums = _for_each_tile(sizes, rows.shape[0], step, sums)
  return [s.astype(rows.dtype) for s in sums]


def _dot(x, y, x_axis, y_axis):
  return lax.dot_general(x, y, (((x_axis,), (y_axis,)), ((), ())))


class _Tile:
  """Consecutive rows, those `inside` of which belong to `slab`."""

  def __init__(self, height, slab, first, start, end):
    row = start + jnp.arange(height)
    self.slab = slab
    self._start, self._height = start, height
    self._inside = (first <= row) & (row < end)

  def read(self, x):
    """Returns the tile's rows of x, also those outside the slab."""
    rows = lax.dynamic_slice_in_dim(x, self._start, self._height)
    return rows.astype(jnp.float32)

  def read_inside(self, x):
    """Returns the tile's rows of x, with zeros for those outside the slab."""
    return jnp.where(self._inside[:, None], self.read(x), 0)

  def matrix(self, matrices):
    """Returns the slab's own of the matrices."""
    return matrices[self.slab].astype(jnp.float32)

  def write(self, buffer, rows):
    """Returns the buffer with the tile's rows inside replaced."""
    return row_buffers.write(buffer, rows, self._start, self._inside)


def _for_each_tile(
  sizes: jax.Array, num_rows: int, step: Callable[[_Tile, Any], Any], outs: Any
) -> Any:
  """Folds `step(tile, outs)` over all tiles.

  The last tile of all starts early enough to end with the last row.
  """
  height = _height(num_rows, sizes.shape[0])
  tiles = (sizes + height - 1) // height
  tiles_end, slabs_end = jnp.cumsum(tiles), jnp.cumsum(sizes)
  # One table of all possible tiles is cheaper than computing each in its step.
  index = jnp.arange(num_rows // height + sizes.shape[0])
  slab = jnp.searchsorted(tiles_end, index, "right", method="compare_all")
  end = slabs_end[slab]
  first = end - sizes[slab] + height * (index - (tiles_end - tiles)[slab])
  start = jnp.minimum(first, num_rows - height)
  table = jnp.stack([slab, first, start, end], axis=1)
  return lax.fori_loop(
    0, tiles_end[-1], lambda i, outs: step(_Tile(height, *table[i]), outs), outs
  )


def _height(num_rows, num_slabs):
  """Returns a tile's height: the rows of an average slab, within limits."""
  average = max(num_rows // num_slabs, 1)
  height = 1 << (average - 1).bit_length()
  return min(max(height, _MIN_HEIGHT), _MAX_HEIGHT, num_rows)
