# SPDX-License-Identifier: Apache-2.0
"""Multiplies each slab of rows by its own matrix, in time linear in the rows.

`lax.ragged_dot` is this operation, and is what GPUs and TPUs run here. On CPUs
XLA computes it as one masked matmul per matrix, at a cost of rows x matrices;
there, a loop over blocks of rows takes its place:

    block 0          block 1          block 2          block 3
    |---------------|---------------|---------------|---------------|
    |  slab 0                 |  slab 1     |  slab 2  |  unused ...
    |---------------|---------|     |-------|     |----|
    tile 0           tile 1    tile 2        tile 3

Each slab is cut into tiles of a block's height, the last of which reads past
the slab's end and keeps only what is inside. The loop ends with the last tile
of the last slab, so unused rows cost nothing and are never read.

The derivatives of a grouped matmul are one more grouped matmul and one grouped
outer product, whose own derivatives are grouped matmuls:

    y = x W          dx = dy W^T        dW = x^T dy        (slab by slab)
    W = x^T y        dx = y dW^T        dy = x dW

so two functions, each with a VJP made of the two, are differentiable any number
of times in reverse.
"""

import jax
from jax import lax
import jax.numpy as jnp

from ep._src import compat

_MIN_BLOCK, _MAX_BLOCK = 16, 128  # rows; 64 and more were measured fastest


def grouped_matmul(
  rows: jax.Array, matrices: jax.Array, group_sizes: jax.Array
) -> jax.Array:
  """Returns `rows[r] @ matrices[j]` for every row r of slab j.

  Slab j is the `group_sizes[j]` rows after those of slabs 0 to j - 1. Rows
  after the last slab are never read, whatever they hold, NaN included: their
  results and gradients are zero.

  Products are summed in float32 and rounded once to the dtype of `rows`.
  Differentiable in `rows` and `matrices`, in reverse mode, to any order.

  Args:
    rows: `[C, F]`.
    matrices: `[L, F, G]`, of the dtype of `rows`.
    group_sizes: int32 `[L]`, not negative, of a sum up to C.

  Returns:
    `[C, G]`, of the dtype of `rows`.

  Raises:
    ValueError: if shapes or dtypes do not fit.
  """
  rows, matrices = jnp.asarray(rows), jnp.asarray(matrices)
  group_sizes = jnp.asarray(group_sizes)
  shapes = f"rows {rows.shape}, matrices {matrices.shape}, group_sizes " + (
    f"{group_sizes.shape}"
  )
  if (rows.ndim, matrices.ndim, group_sizes.ndim) != (2, 3, 1) or (
    matrices.shape[:2] != (*group_sizes.shape, rows.shape[1])
  ):
    raise ValueError(
      f"grouped_matmul: got {shapes}; expected [C, F], [L, F, G] and [L]."
    )
  if rows.dtype != matrices.dtype:
    raise ValueError(
      f"grouped_matmul: rows are {rows.dtype} and matrices {matrices.dtype}; "
      "convert one with .astype, so that it is clear which precision is meant."
    )
  return _matmul(*compat.vary_together(rows, matrices, group_sizes))


@jax.custom_vjp
def _matmul(rows, matrices, sizes):
  return lax.platform_dependent(
    rows, matrices, sizes, cpu=_matmul_by_tiles, default=_matmul_ragged
  )


def _matmul_fwd(rows, matrices, sizes):
  return _matmul(rows, matrices, sizes), (rows, matrices, sizes)


def _matmul_bwd(residuals, g):
  rows, matrices, sizes = residuals
  return (
    _matmul(g, matrices.swapaxes(1, 2), sizes),
    _outer(rows, g, sizes),
    None,
  )


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


@jax.custom_vjp
def _outer(left, right, sizes):
  """Returns [L, F, G], `left.T @ right` of each slab of [C, F] and [C, G]."""
  return lax.platform_dependent(
    left, right, sizes, cpu=_outer_by_tiles, default=_outer_ragged
  )


