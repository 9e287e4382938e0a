# SPDX-License-Identifier: Apache-2.0
"""Chooses the implementation of a grouped matmul: default, name or function.

An implementation is a namespace with the functions of tiles.py: expand,
contract, outer. The default of each platform passes `ep.testing.GroupedMatmul`.
"""

from __future__ import annotations

from collections.abc import Callable
import typing
from typing import Any, Literal

import jax

from ep._src.base import arguments, arrays
from ep._src.matmul import on_cuda, on_tpu, tiles
from ep._src.matmul.by_function import ByFunction, RAGGED_DOT
from ep._src.native import ffi

Name = Literal["tiles", "ragged_dot", "mgpu"]
# None is the platform's default. A function takes lhs, rhs and group_sizes, as
# `lax.ragged_dot` does.
Implementation = Name | Callable[..., jax.Array] | None


def check(what: str, implementation: Any) -> None:
  """Raises unless an argument is None, a name or a hashable function."""
  names = typing.get_args(Name)
  if callable(implementation):
    arrays.function(what, "implementation", implementation)
    return
  arguments.check(
    isinstance(implementation, str | None) and implementation in (None, *names),
    what,
    f"implementation = {implementation!r}, but it must be None, one of {names},"
    " or a function with the arguments of jax.lax.ragged_dot.",
  )


def choose(
  implementation: Implementation,
  platform: str,
  device: Any,
  rows: Any,
  matrices: Any,
  is_gradient: bool,
) -> Any:
  """Returns a namespace with expand, contract and outer.

  Args:
    implementation: the user's choice.
    platform: for which the program is lowered: "cpu", "cuda", "tpu", "other".
    device: a device that will run the program; None if unknown.
    rows: the shape and dtype of rows, or of their results.
    matrices: the shape and dtype of the matrices, or of their gradients.
    is_gradient: whether the call computes gradients of matrices.

  Raises:
    ValueError: the platform has no such implementation.
  """
  if 0 in (*rows.shape, *matrices.shape):
    return RAGGED_DOT  # others need not take empty arrays
  if callable(implementation):
    return ByFunction(implementation)
  if implementation is None:
    if platform == "cuda":
      return on_cuda.choose(device, rows, matrices, is_gradient)
    if platform == "tpu":
      return on_tpu.choose(rows, matrices)
    return tiles
  if implementation == "tiles":
    return tiles
  if implementation == "ragged_dot":
    return RAGGED_DOT
  if platform != "cuda":
    raise ValueError(
      'grouped_matmul: implementation = "mgpu" is for an NVIDIA GPU, and this'
      f" program is for {platform}; pass implementation=None for the default of"
      " each platform."
    )
  return on_cuda.choose(device, rows, matrices, is_gradient, named=True)


def default_of(device: Any) -> str:
  """Returns which implementation a device gets by default, and why."""
  platform = "cuda" if device.platform == "gpu" else device.platform
  if platform == "cpu":
    try:
      ffi.path_and_interface("host")
    except (OSError, ffi.NativeError):
      return "the loop over tiles, because the native library is missing"
    return "the native library; the loop over tiles in exported programs"
  if platform == "tpu":
    return "megablox of JAX for bfloat16 and float32, else lax.ragged_dot"
  if platform != "cuda":
    return "the loop over tiles, because there are no kernels for it"
  if reason := on_cuda.why_not(device):
    return f"the loop over tiles, because {reason}"
  return on_cuda.KERNELS
