# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls on TPUs: megablox, JAX's kernels of Pallas.

The functions are the same as in by_tiles.py. The kernels visit only the tiles
of used rows. `lax.ragged_dot` visits all rows, and libtpu 0.0.42 computes the
gradient of the matrices as a masked product of all rows for each matrix.

TPUs round float32 operands to bfloat16, unless `jax.default_matmul_precision`
says otherwise. Segments have no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools
import importlib
import math
from typing import Any

from jax import Array
import jax.numpy as jnp

from ep._src.matmul.unwritten_rows import cut

_Arrays = Sequence[Array]

ROWS = 128  # Tiles have at least so many rows, and divide C.

# Tiles of the most rows, bytes of the summed axis, and columns with which the
# kernels compile for v5e, which has the least VMEM: 16 MiB for two buffers of
# each operand and of the result, and a sum in float32. Smaller tiles read
# operands more often.
_TILES = 512, 2048, 1024
_OUTER_TILES = 256, 2048, 1024


def expand(
  sizes: Array, segments: Array, rows: Array, matrices: _Arrays, tail: str
) -> list[Array]:
  """Returns rows [C, F] times each of `matrices` [L, F, G]: list of [C, G]."""
  del segments
  outs = [_gmm(rows, w, sizes, rows.dtype) for w in matrices]
  return [cut(out, sizes.sum(dtype=jnp.int32), tail) for out in outs]


def contract(
  sizes: Array, segments: Array, outs: _Arrays, matrices: _Arrays, tail: str
) -> Array:
  """Returns [C, F]: the sum of outs [C, G] times matrices^T [L, G, F]."""
  del segments
  dtype = outs[0].dtype
  sum_dtype = dtype if len(outs) == 1 else jnp.float32
  terms = [
    _gmm(y, w, sizes, sum_dtype, transpose_rhs=True)
    for y, w in zip(outs, matrices, strict=True)
  ]
  rows = functools.reduce(jnp.add, terms).astype(dtype)
  return cut(rows, sizes.sum(dtype=jnp.int32), tail)


def outer(
  sizes: Array, segments: Array, rows: Array, outs: _Arrays, dtype: jnp.dtype
) -> list[Array]:
  """Returns each slab's rows^T times each of `outs`: a list of [L, F, G]."""
  del segments
  num, width = rows.shape
  return [
    _kernels().tgmm(
      rows.swapaxes(0, 1),
      y,
      sizes,
      preferred_element_type=dtype,
      tiling=_tiling(_OUTER_TILES, num, width, y.shape[1], rows.dtype),
    )
    for y in outs
  ]


def _gmm(
  rows: Array, matrices: Array, sizes: Array, dtype: Any, **options: bool
) -> Array:
  num, width = len(rows), matrices.shape[1 if options else 2]
  out: Array = _kernels().gmm(
    rows,
    matrices.astype(rows.dtype),
    sizes,
    preferred_element_type=dtype,
    tiling=_tiling(_TILES, num, rows.shape[1], width, rows.dtype),
    **options,
  )
  return out


def _tiling(
  largest: tuple[int, int, int], m: int, k: int, n: int, dtype: jnp.dtype
) -> tuple[int, int, int]:
  rows, num_bytes, columns = largest
  return math.gcd(m, rows), min(k, num_bytes // dtype.itemsize), min(n, columns)


def _kernels() -> Any:
  # Imported when an op is lowered for TPUs, because it imports Pallas. The
  # package has a function of the module's name.
  return importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
