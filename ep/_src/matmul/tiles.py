# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls in XLA operations: a loop over tiles of rows.

XLA computes `lax.ragged_dot` on CPUs and GPUs as one masked matmul per matrix,
at a cost of rows x matrices. Here a loop covers only the used rows, in tiles:

    |---------------|---------------|---------------|---------------|
    |  slab 0                 |  slab 1     |  slab 2  |  unused ...
    |---------------|---------------|
                              |---------------|
    tile 0           tile 1   tile 2        tile 3

All tiles have the same height. A tile begins at the start of each slab. The
last tile of a slab reads past the slab's end, and keeps only the rows inside.

There are two loops:

* ON_CPU ends with the last slab. It multiplies float32. The bits of a result
depend on the rows of its slab alone: all dots have the same shape, with the
same rows at the same places. `outer` first sums the rows of each segment of a
slab, then adds the segments as a balanced tree. So the tree of all segments is
the sum of the trees of their two halves.

* ON_GPU has a static length, for any sizes of slabs. With a dynamic length, the
host would ask the device after each step whether another step follows. The
steps past the last slab compute products, but write no rows. Dots of float32
are exact, not in TF32, the default of XLA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools

from jax import Array, lax
import jax.numpy as jnp

from ep._src.base.arrays import iota
from ep._src.lax import ordered_sum
from ep._src.matmul import unwritten_rows
from ep._src.matmul.unwritten_rows import slice_rows, TAILS

_Arrays = Sequence[Array]
_Reader = Callable[[Array, int], Array]  # of a first row and a number of rows


@dataclasses.dataclass(frozen=True)
class Tiles:
  """The products of one of the two loops.

  Attributes:
    height: rows of a tile.
    on_gpu: whether the loop is the one for GPUs.
  """

  height: int
  on_gpu: bool

  def expand(
    self, sizes: Array, rows: Array, matrices: _Arrays, tail: str
  ) -> list[Array]:
    """Returns rows [C, F] times each of `matrices` [L, F, G], as [C, G]."""

    def fn(x: Array, *matrices: Array) -> list[Array]:
      return [_dot(x, w, 1, 0) for w in matrices]

    widths = [w.shape[2] for w in matrices]
    return self._map_tiles(fn, sizes, [rows], matrices, widths, tail)

  def contract(
    self, sizes: Array, outs: _Arrays, matrices: _Arrays, tail: str
  ) -> Array:
    """Returns [C, F]: the sum of outs [C, G] times matrices^T [L, G, F]."""
    n = len(outs)

    def fn(*operands: Array) -> list[Array]:
      pairs = zip(operands[:n], operands[n:], strict=True)
      return [functools.reduce(jnp.add, (_dot(y, w, 1, 1) for y, w in pairs))]

    widths = [matrices[0].shape[1]]
    (rows,) = self._map_tiles(fn, sizes, outs, matrices, widths, tail)
    return rows

  def outer(
    self,
    sizes: Array,
    rows: Array,
    outs: _Arrays,
    dtype: jnp.dtype,
    segments: Array | None = None,
  ) -> list[Array]:
    """Returns each slab's rows^T times each of `outs`: a list of [L, F, G]."""
    used = sizes.sum(dtype=jnp.int32)
    readers = [self._reader(x, used) for x in (rows, *outs)]

    def sums(start: Array | int, counts: Array) -> list[Array]:
      """Sums the rows of consecutive groups of `counts` rows."""

      def add(tile: _Tile, sums: _Arrays) -> list[Array]:
        x, *ys = (jnp.where(tile.inside(), tile.read(r), 0) for r in readers)
        return [
          _set_at(s, _at(s, tile.group) + _dot(x, y, 0, 0), tile.group)
          for s, y in zip(sums, ys, strict=True)
        ]

      shape = *counts.shape, rows.shape[1]
      zeros = [jnp.zeros((*shape, y.shape[1]), jnp.float32) for y in outs]
      return self._fold(add, zeros, start, counts, rows.shape[0])

    if self.on_gpu:
      return [s.astype(dtype) for s in sums(0, sizes)]
    if segments is None or segments.shape[1] == 0:
      segments = sizes[:, None]
    starts = _before(sizes)

    def sum_slab(slab: Array, totals: _Arrays) -> list[Array]:
      parts = sums(_at(starts, slab), _at(segments, slab))
      return [
        _set_at(s, ordered_sum.tree_sum(p), slab)
        for s, p in zip(totals, parts, strict=True)
      ]

    shape = *sizes.shape, rows.shape[1]
    totals = [
      unwritten_rows.new((*shape, y.shape[1]), jnp.float32) for y in outs
    ]
    totals = lax.fori_loop(0, sizes.shape[0], sum_slab, totals)
    return [s.astype(dtype) for s in totals]

  def _map_tiles(
    self,
    fn: Callable[..., _Arrays],
    sizes: Array,
    rows: _Arrays,
    matrices: _Arrays,
    widths: Sequence[int],
    tail: str,
  ) -> list[Array]:
    """Applies `fn` to the rows of each tile and the matrices of their slab.

    `fn` returns float32; the results have `widths` columns, and are rounded to
    the dtype of `rows`.
    """
    num_rows, dtype = rows[0].shape[0], rows[0].dtype
    used = sizes.sum(dtype=jnp.int32)
    readers = [self._reader(x, used) for x in rows]
    if self.on_gpu:
      matrices = [w.astype(dtype) for w in matrices]
      outs = [jnp.full((num_rows, w), TAILS[tail], dtype) for w in widths]
    else:
      outs = [unwritten_rows.new((num_rows, w), dtype) for w in widths]

    def step(tile: _Tile, outs: _Arrays) -> list[Array]:
      of_slab = [_at(w, tile.group) for w in matrices]
      if not self.on_gpu:
        of_slab = [_rounded(w, dtype) for w in of_slab]
      values = fn(*(tile.read(r) for r in readers), *of_slab)
      return [
        tile.write(out, x.astype(dtype))
        for out, x in zip(outs, values, strict=True)
      ]

    outs = self._fold(step, outs, 0, sizes, num_rows)
    if self.on_gpu:
      return outs
    return [unwritten_rows.finish(out, dtype, used, tail) for out in outs]

  def _reader(self, rows: Array, num_used: Array) -> _Reader:
    """Returns a function that reads the operands of dots."""
    if self.on_gpu:
      return functools.partial(slice_rows, rows)
    read = unwritten_rows.Reader(rows, num_used)
    return lambda start, height: _float32(read(start, height))

  def _fold(
    self,
    step: Callable[[_Tile, _Arrays], list[Array]],
    values: list[Array],
    start: Array | int,
    counts: Array,
    num_rows: int,
  ) -> list[Array]:
    """Folds `step` over the tiles of groups of `counts` rows after `start`."""
    numbers = lax.div(counts + (self.height - 1), jnp.int32(self.height))
    tiles_before = _before(numbers)
    starts = start + _before(counts)
    ends = starts + counts

    def fold(i: Array, values: list[Array]) -> list[Array]:
      group = (tiles_before <= i).sum(dtype=jnp.int32) - 1
      in_group = i - _at(tiles_before, group)
      first, end = _at(starts, group) + self.height * in_group, _at(ends, group)
      return step(_Tile(self, num_rows, group, first, end), values)

    num_tiles: Array | int = numbers.sum(dtype=jnp.int32)
    if self.on_gpu:
      most = num_rows + len(counts) * (self.height - 1)
      num_tiles = most // self.height
    values = lax.fori_loop(0, num_tiles, fold, values)
    return values


