# SPDX-License-Identifier: Apache-2.0
"""The JAX primitive that multiplies each slab of rows by the slab's matrix.

CPUs run the native library (ep_ffi/matmul/) by default, or tiles.py in
programs that cannot call the library. implementations.py has the defaults of
other platforms, and the implementations that a caller may choose.

The derivatives come from one form, which is linear in each of three arguments:
rows X [C, F], matrices W [L, F, G] and outputs Y [C, G],

    T(X, W, Y) = sum over slabs j of <X_j W_j, Y_j>

The gradient of T in one of them is a function of the other two:

    Y: expand(X, W) = X W      X: contract(Y, W) = Y W^T
    W: outer(X, Y) = X^T Y     (slab by slab)

The primitive is the gradient in the argument `missing`, and is bilinear. The
tangent is a sum: for each argument, the primitive of that argument's tangent
and the other argument. The transpose in one argument is the gradient of T in
that argument, with the cotangent as the missing argument. So derivatives of all
orders, in both modes, need only this primitive.

Several matrices, such as w_gate and w_up, may share the rows. Then W and Y are
lists, and T is the sum over them: the gradient of the rows is rounded once, but
on TPUs also for each matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ep._src.base import arguments, arrays, compat, contexts
from ep._src.base.compat import ad
from ep._src.lax import primitive
from ep._src.matmul import implementations
from ep._src.matmul.implementations import Implementation
from ep._src.native import ffi

# Positions of rows X, matrices W and outputs Y in the triple [X], Ws, Ys.
_ROWS, _MATRICES, _OUTS = range(3)
_Triple = list[list[Any]]


def grouped_matmul(
  rows: jax.Array,
  matrices: jax.Array,
  group_sizes: jax.Array,
  *,
  implementation: Implementation = None,
) -> jax.Array:
  """Returns `rows[r] @ matrices[j]` for every row r of slab j.

  Slab j is the `group_sizes[j]` rows after slabs 0 to j - 1. Rows after the
  last slab, even NaNs, are never read; their results and gradients are zero.

  Products are summed in float32 and rounded once to the dtype of `rows`.
  Differentiable in `rows` and `matrices`, in both modes, to any order.

  Args:
    rows: `[C, F]`, of a float dtype.
    matrices: `[L, F, G]`, of the dtype of `rows`.
    group_sizes: int32 `[L]`, not negative, of a sum up to C.
    implementation: None, the default of the platform; a name, "tiles",
      "ragged_dot" or "mgpu" (NVIDIA GPUs); or a function with the arguments
      lhs, rhs and group_sizes of `jax.lax.ragged_dot`, such as
      `tokamax.ragged_dot`. The function must be linear in the matrices, have
      reverse mode in them, and close over no traced value. It may leave rows
      after the last slab unwritten. Only a default keeps all that this
      docstring promises: a gradient of matrices is rounded to the dtype of the
      function's gradient, and NaNs may spread as in the function.

  Returns:
    `[C, G]`, of the dtype of `rows`.

  Raises:
    ValueError: if shapes or dtypes do not fit, a size of NumPy or Python does
      not fit into 32 bits, or the platform has no such implementation.
    TypeError: if `group_sizes` are no integers, or the rows no floats.
    JaxRuntimeError: on CPUs, when the program runs, if C > 0 and a size is
      negative or their sum is above C; but not in an exported program, which
      does not call the native library.
  """
  implementations.check("grouped_matmul", implementation)
  rows = arrays.array("grouped_matmul", "rows", rows)
  matrices = arrays.array("grouped_matmul", "matrices", matrices)
  group_sizes = arrays.integers("grouped_matmul", "group_sizes", group_sizes)
  arguments.check(
    (rows.ndim, matrices.ndim, group_sizes.ndim) == (2, 3, 1)
    and matrices.shape[:2] == (*group_sizes.shape, rows.shape[1]),
    "grouped_matmul",
    f"got rows {rows.shape}, matrices {matrices.shape}, group_sizes"
    f" {group_sizes.shape}; expected [C, F], [L, F, G] and [L].",
  )
  if rows.dtype != matrices.dtype:
    raise ValueError(
      f"grouped_matmul: rows are {rows.dtype} and matrices {matrices.dtype}; "
      "convert one with .astype, so that it is clear which precision is meant."
    )
  if not jnp.issubdtype(rows.dtype, jnp.floating):
    raise TypeError(
      f"grouped_matmul: rows are {rows.dtype}, but floats are expected, because"
      " products are summed in float32; convert rows and matrices."
    )
  (out,) = grouped_matmuls(
    rows,
    [matrices],
    group_sizes,
    tail="zero",
    implementation=implementation,
  )
  return out


def grouped_matmuls(
  rows: jax.Array,
  matrices: Sequence[jax.Array],
  group_sizes: jax.Array,
  *,
  segments: jax.Array | None = None,
  tail: str = "unspecified",
  implementation: Implementation = None,
) -> list[jax.Array]:
  """Returns `grouped_matmul(rows, m, group_sizes)` for each m of `matrices`.

  All matrices have one shape. The sum of the gradients of the rows is rounded
  once, but kernels and functions also round each term. With
  `tail="unspecified"` the rows after the last slab are not written, in results,
  gradients and tangents.

  The matrices may have another dtype than the rows. Products use the dtype of
  the rows, and gradients of matrices have the dtype of the matrices.

  With `segments`, int32 [L, S], slab j is S segments of `segments[j]` rows,
  then rows of zeros. Then, in the native library, the bits of a result row
  depend on that row and its matrix alone. The gradient of a matrix is the sum
  of the segments' gradients, added as a balanced binary tree, in order.
  """
  if segments is None:
    segments = group_sizes[:, None]
  operands = compat.vary_together(group_sizes, segments, rows, *matrices)
  with jax.numpy_dtype_promotion("standard"):
    matrix_dtype = jnp.result_type(*matrices)
  outs: list[jax.Array] = grouped_matmul_p.bind(
    *operands[:3],
    *(w.astype(matrix_dtype) for w in operands[3:]),
    missing=_OUTS,
    matrix_dtype=matrix_dtype,
    tail=contexts.tail(tail),
    implementation=implementation,
  )
  return outs


def _triple(operands: Sequence[Any], missing: int) -> _Triple:
  """Splits operands into the lists [X], Ws, Ys; the missing list is empty."""
  num_first = len(operands) // 2 if missing == _ROWS else 1
  triple = [list(operands[:num_first]), list(operands[num_first:])]
  triple.insert(missing, [])
  return triple


def _gradient(
  slabs: Sequence[Any],
  triple: Sequence[Sequence[Any]],
  missing: int,
  pairs: Sequence[int],
  **params: Any,
) -> Iterator[tuple[int, Any]]:
  """Binds the primitive to a triple, with only the given pairs of W and Y.

  Returns pairs (position in the list of the missing argument, result).
  """
  places = {_ROWS: [0], _MATRICES: pairs, _OUTS: pairs}
  operands = [
    triple[argument][place]
    for argument in places
    if argument != missing
    for place in places[argument]
  ]
  outs = grouped_matmul_p.bind(*slabs, *operands, missing=missing, **params)
  return zip(places[missing], outs, strict=True)


def _types(
  sizes: Any,
  segments: Any,
  *avals: Any,
  missing: int,
  matrix_dtype: jnp.dtype,
  **params: Any,
) -> list[Any]:
  del segments, params
  rows, matrices, outs = _triple(avals, missing)
  dtype = matrix_dtype if missing == _MATRICES else (rows + outs)[0].dtype
  if missing == _ROWS:
    shapes = [(outs[0].shape[0], matrices[0].shape[1])]
  elif missing == _MATRICES:
    slabs = *sizes.shape, rows[0].shape[1]
    shapes = [(*slabs, y.shape[1]) for y in outs]
  else:
    shapes = [(rows[0].shape[0], w.shape[2]) for w in matrices]
  return [compat.out_aval(s, dtype, avals[0]) for s in shapes]


def _present(values: Sequence[Any]) -> list[int]:
  """Returns the positions of values that are not symbolic zeros."""
  return [i for i, x in enumerate(values) if type(x) is not ad.Zero]


def _jvp(
  primals: Sequence[Any],
  tangents: Sequence[Any],
  *,
  missing: int,
  **params: Any,
) -> tuple[list[Any], list[Any]]:
  slabs, operands = primals[:2], primals[2:]
  outs = grouped_matmul_p.bind(*slabs, *operands, missing=missing, **params)
  out_tangents = [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in outs]
  triple = _triple(operands, missing)
  num_pairs = max(map(len, triple))
  for argument, ts in enumerate(_triple(tangents[2:], missing)):
    present = _present(ts)
    if not present:
      continue
    replaced = [ts if i == argument else x for i, x in enumerate(triple)]
    pairs = range(num_pairs) if argument == _ROWS else present
    # In forward mode this sum of terms includes unused rows. A sum of only the
    # used rows would add a loop to the transpose, which needs no sum.
    for place, term in _gradient(slabs, replaced, missing, pairs, **params):
      out_tangents[place] = ad.add_tangents(out_tangents[place], term)
  return outs, out_tangents


def _transpose(
  cts: Sequence[Any], *slabs_and_operands: Any, missing: int, **params: Any
) -> list[Any]:
  slabs, operands = slabs_and_operands[:2], slabs_and_operands[2:]
  triple = _triple(operands, missing)
  is_wanted = [list(map(ad.is_undefined_primal, xs)) for xs in triple]
  (argument,) = (i for i, wanted in enumerate(is_wanted) if any(wanted))
  pairs = _present(cts)
  if missing == _ROWS and pairs:
    pairs = [*range(max(map(len, triple)))]
  if argument != _ROWS:
    pairs = [i for i in pairs if is_wanted[argument][i]]
  grads = {}
  if pairs:
    filled = [cts if i == missing else xs for i, xs in enumerate(triple)]
    grads = dict(_gradient(slabs, filled, argument, pairs, **params))
  return [None, None] + [
    grads.get(place) if i == argument else None
    for i, xs in enumerate(triple)
    for place in range(len(xs))
  ]


_lower_to_native = jax.ffi.ffi_lowering("ep_grouped_matmul")


def _lower(
  platform: str,
  ctx: Any,
  *operands: Any,
  missing: int,
  matrix_dtype: jnp.dtype,
  tail: str,
  implementation: Implementation,
) -> Any:
  """Lowers to the default of a platform, or to the user's implementation."""
  dtypes = {a.dtype for a in (*ctx.avals_in[2:], *ctx.avals_out)}
  is_native = platform == "cpu" and implementation is None
  if is_native and ffi.is_native(ctx) and dtypes <= _NATIVE_DTYPES:
    return _lower_to_native(
      ctx, *operands, missing=np.int64(missing), tail=np.int64(ffi.TAILS[tail])
    )
  rows, matrices, outs = _triple(ctx.avals_in[2:], missing)
  chosen = implementations.choose(
    implementation,
    platform,
    compat.local_device(ctx),
    (rows + outs)[0],
    (matrices or ctx.avals_out)[0],
    missing == _MATRICES,
  )

  def apply(sizes: jax.Array, _: jax.Array, *operands: jax.Array) -> Any:
    # Only the native library sums segment by segment.
    rows, matrices, outs = _triple(operands, missing)
    if missing == _ROWS:
      return [chosen.contract(sizes, outs, matrices, tail)]
    if missing == _MATRICES:
      return chosen.outer(sizes, *rows, outs, matrix_dtype)
    return chosen.expand(sizes, *rows, matrices, tail)

  return compat.lower_local(apply)(ctx, *operands)


_NATIVE_DTYPES = set(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))


grouped_matmul_p = primitive.new(
  "ep_grouped_matmul",
  _types,
  functools.partial(_lower, "other"),
  cpu=functools.partial(_lower, "cpu"),
  cuda=functools.partial(_lower, "cuda"),
  tpu=functools.partial(_lower, "tpu"),
  static=["missing", "matrix_dtype", "tail", "implementation"],
)
ad.primitive_jvps[grouped_matmul_p] = _jvp
ad.primitive_transposes[grouped_matmul_p] = _transpose
