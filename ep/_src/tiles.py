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
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from ep._src import ordered_sum, row_buffers

_MIN_HEIGHT, _MAX_HEIGHT = 16, 128  # rows; 64 and more were measured fastest
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
  height, is_sum = _height(num_rows, segments), [s is not None for s in sums]
  sources = [
    x if m else row_buffers.Reader(x, used)
    for x, m in zip(operands, is_matrix, strict=True)
  ]
  types = jax.eval_shape(
    functools.partial(fn, Block()), *block_types(operands, is_matrix, height)
  )

  def values(tile, slab):
    return fn(
      tile,
      *(
        _rounded(_at(x, slab), dtype) if m else tile.read(x)
        for x, m in zip(sources, is_matrix, strict=True)
      ),
    )

  def zeros(length):
    """Returns sums of nothing, of slabs or segments, and None for rows."""
    return [
      jnp.zeros((length, *t.shape), jnp.float32) if s else None
      for t, s in zip(types, is_sum, strict=True)
    ]

  def update(tile, outs, slab):
    """Updates the results that are not None."""
    new = zip(outs, values(tile, slab), is_sum, strict=True)
    return [
      out
      if out is None
      else out.at[tile.slab].add(
        value, mode="promise_in_bounds", wrap_negative_indices=False
      )
      if s
      else tile.write(out, value)
      for out, value, s in new
    ]

  def add_slab(slab, totals):
    parts = _for_each_tile(
      _at(starts, slab),
      _at(segments, slab),
      num_rows,
      height,
      lambda tile, parts: update(tile, parts, slab),
      zeros(segments.shape[1]),
      aligned=True,
    )
    return jax.tree.map(
      lambda t, p: _set_at(t, ordered_sum.tree_sum(p), slab), totals, parts
    )

  totals = zeros(sizes.shape[0])
  outs = [
    None if s else row_buffers.new((num_rows, *t.shape[1:]), t.dtype, tail)
    for t, s in zip(types, is_sum, strict=True)
  ]
  if segments.shape[1] and any(is_sum):
    starts = jnp.cumsum(sizes) - sizes
    totals = lax.fori_loop(0, sizes.shape[0], add_slab, totals)
  else:
    outs = _merged(outs, totals)
  if not (segments.shape[1] and all(is_sum)):
    outs = _for_each_tile(
      0,
      sizes,
      num_rows,
      height,
      lambda tile, outs: update(tile, outs, tile.slab),
      outs,
    )
  return [
    row_buffers.finish(out, t.dtype, used, tail) if s is None else out.astype(s)
    for out, t, s in zip(_merged(outs, totals), types, sums, strict=True)
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


def _merged(values, others):
  """Returns the values, with those of `others` in the place of None."""
  return [b if a is None else a for a, b in zip(values, others, strict=True)]


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


def _for_each_tile(
  start: jax.Array | int,
  sizes: jax.Array,
  num_rows: int,
  height: int,
  step: Callable[[_Tile, Any], Any],
  outs: Any,
  aligned: bool = False,
) -> Any:
  """Folds `step(tile, outs)` over the tiles of slabs of `sizes` from `start`.

  Of all possible tiles there is one table, since that is cheaper than computing
  each in its step. Its sums and those before it take the place of sorts and
  gathers, because XLA compiles few operations sooner.
  """
  counts = jnp.stack([lax.div(sizes + (height - 1), jnp.int32(height)), sizes])
  is_before = jnp.arange(sizes.shape[0]) < jnp.arange(sizes.shape[0])[:, None]
  before = _sum_where(is_before, counts[:, None])
  tiles, tiles_before = counts[0], before[0]
  first = start + before[1]
  index = jnp.arange(num_rows // height + sizes.shape[0], dtype=jnp.int32)
  of_slab = index[:, None] - tiles_before
  slab = jnp.arange(sizes.shape[0], dtype=jnp.int32)
  table = _sum_where(
    (0 <= of_slab) & (of_slab < tiles),
    jnp.stack([slab, first - height * tiles_before, first + sizes])[:, None],
  )

  def fold(i, outs):
    slab, first, end = _at(table, i, axis=1)
    tile = _Tile(num_rows, height, aligned, slab, first + height * i, end)
    return step(tile, outs)

  return lax.fori_loop(0, tiles.sum(dtype=jnp.int32), fold, outs)


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


def _height(num_rows, segments):
  """Returns a tile's height: the rows of an average slab, within limits."""
  num_slabs, num_segments = segments.shape
  if num_segments:
    return _FIXED_HEIGHT
  average = max(num_rows // num_slabs, 1)
  height = 1 << (average - 1).bit_length()
  return min(max(height, _MIN_HEIGHT), _MAX_HEIGHT, num_rows)
