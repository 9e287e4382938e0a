# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls by a function with the arguments of `lax.ragged_dot`.

The methods are the functions of tiles.py. A function gives the product of
rows and matrices. The product with transposed matrices is the function of the
swapped matrices, and the gradient of the matrices is the function's gradient.

A function may read unused rows and leave them unwritten, so the methods cut
results where the caller asks for it. A gradient that could add unused rows cuts
both operands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools

import jax
from jax import Array, lax
import jax.numpy as jnp

from ep._src.base import arguments
from ep._src.base.arrays import cut

_Arrays = Sequence[Array]

# The gradient of matrices as a ragged dot, which sums over the rows of a slab.
_OVER_ROWS = lax.RaggedDotDimensionNumbers(
  dot_dimension_numbers=(([0], [0]), ([], [])),
  lhs_ragged_dimensions=[0],
  rhs_group_dimensions=[],
)


@dataclasses.dataclass(frozen=True)
class ByFunction:
  """The products of a function, and of other functions if there are some.

  Attributes:
    dot: returns rows [C, F] times matrices [L, F, G], as an array [C, G], given
      rows, matrices and group sizes int32 [L].
    dot_transposed: the same for matrices [L, G, F]; None swaps their axes.
    gradient: returns the gradient [L, F, G] of matrices of a dtype, given rows
      [C, F], cotangents [C, G], group sizes and the dtype. It must not add
      unused rows, which may be NaN. None differentiates `dot` in matrices of
      the dtype of the rows, and converts the gradient.
  """

  dot: Callable[[Array, Array, Array], Array]
  dot_transposed: Callable[[Array, Array, Array], Array] | None = None
  gradient: Callable[[Array, Array, Array, jnp.dtype], Array] | None = None

  def expand(
    self, sizes: Array, rows: Array, matrices: _Arrays, tail: str
  ) -> list[Array]:
    outs = (self._product(self.dot, rows, w, sizes, 2) for w in matrices)
    used = sizes.sum(dtype=jnp.int32)
    return [cut(out.astype(rows.dtype), used, tail) for out in outs]

  def contract(
    self, sizes: Array, outs: _Arrays, matrices: _Arrays, tail: str
  ) -> Array:
    dot = self.dot_transposed or (
      lambda x, w, sizes: self.dot(x, w.swapaxes(1, 2), sizes)
    )
    terms = [
      self._product(dot, y, w, sizes, 1).astype(jnp.float32)
      for y, w in zip(outs, matrices, strict=True)
    ]
    rows = functools.reduce(jnp.add, terms).astype(outs[0].dtype)
    return cut(rows, sizes.sum(dtype=jnp.int32), tail)

  def outer(
    self, sizes: Array, rows: Array, outs: _Arrays, dtype: jnp.dtype
  ) -> list[Array]:
    gradient = self.gradient or self._gradient
    return [gradient(rows, y, sizes, dtype) for y in outs]

  def _product(
    self,
    dot: Callable[[Array, Array, Array], Array],
    rows: Array,
    matrices: Array,
    sizes: Array,
    axis: int,
  ) -> Array:
    out = dot(rows, matrices.astype(rows.dtype), sizes)
    expected = rows.shape[0], matrices.shape[axis]
    given = getattr(out, "shape", type(out).__name__)
    arguments.check(
      given == expected,
      "grouped_matmul",
      f"implementation returned {given}, but an array {[*expected]} is"
      " expected.",
    )
    return out

  def _gradient(
    self, rows: Array, outs: Array, sizes: Array, dtype: jnp.dtype
  ) -> Array:
    # The product is linear, so its gradient is the same for all matrices.
    used = sizes.sum(dtype=jnp.int32)
    rows, outs = cut(rows, used), cut(outs, used)
    shape = *sizes.shape, rows.shape[1], outs.shape[1]
    product, pull_back = jax.vjp(
      lambda matrices: self.dot(rows, matrices, sizes),
      jnp.zeros(shape, rows.dtype),
    )
    (gradient,) = pull_back(outs.astype(product.dtype))
    converted: Array = gradient.astype(dtype)
    return converted


def _ragged_dot(rows: Array, matrices: Array, sizes: Array) -> Array:
  return lax.ragged_dot(
    rows, matrices, sizes, preferred_element_type=jnp.float32
  )


def _ragged_gradient(
  rows: Array, outs: Array, sizes: Array, dtype: jnp.dtype
) -> Array:
  used = sizes.sum(dtype=jnp.int32)
  rows, outs = cut(rows, used), cut(outs, used)
  return lax.ragged_dot_general(
    rows, outs, sizes, _OVER_ROWS, preferred_element_type=jnp.float32
  ).astype(dtype)


RAGGED_DOT = ByFunction(_ragged_dot, gradient=_ragged_gradient)
