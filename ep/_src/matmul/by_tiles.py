# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls in XLA operations, for CPUs without the native library.

XLA:CPU computes `lax.ragged_dot` as one masked matmul per matrix, at a cost of
rows x matrices. Here a loop covers only the used rows, in tiles:

    |---------------|---------------|---------------|---------------|
    |  slab 0                 |  slab 1     |  slab 2  |  unused ...
    |---------------|---------------|
                              |---------------|
    tile 0           tile 1   tile 2        tile 3

All tiles have the same height. A tile begins at the start of each slab. The
last tile of a slab reads past the slab's end, and keeps only the rows inside.
The loop ends with the last slab, so unused rows are never read.

The bits of a result depend on the rows of its slab alone: all dots have the
same shape, with the same rows at the same places. `outer` first sums the rows
of each segment of a slab, then adds the segments as a balanced tree. So the
tree of all segments is the sum of the trees of their two halves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools

from jax import Array, lax
import jax.numpy as jnp

from ep._src.base.arrays import iota
from ep._src.matmul import ordered_sum, unwritten_rows
from ep._src.matmul.unwritten_rows import slice_rows

_Arrays = Sequence[Array]

_HEIGHT = 64  # rows of a tile


def expand(
  sizes: Array, rows: Array, matrices: _Arrays, tail: str
) -> list[Array]:
  """Returns rows [C, F] times each of `matrices` [L, F, G]: list of [C, G]."""

  def fn(x: Array, *matrices: Array) -> list[Array]:
    return [_dot(x, w, 1, 0) for w in matrices]

  widths = [w.shape[2] for w in matrices]
  return _map_tiles(fn, sizes, [rows], matrices, widths, tail)


def contract(
  sizes: Array, outs: _Arrays, matrices: _Arrays, tail: str
) -> Array:
  """Returns [C, F]: the sum of outs [C, G] times matrices^T [L, G, F]."""
  n = len(outs)

  def fn(*operands: Array) -> list[Array]:
    pairs = zip(operands[:n], operands[n:], strict=True)
    return [functools.reduce(jnp.add, (_dot(y, w, 1, 1) for y, w in pairs))]

  widths = [matrices[0].shape[1]]
  (rows,) = _map_tiles(fn, sizes, outs, matrices, widths, tail)
  return rows


def outer(
  sizes: Array,
  rows: Array,
  outs: _Arrays,
  dtype: jnp.dtype,
  segments: Array | None = None,
) -> list[Array]:
  """Returns each slab's rows^T times each of `outs`: a list of [L, F, G]."""
  if segments is None or segments.shape[1] == 0:
    segments = sizes[:, None]
  used = sizes.sum(dtype=jnp.int32)
  readers = [unwritten_rows.Reader(x, used) for x in (rows, *outs)]
  starts = _before(sizes)

  def sum_slab(slab: Array, sums: _Arrays) -> list[Array]:
    """Sums the rows of each segment of a slab, then adds the segments."""

    def add(tile: _Tile, parts: _Arrays) -> list[Array]:
      x, *ys = (tile.inside(_float32(tile.read(r))) for r in readers)
      return [
        _set_at(p, _at(p, tile.slab) + _dot(x, y, 0, 0), tile.slab)
        for p, y in zip(parts, ys, strict=True)
      ]

    shape = segments.shape[1], rows.shape[1]
    zeros = [jnp.zeros((*shape, y.shape[1]), jnp.float32) for y in outs]
    counts = _at(segments, slab)
    tiles = _Tiles(_at(starts, slab), counts, rows.shape[0])
    parts = tiles.fold(add, zeros)
    return [
      _set_at(s, ordered_sum.tree_sum(p), slab)
      for s, p in zip(sums, parts, strict=True)
    ]

  shape = *sizes.shape, rows.shape[1]
  sums = [unwritten_rows.new((*shape, y.shape[1]), jnp.float32) for y in outs]
  sums = lax.fori_loop(0, sizes.shape[0], sum_slab, sums)
  return [s.astype(dtype) for s in sums]


