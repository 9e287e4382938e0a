# SPDX-License-Identifier: Apache-2.0
"""`EpError`, and the errors that several backends raise."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from ep._src.base import arguments, compat

# The errors of failed programs. JAX chooses the class: usually a RuntimeError,
# `jax.errors.JaxRuntimeError`. If a repeated call of a jitted function fails
# before it returns, JAX's C++ path raises a ValueError.
EpError: tuple[type[Exception], ...] = (RuntimeError, ValueError)

# The `fault` of a routing without a wrong choice; larger than all other faults.
NO_FAULT = np.int32(arguments.INT32_MAX)


def wrong_choice(
  what: str, fault: int, expert: int, top_k: int, num_experts: int
) -> ValueError:
  """Returns the error for an invalid entry `expert` of `topk_idx`.

  `fault` is twice the index of the entry in `topk_idx.reshape(-1)`, plus one
  if the expert is repeated rather than out of range. The text is the same as in
  ep_ffi/core/faults.h.
  """
  choice, repeats = divmod(fault, 2)
  token, k = divmod(choice, top_k)
  what = f"{what}: topk_idx[{token}, {k}] = {expert}"
  if repeats:
    return ValueError(
      f"{what} repeats an expert of token {token}; the top-k experts of a token"
      " must be distinct (use -1 for an unused choice)"
    )
  return ValueError(
    f"{what}, but num_experts = {num_experts}; valid ids are"
    f" -1..{num_experts - 1}"
  )


def fail_if(
  failed: jax.Array,
  fail: Callable[..., None],
  *args: jax.Array,
  can_raise: bool,
) -> jax.Array:
  """Raises an error from inside a jitted program that has no custom call.

  If `failed`, which must be equal on all ranks, the program calls `fail` with
  `args` as NumPy arrays, and `fail` raises. Returns 0, or 1 if `failed` and the
  program cannot call Python. Later exchanges must depend on the result, so that
  no rank waits for a failed rank.
  """
  if not can_raise:
    return failed.astype(jnp.int32)
  result = jax.ShapeDtypeStruct((), jnp.int32)
  code: jax.Array = lax.cond(
    failed,
    lambda *args: compat.io_callback(
      lambda *args: fail(*map(np.asarray, args)), result, *args
    ),
    lambda *_: jnp.int32(0),
    *args,
  )
  return code
