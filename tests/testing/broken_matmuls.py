# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls with one fault each, for broken_subjects_test.

Most faults are those of released kernels, which the docstrings cite.
"""

import jax
import jax.numpy as jnp
import numpy as np

import ep
from ep.testing import GroupedMatmul

# (rule, broken grouped matmul, pattern of each failure)
BROKEN = []

PRODUCT = r"^the product: row \d+ \(of group \d+\), column \d+ is \S+, but"
OF_ROWS = r"^the gradient of rows: row \d+ \(of group \d+\), column \d+ is"
OF_MATRICES = r"^the gradient of matrices: group \d+ of \d+ rows, row \d+"
BFLOAT16 = dict(dtypes=("bfloat16",))


def _breaks(rule, says, **declared):
  """Adds a function `matmul(rows, matrices, sizes)`."""

  def add(matmul):
    properties = dict(gradients=True, tail="zero") | declared
    subject = GroupedMatmul(name=matmul.__name__, matmul=matmul, **properties)
    BROKEN.append((rule, subject, says))
    return matmul

  return add


def _breaks_gradients(rule, says, **declared):
  """Adds grouped_matmul with gradients `alter(gradients, residuals, g)`."""

  def add(alter):
    @jax.custom_vjp
    def matmul(*args):
      return ep.grouped_matmul(*args)

    def backward(residuals, g):
      *operands, sizes = residuals
      _, vjp = jax.vjp(lambda *x: ep.grouped_matmul(*x, sizes), *operands)
      return *alter(vjp(g), residuals, g), None

    matmul.defvjp(lambda *args: (matmul(*args), args), backward)
    matmul.__name__ = alter.__name__
    _breaks(rule, says, **declared)(matmul)
    return alter

  return add


def _outer(starts, sizes, rows, g):
  """Returns the gradients of matrices; the sums include zeros times NaNs."""
  row = jnp.arange(len(rows))
  is_in = (starts[:, None] <= row) & (row < (starts + sizes)[:, None])
  return ((is_in[:, None] * rows.T) @ g).astype(rows.dtype)


@_breaks_gradients("gradients", OF_MATRICES)
def starts_groups_at_multiples_of_64(grads, residuals, g):
  """marin #8339: cuDNN's kernel, without the alignment that it needs."""
  rows, _, sizes = residuals
  starts = (jnp.cumsum(sizes) - sizes) // 64 * 64
  return grads[0], _outer(starts, sizes, rows, g)


@_breaks_gradients("gradients", OF_ROWS)
def drops_half_of_the_summed_columns(grads, residuals, g):
  """Liger #1413: loses one of two products that share an accumulator."""
  _, matrices, sizes = residuals
  g = jnp.where(jnp.arange(g.shape[1]) < g.shape[1] // 2, g, 0)
  return ep.grouped_matmul(g, matrices.swapaxes(1, 2), sizes), grads[1]


@_breaks_gradients("gradients", "^the gradient of matrices: group . of 0 rows")
def does_not_write_gradients_of_empty_groups(grads, residuals, g):
  """tokamax #1016: the kernel on Triton, in version 0.0.12."""
  is_empty = (residuals[2] == 0)[:, None, None]
  return grads[0], jnp.where(is_empty, jnp.nan, grads[1])


@_breaks_gradients("unread", OF_MATRICES)
@_breaks_gradients("neighbours", OF_MATRICES)
def multiplies_other_rows_by_zero(grads, residuals, g):
  rows, _, sizes = residuals
  return grads[0], _outer(jnp.cumsum(sizes) - sizes, sizes, rows, g)


def _added_in_bfloat16(function, rows):
  """Returns the sum of `function` of the even and of the odd rows."""
  is_odd = jnp.arange(len(rows))[:, None] % 2 == 1
  return function(jnp.where(is_odd, rows, 0)) + function(
    jnp.where(is_odd, 0, rows)
  )


@_breaks("output", PRODUCT, **BFLOAT16)
def sums_in_bfloat16(rows, matrices, sizes):
  return _added_in_bfloat16(
    lambda x: ep.grouped_matmul(x.T, matrices, sizes), rows.T
  )


@_breaks_gradients("gradients", OF_MATRICES, **BFLOAT16)
def sums_gradients_in_bfloat16(grads, residuals, g):
  rows, matrices, sizes = residuals
  _, vjp = jax.vjp(lambda w: ep.grouped_matmul(rows, w, sizes), matrices)
  return grads[0], _added_in_bfloat16(lambda g: vjp(g)[0], g)


@_breaks("output", r"row \d+ \(after the last group\), column 0 is 7.0, but")
def does_not_write_the_tail(rows, matrices, sizes):
  """transformers #48205: torch._grouped_mm, where callers expect zeros."""
  out = ep.grouped_matmul(rows, matrices, sizes)
  is_used = (jnp.arange(len(out)) < sizes.sum())[:, None]
  return jnp.where(is_used, out, 7)


_calls = []


def _is_third_call(_):
  _calls.append(None)
  return np.bool_(len(_calls) % 3 == 0)


@_breaks("repeatable", r"\(0, 0\) is \S+, but the first call", gradients=False)
@_breaks("soak", r"^the product of step \d+: row 0 .* is 7.0", gradients=False)
def leaves_a_tile_unwritten(rows, matrices, sizes):
  """marin #8959: QuACK's scheduler skips tiles while others use the GPU."""
  out = ep.grouped_matmul(rows, matrices, sizes)
  is_skipped = jax.pure_callback(
    _is_third_call, jax.ShapeDtypeStruct((), bool), sizes
  )
  in_tile = (jnp.arange(len(out)) < 64)[:, None]
  return jnp.where(in_tile & is_skipped, 7, out)


@_breaks("output", r"matmul returned float32\[.* has to return b", **BFLOAT16)
def returns_float32(rows, matrices, sizes):
  return ep.grouped_matmul(rows, matrices, sizes).astype(jnp.float32)
