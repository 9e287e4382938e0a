# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls on GPUs and TPUs: `lax.ragged_dot`.

The functions are the same as in by_tiles.py. XLA may read unused rows, so these
functions set unused rows to zero where a sum could include them.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools

from jax import Array, lax
import jax.numpy as jnp

from ep._src.matmul.unwritten_rows import cut

_Arrays = Sequence[Array]


def expand(
  sizes: Array, rows: Array, matrices: _Arrays, tail: str
) -> list[Array]:
  dots = (_dot(sizes, rows, w).astype(rows.dtype) for w in matrices)
  return [cut(out, sizes.sum(dtype=jnp.int32), tail) for out in dots]


def contract(
  sizes: Array, outs: _Arrays, matrices: _Arrays, tail: str
) -> Array:
  terms = [
    _dot(sizes, y, w.swapaxes(1, 2))
    for y, w in zip(outs, matrices, strict=True)
  ]
  rows = functools.reduce(jnp.add, terms).astype(outs[0].dtype)
  return cut(rows, sizes.sum(dtype=jnp.int32), tail)


def outer(
  sizes: Array, rows: Array, outs: _Arrays, dtype: jnp.dtype
) -> list[Array]:
  dimensions = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
  )
  used = sizes.sum(dtype=jnp.int32)
  rows = cut(rows, used)
  return [
    lax.ragged_dot_general(
      rows,
      cut(y, used),
      sizes,
      dimensions,
      preferred_element_type=jnp.float32,
    ).astype(dtype)
    for y in outs
  ]


def _dot(sizes: Array, rows: Array, matrices: Array) -> Array:
  matrices = matrices.astype(rows.dtype)
  return lax.ragged_dot(
    rows, matrices, sizes, preferred_element_type=jnp.float32
  )