class _Tile:
  """Consecutive rows of a buffer: rows `first` to `end` of `group`.

  Near the end of the buffer, a tile starts early to end with the last row. On
  CPUs, a tile is read with its first row in front, as all other tiles are.
  """

  def __init__(
    self, tiles: Tiles, num_rows: int, group: Array, first: Array, end: Array
  ):
    self.group = group
    self._is_shifted = not tiles.on_gpu
    self._stored = min(tiles.height, num_rows)
    self._height = tiles.height if self._is_shifted else self._stored
    self._start = jnp.minimum(first, num_rows - self._stored)
    self._early = first - self._start
    self._num_inside = jnp.minimum(end - first, tiles.height)

  def read(self, rows: _Reader) -> Array:
    """Returns the rows of the tile, including rows past the group."""
    block = rows(self._start, self._stored)
    if not self._is_shifted:
      return block
    block = jnp.pad(block, ((0, self._height), (0, 0)))
    return slice_rows(block, self._early, self._height)

  def inside(self) -> Array:
    """Returns the mask [height, 1] of the rows of the group, as read."""
    before = 0 if self._is_shifted else self._early
    return self._mask(iota(self._height) - before)[:, None]

  def write(self, buffer: Array, rows: Array) -> Array:
    """Writes only the rows of the group, and returns the buffer."""
    if self._is_shifted:
      rows = jnp.pad(rows, ((self._stored, 0), (0, 0)))
      rows = slice_rows(rows, self._stored - self._early, self._stored)
    inside = self._mask(iota(self._stored) - self._early)
    return unwritten_rows.write(buffer, rows, self._start, inside)

  def _mask(self, place: Array) -> Array:
    return (place >= 0) & (place < self._num_inside)


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
  is_wide = x.dtype.itemsize >= 4
  return lax.dot_general(
    x,
    y,
    (((x_axis,), (y_axis,)), ((), ())),
    precision=lax.Precision.HIGHEST if is_wide else None,
    preferred_element_type=jnp.float32,
  )


def _before(counts: Array) -> Array:
  """Returns the exclusive prefix sums of `counts`."""
  return jnp.cumsum(counts, dtype=jnp.int32) - counts


_at = functools.partial(
  lax.dynamic_index_in_dim, keepdims=False, allow_negative_indices=False
)
_set_at = functools.partial(
  lax.dynamic_update_index_in_dim, axis=0, allow_negative_indices=False
)

ON_CPU = Tiles(64, on_gpu=False)
ON_GPU = Tiles(128, on_gpu=True)
