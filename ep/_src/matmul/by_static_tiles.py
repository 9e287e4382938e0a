# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls on GPUs, in XLA operations: a loop over tiles of rows.

The functions are the same as in by_tiles.py. The loop covers the whole table of
row_tiles.py, whose length is static. With a dynamic length, the host would ask
the device after each step whether another step follows. Tiles past the last
slab compute products, but write no rows.

Float32 products are exact, not in TF32, the default of XLA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import Any, NamedTuple

from jax import Array, lax
import jax.numpy as jnp

from ep._src.base.arrays import iota
from ep._src.matmul import row_tiles
from ep._src.matmul.unwritten_rows import TAILS

_Arrays = Sequence[Array]

_HEIGHT = 128  # rows of a tile


def expand(
  sizes: Array, rows: Array, matrices: _Arrays, tail: str
) -> list[Array]:
  return [_products(sizes, [rows], [w], 0, tail) for w in matrices]


def contract(
  sizes: Array, outs: _Arrays, matrices: _Arrays, tail: str
) -> Array:
  return _products(sizes, outs, matrices, 1, tail)


def outer(
  sizes: Array, rows: Array, outs: _Arrays, dtype: jnp.dtype
) -> list[Array]:
  def add(tile: _Tile, sums: _Arrays) -> list[Array]:
    x, *ys = (jnp.where(tile.inside, tile.rows(a), 0) for a in (rows, *outs))
    return [
      s.at[tile.slab].add(_dot(x, y, 0, 0))
      for s, y in zip(sums, ys, strict=True)
    ]

  shape = *sizes.shape, rows.shape[1]
  sums = [jnp.zeros((*shape, y.shape[1]), jnp.float32) for y in outs]
  return [s.astype(dtype) for s in _fold(add, sizes, rows.shape[0], sums)]


def _products(
  sizes: Array, lefts: _Arrays, matrices: _Arrays, axis: int, tail: str
) -> Array:
  """Returns the sum of the products `lefts[i] @ matrices[i]`, rounded once."""
  num_rows, dtype = lefts[0].shape[0], lefts[0].dtype
  matrices = [w.astype(dtype) for w in matrices]

  def write(tile: _Tile, out: Array) -> Array:
    pairs = zip(lefts, matrices, strict=True)
    products = [_dot(tile.rows(x), w[tile.slab], 1, axis) for x, w in pairs]
    values = functools.reduce(jnp.add, products).astype(dtype)
    values = jnp.where(tile.inside, values, tile.rows(out))
    return lax.dynamic_update_slice_in_dim(out, values, tile.start, 0)

  shape = num_rows, matrices[0].shape[2 - axis]
  init = jnp.full(shape, TAILS[tail], dtype)
  rows: Array = _fold(write, sizes, num_rows, init)
  return rows


class _Tile(NamedTuple):
  """A tile: slab, first row, and mask [height, 1] of the slab's rows."""

  slab: Array
  start: Array
  inside: Array

  def rows(self, array: Array) -> Array:
    return lax.dynamic_slice_in_dim(array, self.start, len(self.inside))


def _fold(
  step: Callable[[_Tile, Any], Any], sizes: Array, num_rows: int, init: Any
) -> Any:
  height = min(_HEIGHT, num_rows)
  tiles, row = row_tiles.tiles(sizes, num_rows, height), iota(height)[:, None]

  def fold(i: Array, value: Any) -> Any:
    inside = (row >= tiles.begin[i]) & (row < tiles.end[i])
    return step(_Tile(tiles.slab[i], tiles.start[i], inside), value)

  return lax.fori_loop(0, len(tiles.slab), fold, init)


def _dot(x: Array, y: Array, x_axis: int, y_axis: int) -> Array:
  is_wide = x.dtype.itemsize >= 4
  return lax.dot_general(
    x,
    y,
    (((x_axis,), (y_axis,)), ((), ())),
    precision=lax.Precision.HIGHEST if is_wide else None,
    preferred_element_type=jnp.float32,
  )
