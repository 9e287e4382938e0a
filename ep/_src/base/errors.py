# SPDX-License-Identifier: Apache-2.0
"""EpError, for `except`, and an error that several backends raise."""

from __future__ import annotations

import numpy as np

from ep._src.base import arguments

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
