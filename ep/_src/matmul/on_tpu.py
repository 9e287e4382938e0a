# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls on TPUs: megablox, Pallas kernels in JAX's wheel.

The kernels visit only tiles with used rows, and need row counts that their tile
divides: other arrays are padded.

TPUs round float32 operands to bfloat16, unless `jax.default_matmul_precision`
says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import functools
import logging
from typing import Any

import jax
from jax import Array
import jax.numpy as jnp

from ep._src.matmul.by_function import ByFunction, RAGGED_DOT

_logger = logging.getLogger("ep")

_DTYPES = (jnp.bfloat16, jnp.float32)
# The rows of a tile. A kernel multiplies whole tiles, and every expert segment
# can add one, so low tiles waste less.
_HEIGHT = 128
# The most bytes for two buffers of each tile, and float32 sums. TPU v5e has the
# least VMEM of all TPUs, 16 MiB.
_VMEM = 14 << 20
# The columns of a tile of the result.
_WIDTHS = (2048, 1024, 512, 256)


def choose(rows: Any, matrices: Any) -> ByFunction:
  """Returns a namespace with expand, contract and outer; logs the choice.

  Args:
    rows: the shape and dtype of rows, or of their results.
    matrices: the shape and dtype of the matrices, or of their gradients.
  """
  what = f"{rows.shape[0]} rows of {rows.dtype} and matrices {matrices.shape}"
  if rows.dtype in _DTYPES:
    _log(f"grouped_matmul of {what} runs megablox")
    return MEGABLOX
  _log(
    f"grouped_matmul of {what} runs lax.ragged_dot, because megablox takes"
    " bfloat16 and float32"
  )
  return RAGGED_DOT


# The kernels' modules are imported late, because they import Pallas.


def _dot(
  rows: Array, matrices: Array, sizes: Array, *, transposed: bool = False
) -> Array:
  from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

  columns = matrices.shape[1 if transposed else 2]
  tile = _tile(rows.shape[1], columns, rows.dtype)
  with _modes(rows):
    out: Array = gmm(
      _padded(rows, tile[0]),
      matrices,
      sizes,
      rows.dtype,
      tile,
      transpose_rhs=transposed,
    )
  return out[: rows.shape[0]]


def _gradient(
  rows: Array, outs: Array, sizes: Array, dtype: jnp.dtype
) -> Array:
  from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

  with _modes(rows):
    out: Array = tgmm(
      _padded(rows, _HEIGHT).T,
      _padded(outs, _HEIGHT),
      sizes,
      dtype,
      (_HEIGHT, min(1024, rows.shape[1]), min(1024, outs.shape[1])),
    )
  return out


# A product is rounded to the dtype of the rows: float32 products would round
# only the sum of several, but take twice the memory.
MEGABLOX = ByFunction(_dot, functools.partial(_dot, transposed=True), _gradient)


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
