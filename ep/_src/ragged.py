# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls on GPUs and TPUs: `lax.ragged_dot`.

The functions are those of tiles.py. XLA does not promise that `ragged_dot` does
not read the unused rows, so these are zero where they could reach a sum.
"""

from __future__ import annotations

import functools

from jax import lax
import jax.numpy as jnp


def expand(sizes, rows, matrices):
  """Returns [C, G] for each of the matrices [L, F, G]: rows [C, F] times it."""
  return [_cut(_dot(sizes, rows, w), sizes, rows.dtype) for w in matrices]


def contract(sizes, outs, matrices):
  """Returns [C, F]: the sum of each of `outs` [C, G] times its [L, F, G]^T."""
  terms = [
    _dot(sizes, y, w.swapaxes(1, 2))
    for y, w in zip(outs, matrices, strict=True)
  ]
  return _cut(functools.reduce(jnp.add, terms), sizes, outs[0].dtype)


def outer(sizes, rows, outs):
  """Returns [L, F, G] for each of `outs` [C, G]: each slab's rows^T times it."""
  dimensions = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
  )
  rows = _cut(rows, sizes, rows.dtype)
  return [
    lax.ragged_dot_general(
      rows,
      _cut(y, sizes, y.dtype),
      sizes,
      dimensions,
      preferred_element_type=jnp.float32,
    ).astype(rows.dtype)
    for y in outs
  ]


def _dot(sizes, rows, matrices):
  return lax.ragged_dot(
    rows, matrices, sizes, preferred_element_type=jnp.float32
  )


def _cut(rows, sizes, dtype):
  """Returns rows as `dtype`, with zeros after the last slab."""
  used = jnp.arange(rows.shape[0]) < sizes.sum()
  return jnp.where(used[:, None], rows.astype(dtype), 0)
