# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls on TPUs: megablox, Pallas kernels in JAX's wheel.

The functions are the same as in tiles.py. The kernels visit only tiles with
used rows, and need row counts that their tile divides: other arrays are padded.

TPUs round float32 operands to bfloat16, unless `jax.default_matmul_precision`
says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import functools
import logging
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from ep._src.base.arrays import cut

_logger = logging.getLogger("ep")
_Arrays = Sequence[Array]

_DTYPES = (jnp.bfloat16, jnp.float32)
# The rows of a tile. A kernel multiplies whole tiles, and every expert segment
# can add one, so low tiles waste less.
_HEIGHT = 128
# The most bytes for two buffers of each tile, and float32 sums. TPU v5e has the
# least VMEM of all TPUs, 16 MiB.
_VMEM = 14 << 20
# The columns of a tile of the result.
_WIDTHS = (2048, 1024, 512, 256)


def takes(rows: Any, matrices: tuple[int, int, int]) -> bool:
  """Returns whether the kernels take the arguments; logs the choice.

  Args:
    rows: the shape and dtype of rows, or of their results.
    matrices: the shape of the matrices, [L, F, G].
  """
  taken = rows.dtype in _DTYPES and 0 not in (*rows.shape, *matrices)
  _log(
    f"grouped_matmul of {rows.shape[0]} rows of {rows.dtype} and matrices"
    f" {matrices} runs "
    + (
      "megablox"
      if taken
      else "lax.ragged_dot, because megablox takes bfloat16 and float32, and no"
      " empty arrays"
    )
  )
  return taken


def expand(
  sizes: Array, rows: Array, matrices: _Arrays, tail: str
) -> list[Array]:
  outs = [_product(sizes, rows, w, transposed=False) for w in matrices]
  return [cut(out, sizes.sum(dtype=jnp.int32), tail) for out in outs]


def contract(
  sizes: Array, outs: _Arrays, matrices: _Arrays, tail: str
) -> Array:
  # Float32 products would round only their sum, but take twice the memory.
  terms = [
    _product(sizes, y, w, transposed=True).astype(jnp.float32)
    for y, w in zip(outs, matrices, strict=True)
  ]
  rows = functools.reduce(jnp.add, terms).astype(outs[0].dtype)
  return cut(rows, sizes.sum(dtype=jnp.int32), tail)


def outer(
  sizes: Array, rows: Array, outs: _Arrays, dtype: jnp.dtype
) -> list[Array]:
  # Imported late, because it imports Pallas.
  from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

  with _modes(rows):
    return [
      tgmm(
        _padded(rows, _HEIGHT).T,
        _padded(y, _HEIGHT),
        sizes,
        dtype,
        (_HEIGHT, min(1024, rows.shape[1]), min(1024, y.shape[1])),
      )
      for y in outs
    ]


def _product(
  sizes: Array, rows: Array, matrices: Array, *, transposed: bool
) -> Array:
  from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

  columns = matrices.shape[1 if transposed else 2]
  tile = _tile(rows.shape[1], columns, rows.dtype)
  with _modes(rows):
    out: Array = gmm(
      _padded(rows, tile[0]),
      matrices.astype(rows.dtype),
      sizes,
      rows.dtype,
      tile,
      transpose_rhs=transposed,
    )
  return out[: rows.shape[0]]


def _tile(k: int, n: int, dtype: jnp.dtype) -> tuple[int, int, int]:
  """Returns a tile's rows, columns of the left operand, and of the result.

  If a tile has all rows of a matrix, the kernel reads it once for all tiles of
  a segment. Otherwise it reads it again for each tile, so tiles are higher.
  """

  def fits(width: int) -> bool:
    blocks = _HEIGHT * k + k * width + _HEIGHT * width
    return 2 * dtype.itemsize * blocks + 4 * _HEIGHT * width <= _VMEM

  for width in _WIDTHS:
    if fits(min(width, n)):
      return _HEIGHT, k, min(width, n)
  return 2 * _HEIGHT, 4096 // dtype.itemsize, min(1024, n)


def _padded(rows: Array, height: int) -> Array:
  return jnp.pad(rows, ((0, -rows.shape[0] % height), (0, 0)))


@contextlib.contextmanager
def _modes(rows: Array) -> Iterator[None]:
  """Sets JAX's modes in which megablox works.

  Pallas refuses a default precision for bfloat16, whose products are exact in
  any case. The kernels rely on the promotion of dtypes.
  """
  precision: contextlib.AbstractContextManager[None]
  precision = jax.default_matmul_precision("default")
  if rows.dtype == jnp.float32:
    precision = contextlib.nullcontext()
  with jax.numpy_dtype_promotion("standard"), precision:
    yield


_log = functools.cache(_logger.info)  # once for each message
