# SPDX-License-Identifier: Apache-2.0
"""Chooses the implementation on TPUs, when an op is lowered.

A grouped matmul of bfloat16 or float32 runs the kernels of by_tpu_kernels.py,
and otherwise `lax.ragged_dot`. A function of rows runs in the kernel of
tpu_row_map.py, if this JAX lowers it, or else over all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp

from ep._src.base import contexts
from ep._src.matmul.by_function import RAGGED_DOT

_logger = logging.getLogger("ep")
_DTYPES = (jnp.bfloat16, jnp.float32)


def choose(rows: Any, matrices: tuple[int, int, int]) -> Any:
  """Returns a namespace with expand, contract and outer; logs the choice.

  Args:
    rows: the shape and dtype of rows, or of their results.
    matrices: the shape of the matrices, [L, F, G].
  """
  shape = f"{rows.shape[0]} rows of {rows.dtype} and matrices {matrices}"
  if rows.dtype not in _DTYPES or 0 in (*rows.shape, *matrices):
    _log(
      f"grouped_matmul of {shape} runs lax.ragged_dot, because the kernels take"
      " bfloat16 and float32, and no empty arrays"
    )
    return RAGGED_DOT
  _log(f"grouped_matmul of {shape} runs kernels of Pallas")
  from ep._src.matmul import by_tpu_kernels  # it imports Pallas

  return by_tpu_kernels


def row_map(
  fn: Callable[..., Any], arrays: Sequence[Any], in_place: bool
) -> Callable[..., Sequence[jax.Array]] | None:
  """Returns `map_rows` of tpu_row_map.py, or None; logs the choice.

  Args:
    fn: the function of rows.
    arrays: the shapes and dtypes of its arguments.
    in_place: see `tpu_row_map.map_rows`.
  """
  obstacle = _obstacle(fn, tuple((x.shape, x.dtype) for x in arrays))
  shapes = ", ".join(f"{x.dtype}{[*x.shape]}" for x in arrays)
  if obstacle is None:
    _log(f"a function of rows {shapes} runs a kernel of Pallas")
    return functools.partial(_kernel(), in_place=in_place)
  _log(f"a function of rows {shapes} runs over all rows, because {obstacle}")
  return None


def _kernel() -> Callable[..., Any]:
  # Imported late, because tpu_row_map.py imports Pallas.
  from ep._src.matmul import tpu_row_map

  return tpu_row_map.map_rows


@functools.lru_cache
def _obstacle(fn: Callable[..., Any], types: Sequence[Any]) -> str | None:
  """Lowers the kernel; returns why it fails, or None."""
  if any(len(shape) > 2 or 0 in shape for shape, _ in types):
    return "the kernel takes arrays [C, F] and [C] with rows"
  if any(dtype.itemsize != 4 and dtype not in _DTYPES for _, dtype in types):
    return "the kernel takes bfloat16 and types of 32 bits"
  arrays = [jax.ShapeDtypeStruct(*t) for t in types]
  num_used = jax.ShapeDtypeStruct((), jnp.int32)
  run = jax.jit(lambda num_used, *arrays: _kernel()(fn, num_used, arrays))
  reason = contexts.failure_outside(
    lambda: run.trace(num_used, *arrays).lower(lowering_platforms=("tpu",))
  )
  if reason is None:
    return None
  return f"JAX {jax.__version__} does not lower the kernel: {reason}"


_log = functools.cache(_logger.info)  # once for each message
