# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls on GPUs, in XLA operations: a loop over tiles of rows.

The functions are the same as in by_tiles.py. The loop covers the whole table of
row_tiles.py, whose length is static. With a dynamic length, the host would ask
the device after each step whether another one follows. Tiles past the last slab
compute products, but write no rows. Segments have no effect.

Float32 products are exact, not in TF32, the default of XLA.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from ep._src.base.arrays import iota
from ep._src.matmul import row_tiles
from ep._src.matmul.unwritten_rows import TAILS

_HEIGHT = 128  # rows of a tile


def expand(sizes, segments, rows, matrices, tail):
  """Returns rows [C, F] times each of `matrices` [L, F, G]: list of [C, G]."""
  del segments
  return [_products(sizes, [rows], [w], 0, tail) for w in matrices]


def contract(sizes, segments, outs, matrices, tail):
  """Returns [C, F]: the sum of outs [C, G] times matrices^T [L, G, F]."""
  del segments
  return _products(sizes, outs, matrices, 1, tail)


def outer(sizes, segments, rows, outs, dtype):
  """Returns each slab's rows^T times each of `outs`: a list of [L, F, G]."""
  del segments

  def add(tile, sums):
    x, *ys = (jnp.where(tile.inside, tile.rows(a), 0) for a in (rows, *outs))
    return [
      s.at[tile.slab].add(_dot(x, y, 0, 0))
      for s, y in zip(sums, ys, strict=True)
    ]

  shape = *sizes.shape, rows.shape[1]
  sums = [jnp.zeros((*shape, y.shape[1]), jnp.float32) for y in outs]
  return [s.astype(dtype) for s in _fold(add, sizes, rows.shape[0], sums)]


def _products(sizes, lefts, matrices, axis, tail):
  """Returns the sum of the products of all pairs, rounded once."""
  num_rows, dtype = lefts[0].shape[0], lefts[0].dtype
  matrices = [w.astype(dtype) for w in matrices]

  def write(tile, out):
    pairs = zip(lefts, matrices, strict=True)
    products = [_dot(tile.rows(x), w[tile.slab], 1, axis) for x, w in pairs]
    values = functools.reduce(jnp.add, products).astype(dtype)
    values = jnp.where(tile.inside, values, tile.rows(out))
    return lax.dynamic_update_slice_in_dim(out, values, tile.start, 0)

  shape = num_rows, matrices[0].shape[2 - axis]
  return _fold(write, sizes, num_rows, jnp.full(shape, TAILS[tail], dtype))


class _Tile(NamedTuple):
  """A tile: its slab, its first row, and a mask [height, 1] of slab's rows."""

  slab: jax.Array
  start: jax.Array
  inside: jax.Array

  def rows(self, array):
    return lax.dynamic_slice_in_dim(array, self.start, len(self.inside))


def _fold(step, sizes, num_rows, init):
  """Folds `step(tile, value)` over all tiles."""
  height = min(_HEIGHT, num_rows)
  tiles, row = row_tiles.tiles(sizes, num_rows, height), iota(height)[:, None]

  def fold(i, value):
    inside = (row >= tiles.begin[i]) & (row < tiles.end[i])
    return step(_Tile(tiles.slab[i], tiles.start[i], inside), value)

  return lax.fori_loop(0, len(tiles.slab), fold, init)


def _dot(x, y, x_axis, y_axis):
  is_wide = x.dtype.itemsize >= 4
  return lax.dot_general(
    x,
    y,
    (((x_axis,), (y_axis,)), ((), ())),
    precision=lax.Precision.HIGHEST if is_wide else None,
    preferred_element_type=jnp.float32,
  )