def _outer_fwd(left, right, sizes):
  return _outer(left, right, sizes), (left, right, sizes)


def _outer_bwd(residuals, g):
  left, right, sizes = residuals
  return (
    _matmul(right, g.swapaxes(1, 2), sizes),
    _matmul(left, g, sizes),
    None,
  )


_outer.defvjp(_outer_fwd, _outer_bwd)


def _matmul_by_tiles(rows, matrices, sizes):
  def tile(expert, start, inside, out):
    rows_ = lax.dynamic_slice_in_dim(rows, start, inside.shape[0])
    before = lax.dynamic_slice_in_dim(out, start, inside.shape[0])
    after = jnp.where(inside, _dot(rows_, matrices[expert]), before)
    return lax.dynamic_update_slice_in_dim(out, after, start, 0)

  shape = (rows.shape[0], matrices.shape[2])
  return _for_each_tile(rows, sizes, tile, shape)


def _outer_by_tiles(left, right, sizes):
  def tile(expert, start, inside, sums):
    def rows_of(x):  # with zeros outside the slab, where x may be NaN
      rows = lax.dynamic_slice_in_dim(x, start, inside.shape[0])
      return jnp.where(inside, rows, 0)

    return sums.at[expert].add(_dot(rows_of(left).T, rows_of(right)))

  shape = (sizes.shape[0], left.shape[1], right.shape[1])
  return _for_each_tile(left, sizes, tile, shape)


def _dot(x, y):
  return jnp.dot(x.astype(jnp.float32), y.astype(jnp.float32))


def _for_each_tile(rows, sizes, tile, shape):
  """Folds `tile(expert, start, inside [height, 1], out)` over all tiles.

  A tile is `height` rows from `start`; `inside` marks those that belong to the
  slab of `expert`. The last tile of all starts early enough to end with the
  last row. `out` starts at zero and is float32 until the end, because XLA:CPU
  would convert all of a narrower array for each update of a part.
  """
  num_rows = rows.shape[0]
  height = _block(num_rows, sizes.shape[0])
  tiles = (sizes + height - 1) // height
  tiles_end, slabs_end = jnp.cumsum(tiles), jnp.cumsum(sizes)
  # One table of all possible tiles is cheaper than computing each in its step.
  index = jnp.arange(num_rows // height + sizes.shape[0])
  expert = jnp.searchsorted(tiles_end, index, "right", method="compare_all")
  end = slabs_end[expert]
  first = end - sizes[expert] + height * (index - (tiles_end - tiles)[expert])
  start = jnp.minimum(first, num_rows - height)
  table = jnp.stack([expert, start, first, end], axis=1)

  def step(i, out):
    expert, start, first, end = table[i]
    row = start + jnp.arange(height)
    inside = (first <= row) & (row < end)
    return tile(expert, start, inside[:, None], out)

  zeros, _ = compat.vary_together(jnp.zeros(shape, jnp.float32), rows)
  out = lax.fori_loop(0, tiles_end[-1], step, zeros)
  return out.astype(rows.dtype)


def _block(num_rows, num_slabs):
  """Returns a tile's height: the rows of an average slab, within limits."""
  average = max(num_rows // num_slabs, 1)
  height = 1 << (average - 1).bit_length()
  return min(max(height, _MIN_BLOCK), _MAX_BLOCK, num_rows)


def _matmul_ragged(rows, matrices, sizes):
  out = lax.ragged_dot(
    rows, matrices, sizes, preferred_element_type=jnp.float32
  )
  return _without_unused(out.astype(rows.dtype), sizes)


def _outer_ragged(left, right, sizes):
  dimensions = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
  )
  return lax.ragged_dot_general(
    _without_unused(left, sizes),
    _without_unused(right, sizes),
    sizes,
    dimensions,
    preferred_element_type=jnp.float32,
  ).astype(left.dtype)


def _without_unused(rows, sizes):
  used = jnp.arange(rows.shape[0]) < sizes.sum()
  return jnp.where(used[:, None], rows, 0)
