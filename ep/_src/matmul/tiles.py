# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls in XLA operations: a loop over tiles of rows.

XLA computes `lax.ragged_dot` on CPUs and GPUs as one masked matmul per matrix,
at a cost of rows x matrices. Here a loop covers the rows once, in tiles:

    |---------------|---------------|---------------|---------------|
    |  slab 0                 |  slab 1     |  slab 2  |  unused ...
    |---------------|---------------|
                              |---------------|
    tile 0           tile 1   tile 2        tile 3

All tiles have the same height. A tile begins at the start of each slab. The
last tile of a slab reads past the slab's end, and keeps only the rows inside.

The loop has a static length, for any sizes of slabs. With a dynamic length, the
host of a GPU would ask the device after each step whether another step follows.
The steps past the last slab compute products, but write no rows. Dots of
float32 are exact, not in TF32, the default of XLA on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools

from jax import Array, lax
import jax.numpy as jnp

from ep._src.base.arrays import read_rows, TAILS, write_rows

_Arrays = Sequence[Array]

_HEIGHT = 128  # rows of a tile


def expand(
  sizes: Array, rows: Array, matrices: _Arrays, tail: str
) -> list[Array]:
  """Returns rows [C, F] times each of `matrices` [L, F, G], as [C, G]."""

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
  sizes: Array, rows: Array, outs: _Arrays, dtype: jnp.dtype
) -> list[Array]:
  """Returns each slab's rows^T times each of `outs`: a list of [L, F, G]."""

  def add(tile: _Tile, sums: _Arrays) -> list[Array]:
    x, *ys = (jnp.where(tile.inside[:, None], tile.read(r), 0) for r in arrays)
    return [
      _set_at(s, _at(s, tile.slab) + _dot(x, y, 0, 0), tile.slab)
      for s, y in zip(sums, ys, strict=True)
    ]

  arrays = rows, *outs
  shape = *sizes.shape, rows.shape[1]
  sums = [jnp.zeros((*shape, y.shape[1]), jnp.float32) for y in outs]
  return [s.astype(dtype) for s in _fold(add, sums, sizes, rows.shape[0])]


def _map_tiles(
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
  matrices = [w.astype(dtype) for w in matrices]

  def step(tile: _Tile, outs: _Arrays) -> list[Array]:
    values = fn(*map(tile.read, rows), *(_at(w, tile.slab) for w in matrices))
    return [
      tile.write(out, x.astype(dtype))
      for out, x in zip(outs, values, strict=True)
    ]

  outs = [jnp.full((num_rows, w), TAILS[tail], dtype) for w in widths]
  return _fold(step, outs, sizes, num_rows)


def _fold(
  step: Callable[[_Tile, _Arrays], list[Array]],
  values: list[Array],
  sizes: Array,
  num_rows: int,
) -> list[Array]:
  """Folds `step` over the tiles of all slabs."""
  tiles_before = _before(lax.div(sizes + (_HEIGHT - 1), jnp.int32(_HEIGHT)))
  starts = _before(sizes)
  ends = starts + sizes

  def fold(i: Array, values: list[Array]) -> list[Array]:
    slab = (tiles_before <= i).sum(dtype=jnp.int32) - 1
    first = _at(starts, slab) + _HEIGHT * (i - _at(tiles_before, slab))
    return step(_Tile(num_rows, slab, first, _at(ends, slab)), values)

  num_tiles = (num_rows + len(sizes) * (_HEIGHT - 1)) // _HEIGHT
  values = lax.fori_loop(0, num_tiles, fold, values)
  return values


class _Tile:
  """Consecutive rows of a buffer, of which rows `first` to `end` are of a slab.

  Near the end of the buffer, a tile starts early to end with the last row.

  Attributes:
    slab: the number of the slab.
    start: the first row.
    inside: the mask of the rows of the slab.
  """

  def __init__(self, num_rows: int, slab: Array, first: Array, end: Array):
    self.slab = slab
    self._height = min(_HEIGHT, num_rows)
    self.start = jnp.minimum(first, num_rows - self._height)
    row = self.start + lax.iota(jnp.int32, self._height)
    self.inside = (row >= first) & (row < end)

  def read(self, rows: Array) -> Array:
    """Returns the rows of the tile, including rows outside of the slab."""
    return read_rows(rows, self.start, self._height)

  def write(self, rows: Array, values: Array) -> Array:
    """Returns `rows` with the tile's `values` in the rows of the slab."""
    values = jnp.where(self.inside[:, None], values, self.read(rows))
    return write_rows(rows, values, self.start)


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