def _map_tiles(
  fn: Callable[..., _Arrays],
  sizes: Array,
  rows: _Arrays,
  matrices: _Arrays,
  widths: Sequence[int],
  tail: str,
) -> list[Array]:
  """Applies `fn` to the rows of each tile and the matrices of the tile's slab.

  `fn` gets and returns float32; the results have `widths` columns, and are
  rounded to the dtype of `rows`.
  """
  num_rows, dtype = rows[0].shape[0], rows[0].dtype
  used = sizes.sum(dtype=jnp.int32)
  readers = [unwritten_rows.Reader(x, used) for x in rows]

  def step(tile: _Tile, outs: _Arrays) -> list[Array]:
    values = fn(
      *(_float32(tile.read(r)) for r in readers),
      *(_rounded(_at(w, tile.slab), dtype) for w in matrices),
    )
    return [
      tile.write(out, x.astype(dtype))
      for out, x in zip(outs, values, strict=True)
    ]

  outs = [unwritten_rows.new((num_rows, n), dtype) for n in widths]
  outs = _Tiles(0, sizes, num_rows).fold(step, outs)
  return [unwritten_rows.finish(out, dtype, used, tail) for out in outs]


def _float32(x: Array) -> Array:
  return x.astype(jnp.float32)


def _rounded(matrix: Array, dtype: jnp.dtype) -> Array:
  """Rounds a matrix to `dtype`, and returns the values as float32.

  XLA may remove a conversion and its inverse, but not `reduce_precision`.
  """
  if matrix.dtype == dtype:
    return _float32(matrix)
  info = jnp.finfo(dtype)
  return lax.reduce_precision(_float32(matrix), info.nexp, info.nmant)


def _dot(x: Array, y: Array, x_axis: int, y_axis: int) -> Array:
  return lax.dot_general(x, y, (((x_axis,), (y_axis,)), ((), ())))


class _Tile:
  """Consecutive rows of a buffer: rows `first` to `end` of `slab`."""

  def __init__(self, num_rows: int, slab: Array, first: Array, end: Array):
    self.slab = slab
    self._stored = min(_HEIGHT, num_rows)
    # Near the end of the buffer, a tile starts early to end with the last row.
    self._start = jnp.minimum(first, num_rows - self._stored)
    self._early = first - self._start
    self._num_inside = jnp.minimum(end - first, _HEIGHT)

  def read(self, rows: unwritten_rows.Reader) -> Array:
    """Returns _HEIGHT rows from `first` on, including rows past the slab."""
    block = rows(self._start, self._stored)
    block = jnp.pad(block, ((0, _HEIGHT), (0, 0)))
    return slice_rows(block, self._early, _HEIGHT)

  def inside(self, rows: Array) -> Array:
    """Returns the rows, with zeros for rows past the slab."""
    return jnp.where((iota(_HEIGHT) < self._num_inside)[:, None], rows, 0)

  def write(self, buffer: Array, rows: Array) -> Array:
    """Writes only the rows inside the slab, and returns the buffer."""
    rows = jnp.pad(rows, ((self._stored, 0), (0, 0)))
    rows = slice_rows(rows, self._stored - self._early, self._stored)
    place = iota(self._stored) - self._early
    inside = (place >= 0) & (place < self._num_inside)
    return unwritten_rows.write(buffer, rows, self._start, inside)


class _Tiles:
  """The tiles of slabs of `sizes` rows; the first slab begins at `start`."""

  def __init__(self, start: Array | int, sizes: Array, num_rows: int):
    self._num_rows = num_rows
    self._counts = lax.div(sizes + (_HEIGHT - 1), jnp.int32(_HEIGHT))
    self._tiles_before = _before(self._counts)
    self._starts = start + _before(sizes)
    self._ends = self._starts + sizes

  def fold(
    self, step: Callable[[_Tile, _Arrays], list[Array]], outs: list[Array]
  ) -> list[Array]:

    def fold(i: Array, outs: list[Array]) -> list[Array]:
      slab = (self._tiles_before <= i).sum(dtype=jnp.int32) - 1
      in_slab = i - _at(self._tiles_before, slab)
      first = _at(self._starts, slab) + _HEIGHT * in_slab
      tile = _Tile(self._num_rows, slab, first, _at(self._ends, slab))
      return step(tile, outs)

    outs = lax.fori_loop(0, self._counts.sum(dtype=jnp.int32), fold, outs)
    return outs


def _before(counts: Array) -> Array:
  """Returns the exclusive prefix sums of `counts`."""
  return jnp.cumsum(counts, dtype=jnp.int32) - counts


_at = functools.partial(
  lax.dynamic_index_in_dim, keepdims=False, allow_negative_indices=False
)
_set_at = functools.partial(
  lax.dynamic_update_index_in_dim, axis=0, allow_negative_indices=False
)
