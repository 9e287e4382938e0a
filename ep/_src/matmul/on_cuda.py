# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls on NVIDIA GPUs: the Pallas Mosaic GPU kernels of JAX.

The kernels are for Hopper. They multiply bfloat16 and float16, and compute all
C rows: `ragged_dot_mgpu` computes products, and `transposed_ragged_dot_mgpu`
the gradients of matrices.

The loop of tiles.py computes what the kernels cannot, and what they would round
more often than ep promises: gradients of float32 matrices with 16-bit rows.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import importlib
import logging
from typing import Any

import jax
from jax import Array, lax
import jax.numpy as jnp

from ep._src.matmul import tiles
from ep._src.matmul.by_function import ByFunction

_logger = logging.getLogger("ep")

_SHORT = (jnp.bfloat16, jnp.float16)
_HOPPER = "9.0"
# Hopper GPUs run these kernels by default.
KERNELS = (
  "ragged_dot_mgpu of JAX; the loop over tiles for float32 rows, and gradients"
  " of float32 matrices"
)
# The kernels sum over steps of as many rows or columns.
_DEPTH = 64
_ROWS = 8  # the kernel of products takes multiples of 8 rows


def choose(
  device: Any, rows: Any, matrices: Any, is_gradient: bool, named: bool = False
) -> Any:
  """Returns a namespace with expand, contract and outer; logs the choice.

  Args:
    device: a device that will run the program; None if unknown.
    rows: the shape and dtype of rows, or of their results.
    matrices: the shape and dtype of the matrices, or of their gradients.
    is_gradient: whether the call computes gradients of matrices.
    named: whether the user chose the kernels by name.

  Raises:
    ValueError: the user chose the kernels, and they cannot run.
  """
  obstacle = _obstacle(device, rows, matrices.shape)
  if named and obstacle is not None:
    raise ValueError(
      f'grouped_matmul: implementation = "mgpu" cannot run: {obstacle}; pass'
      ' implementation=None or "tiles" to run a loop over tiles.'
    )
  would_round = is_gradient and matrices.dtype != rows.dtype
  if obstacle is None and would_round and not named:
    obstacle = (
      f"the kernel would round it to {rows.dtype}, which"
      ' implementation="mgpu" accepts'
    )
  what = "the gradient of the matrices of " if is_gradient else ""
  shape = f"{rows.shape[0]} rows of {rows.dtype} and matrices {matrices.shape}"
  start = f"{what}grouped_matmul of {shape} runs"
  if obstacle is None:
    log(logging.INFO, f"{start} kernels of Pallas Mosaic GPU")
    return _kernels()
  log(logging.INFO, f"{start} a loop over tiles, because {obstacle}")
  return tiles


def _obstacle(device: Any, rows: Any, shape: tuple[int, ...]) -> str | None:
  """Returns why the kernels cannot run, or None."""
  if device is None:
    return "it is exported for any GPU, or XLA divides it among devices"
  if reason := why_not(device):
    return reason
  if rows.dtype not in _SHORT:
    return f"the kernels take bfloat16 and float16, not {rows.dtype}"
  if any(width % _DEPTH for width in shape[1:]):
    return f"the kernels need widths that are multiples of {_DEPTH}"
  return None


def why_not(device: Any) -> str | None:
  """Returns why a device cannot run the kernels of this JAX, or None."""
  if device.compute_capability != _HOPPER:
    return (
      f"the kernels are for GPUs of compute capability {_HOPPER}, and this one"
      f" has {device.compute_capability}"
    )
  try:
    _kernels()
  except ImportError as error:
    # The modules of the kernels import absl, on which JAX does not depend.
    cure = "; run: pip install absl-py" if error.name == "absl" else ""
    why = f"JAX {jax.__version__} does not load the kernels: {error}{cure}"
    log(logging.WARNING, f"grouped_matmul: {why}")
    return why
  return None


def _kernels() -> ByFunction:
  folder = "jax.experimental.pallas.ops.gpu"
  load = functools.partial(importlib.import_module, package=folder)
  dot = load(".ragged_dot_mgpu").ragged_dot
  transposed = load(".transposed_ragged_dot_mgpu").transposed_ragged_dot
  return ByFunction(
    functools.partial(_dot, dot),
    functools.partial(_dot, dot, transpose_rhs=True),
    functools.partial(_gradient, transposed),
  )


def _dot(
  kernel: Callable[..., Array],
  rows: Array,
  matrices: Array,
  sizes: Array,
  **options: Any,
) -> Array:
  # The kernel keeps all group sizes in registers. With these blocks, it spills
  # no registers for up to 128 matrices.
  block_m, block_n = (128, 192) if len(sizes) <= 16 else (64, 128)
  with jax.enable_x64(False):
    out = kernel(
      jnp.pad(rows, ((0, -rows.shape[0] % _ROWS), (0, 0))),
      matrices,
      group_sizes=sizes,
      block_m=block_m,
      block_n=block_n,
      block_k=_DEPTH,
      max_concurrent_steps=4,
      grid_block_n=1,
      **options,
    )
  return out[: rows.shape[0]]


def _gradient(
  kernel: Callable[..., Array],
  rows: Array,
  outs: Array,
  sizes: Array,
  dtype: jnp.dtype,
) -> Array:
  with jax.enable_x64(False):
    sizes, rows, outs = _apart(sizes, rows, outs)
    height, width = (128 if x.shape[1] % 128 == 0 else 64 for x in (rows, outs))
    return kernel(
      rows,
      outs,
      group_sizes=sizes,
      block_m=height,
      block_n=width,
      block_k=_DEPTH,
      max_concurrent_steps=4,
      grid_block_n=1,
    ).astype(dtype)


def _apart(sizes: Array, *arrays: Array) -> tuple[Array, ...]:
  """Moves each slab to a multiple of _DEPTH rows, with zeros between slabs.

  A step of the kernel would sum rows of two slabs, and multiply the rows of the
  other slab by zero, so a NaN in one slab would reach another.
  """
  apart = -(-sizes // _DEPTH) * _DEPTH
  num_rows = arrays[0].shape[0] + len(sizes) * (_DEPTH - 1)
  row = lax.iota(jnp.int32, -(-num_rows // _DEPTH) * _DEPTH)
  ends = jnp.cumsum(apart, dtype=jnp.int32)
  slab = (ends[None] <= row[:, None]).sum(1, dtype=jnp.int32)
  slab = jnp.minimum(slab, len(sizes) - 1)
  in_slab = row - (ends - apart)[slab]
  inside = ((in_slab < sizes[slab]) & (in_slab >= 0))[:, None]
  source = (jnp.cumsum(sizes, dtype=jnp.int32) - sizes)[slab] + in_slab
  return apart, *(
    jnp.where(inside, x.at[source].get(mode="clip"), 0) for x in arrays
  )


log = functools.cache(_logger.log)  # logs each message once
