# SPDX-License-Identifier: Apache-2.0
"""Chooses how NVIDIA GPUs compute grouped matmuls, when they are lowered.

* the kernels of by_mosaic.py on Hopper, for bfloat16 and float16 of shapes
that fit, if this JAX compiles them;
* else `lax.ragged_dot` for few matrices, which XLA computes as a product of
all rows with each matrix, but not for float32, which would become TF32;
* else the loop of by_static_tiles.py.
"""

from __future__ import annotations

from concurrent import futures
import functools
import logging
import types
from typing import Any

import jax
import jax.numpy as jnp

from ep._src.matmul import by_ragged_dot, by_static_tiles

_logger = logging.getLogger("ep")

_FEW = 2  # matrices for which products with all rows cost less than a loop
_SHORT = (jnp.bfloat16, jnp.float16)


def choose(device: Any, rows: Any, matrices: tuple[int, int, int]) -> Any:
  """Returns what has the functions expand, contract and outer; logs the choice.

  Args:
    device: one that the program will run on, or None if it is not known.
    rows: the shape and dtype of rows, or of their results.
    matrices: the shape of the matrices, [L, F, G].
  """
  is_short = rows.dtype in _SHORT
  obstacle = _obstacle(device, rows, matrices[1:])
  if obstacle is None:
    chosen, name = _kernels(device.core_count), "kernels of Pallas Mosaic GPU"
  elif rows.shape[0] == 0 or (is_short and matrices[0] <= _FEW):
    chosen, name = by_ragged_dot, f"lax.ragged_dot, because {obstacle}"
  else:
    chosen, name = by_static_tiles, f"a loop over tiles, because {obstacle}"
  shape = f"{rows.shape[0]} rows of {rows.dtype} and matrices {matrices}"
  _log(f"grouped_matmul of {shape} runs {name}")
  return chosen


def _obstacle(device, rows, widths):
  """Returns why the kernels cannot be used, or None."""
  if device is None:
    return "it is exported for any GPU, or XLA divides it among devices"
  if device.compute_capability != "9.0":
    return (
      "the kernels are for GPUs of compute capability 9.0, and this one has "
      f"{device.compute_capability}"
    )
  if rows.dtype not in _SHORT:
    return f"the kernels multiply bfloat16 and float16, not {rows.dtype}"
  sizes = rows.shape[0], *widths
  if rows.shape[0] % 8 or min(sizes) < 64 or any(n % 64 for n in widths):
    return (
      "the kernels need at least 64 rows, a multiple of 8, and widths that are "
      "multiples of 64"
    )
  return _failure(device)


@functools.cache
def _failure(device):
  """Compiles small kernels for a device; returns why it fails, or None."""
  sharding = jax.sharding.SingleDeviceSharding(device)
  operands = [
    jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    for shape, dtype in [
      ((1,), jnp.int32),
      ((64, 64), jnp.bfloat16),
      ((1, 64, 64), jnp.bfloat16),
    ]
  ]

  def compile_all():
    kernels = _kernels(device.core_count)

    def run(sizes, rows, matrices):
      (outs,) = kernels.expand(sizes, None, rows, [matrices], "zero")
      back = kernels.contract(sizes, None, [outs], [matrices], "zero")
      return kernels.outer(sizes, None, back, [outs], jnp.float32)

    jax.jit(run).lower(*operands).compile()

  # Another thread is in none of the contexts of the program being lowered.
  with futures.ThreadPoolExecutor(1) as pool:
    error = pool.submit(compile_all).exception()
  if error is None:
    return None
  reason = f"{type(error).__name__}: {error}".partition("\n")[0]
  return f"JAX {jax.__version__} does not compile the kernels: {reason}"


def _kernels(num_cores):
  # This imports names that not every JAX has.
  from ep._src.matmul import by_mosaic

  names = "expand", "contract", "outer"
  return types.SimpleNamespace(
    **{
      name: functools.partial(getattr(by_mosaic, name), num_cores=num_cores)
      for name in names
    }
  )


_log = functools.cache(_logger.info)  # once for each message
