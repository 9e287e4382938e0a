# SPDX-License-Identifier: Apache-2.0
"""The errors of ops: for `except`, by several backends, in XLA's programs."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from ep._src.base import arguments, compat

# This is a tuple, not a class of our own, because JAX raises the failures of a
# running program. Usually it raises `jax.errors.JaxRuntimeError`, a
# RuntimeError. Where a repeated call of a jitted function fails before it
# returns, JAX's C++ path raises a ValueError with the same message.
EpError: tuple[type[Exception], ...] = (RuntimeError, ValueError)

# The number that backends compute in place of a fault where all choices are
# right: it is above all of them.
NO_FAULT = np.int32(arguments.INT32_MAX)


def wrong_choice(
  what: str, fault: int, expert: int, top_k: int, num_experts: int
) -> ValueError:
  """Returns the error of a choice, in the words of ep_ffi/core/faults.h.

  Args:
    what: the op and the rank.
    fault: twice the number of the choice among all K of all tokens; one more if
      the expert is repeated, rather than out of range.
    expert: the id.
    top_k: K.
    num_experts: E.
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

  If `failed`, it calls `fail`, which raises, with `args` as NumPy arrays.

  Returns 0, or 1 where it failed and the program cannot call Python. `failed`
  is alike on all ranks. Whatever the ranks exchange from here on must depend on
  the result, so that no rank waits in an exchange for a rank that has failed.
  """
  if not can_raise:
    return failed.astype(jnp.int32)
  result = jax.ShapeDtypeStruct((), jnp.int32)
  return lax.cond(
    failed,
    lambda *args: compat.io_callback(
      lambda *args: fail(*map(np.asarray, args)), result, *args
    ),
    lambda *_: jnp.int32(0),
    *args,
  )
