# SPDX-License-Identifier: Apache-2.0
"""Chooses an op's implementation on NVIDIA GPUs, during its lowering.

A grouped matmul runs

* the kernels of by_mosaic.py on Hopper and Blackwell, for bfloat16 and float16
of shapes that fit, if this JAX compiles them;
* else `lax.ragged_dot` for few matrices, which XLA computes as a product of
all rows with each matrix, but not for float32, which would become TF32;
* else the loop of by_static_tiles.py.

A function of rows runs in the kernel of mosaic_row_map.py, under the same
conditions, or else over all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
import logging
import types
from typing import Any

import jax
import jax.numpy as jnp

from ep._src.base import contexts
from ep._src.matmul import by_ragged_dot, by_static_tiles

_logger = logging.getLogger("ep")

_FEW = 2  # With more matrices, a loop costs less than products with all rows.
_SHORT = (jnp.bfloat16, jnp.float16)

# For each compute capability: how mosaic_sums.py adds products there,
# and the least number of rows and of columns of the kernels.
_SUMS = {
  "9.0": ("in_registers", 64),
  "10.0": ("in_tensor_memory", 128),
  "10.3": ("in_tensor_memory", 128),
}


def choose(device: Any, rows: Any, matrices: tuple[int, int, int]) -> Any:
  """Returns a namespace with expand, contract and outer; logs the choice.

  Args:
    device: a device that will run the program; None if unknown.
    rows: the shape and dtype of rows, or of their results.
    matrices: the shape of the matrices, [L, F, G].
  """
  is_short = rows.dtype in _SHORT
  obstacle = _misfit(device, rows, matrices[1:]) or _failure(device)
  if obstacle is None:
    chosen, name = _kernels(device), "kernels of Pallas Mosaic GPU"
  elif rows.shape[0] == 0 or (is_short and matrices[0] <= _FEW):
    chosen, name = by_ragged_dot, f"lax.ragged_dot, because {obstacle}"
  else:
    chosen, name = by_static_tiles, f"a loop over tiles, because {obstacle}"
  shape = f"{rows.shape[0]} rows of {rows.dtype} and matrices {matrices}"
  _log(f"grouped_matmul of {shape} runs {name}")
  return chosen


def row_map(
  device: Any,
  fn: Callable[..., Any],
  arrays: Sequence[Any],
  outs: Sequence[Any],
) -> Callable[..., Sequence[jax.Array]] | None:
  """Returns `map_rows` of mosaic_row_map.py, or None; logs the choice.

  Args:
    device: as in `choose`.
    fn: the function of rows.
    arrays: the shapes and dtypes of its arguments.
    outs: the shapes and dtypes of its results.
  """
  obstacle = _obstacle_of_map(device, fn, arrays, outs)
  shapes = ", ".join(f"{x.dtype}{[*x.shape]}" for x in arrays)
  if obstacle is None:
    _log(f"a function of rows {shapes} runs a kernel of Pallas Mosaic GPU")
    return _row_kernel(device)
  _log(f"a function of rows {shapes} runs over all rows, because {obstacle}")
  return None


def _obstacle_of_map(
  device: Any,
  fn: Callable[..., Any],
  arrays: Sequence[Any],
  outs: Sequence[Any],
) -> str | None:
  """Returns why the kernel of mosaic_row_map.py cannot be used, or None."""
  types = *arrays, *outs
  wide = [x for x in types if len(x.shape) != 1]
  inputs = {x.shape for x in arrays if len(x.shape) == 2}
  if len(inputs) != 1 or any(x.shape not in inputs for x in wide):
    return "the kernel takes arrays [C, F], all of one F, and [C]"
  for x in wide:
    if obstacle := _misfit(device, x, x.shape[1:], fewest=64):
      return obstacle
  if any(len(x.shape) == 1 and x.dtype.itemsize != 4 for x in types):
    return "the kernel takes one value for each row only of 32 bits"
  few = tuple(((64, *x.shape[1:]), x.dtype) for x in arrays)
  return _failure_of_map(device, fn, few)


def _misfit(
  device: Any, rows: Any, widths: Sequence[int], fewest: int | None = None
) -> str | None:
  """Returns why device, dtype or shape rules out Mosaic kernels, or None."""
  if device is None:
    return "it is exported for any GPU, or XLA divides it among devices"
  if device.compute_capability not in _SUMS:
    return (
      f"the kernels are for GPUs of compute capability {', '.join(_SUMS)},"
      f" and this one has {device.compute_capability}"
    )
  if rows.dtype not in _SHORT:
    return f"the kernels take bfloat16 and float16, not {rows.dtype}"
  fewest = fewest or _SUMS[device.compute_capability][1]
  sizes = rows.shape[0], *widths
  if rows.shape[0] % 8 or min(sizes) < fewest or any(n % 64 for n in widths):
    return (
      f"the kernels need at least {fewest} rows, a multiple of 8, and widths"
      f" of at least {fewest} that are multiples of 64"
    )
  return None


@functools.cache
def _failure(device: Any) -> str | None:
  """Compiles small grouped matmuls; returns why this fails, or None."""

  def run(sizes: jax.Array, rows: Any, matrices: jax.Array) -> Any:
    ops = _kernels(device)
    (outs,) = ops.expand(sizes, rows, [matrices], "zero")
    back = ops.contract(sizes, [outs], [matrices], "zero")
    return ops.outer(sizes, back, [outs], jnp.float32)

  n = _SUMS[device.compute_capability][1]
  shapes = ((n, n), jnp.bfloat16), ((1, n, n), jnp.bfloat16)
  return _why_not(device, run, ((1,), jnp.int32), *shapes)


@functools.lru_cache
def _failure_of_map(
  device: Any, fn: Callable[..., Any], arrays: Sequence[Any]
) -> str | None:
  """Compiles the row map for few rows; returns why this fails, or None."""

  def run(num_used: jax.Array, *arrays: jax.Array) -> Any:
    return _row_kernel(device)(fn, num_used, arrays)

  return _why_not(device, run, ((), jnp.int32), *arrays)


def _why_not(device: Any, run: Callable[..., Any], *types: Any) -> str | None:
  """Compiles `run` for a device; returns why this fails, or None."""
  sharding = jax.sharding.SingleDeviceSharding(device)
  operands = [jax.ShapeDtypeStruct(*t, sharding=sharding) for t in types]
  reason = contexts.failure_outside(
    lambda: jax.jit(run).lower(*operands).compile()
  )
  if reason is None:
    return None
  return f"JAX {jax.__version__} does not compile the kernels: {reason}"


def _kernels(device: Any) -> Any:
  """Returns the functions of by_mosaic.py for `device`, as a namespace."""
  # Imported late, because not every JAX has Pallas Mosaic GPU.
  from ep._src.matmul import by_mosaic, mosaic_sums

  name, _ = _SUMS[device.compute_capability]
  accumulate = getattr(mosaic_sums, name)
  options = dict(num_cores=device.core_count, accumulate=accumulate)
  return types.SimpleNamespace(
    **{
      name: functools.partial(getattr(by_mosaic, name), **options)
      for name in ("expand", "contract", "outer")
    }
  )


def _row_kernel(device: Any) -> Callable[..., list[jax.Array]]:
  from ep._src.matmul import mosaic_row_map

  return functools.partial(mosaic_row_map.map_rows, num_cores=device.core_count)


_log = functools.cache(_logger.info)  # logs each message once
