# SPDX-License-Identifier: Apache-2.0
"""Lets a program of XLA's own operations fail with a message."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from ep._src.base import compat


def fail_if(
  failed: jax.Array,
  fail: Callable[..., None],
  *args: jax.Array,
  can_raise: bool,
) -> jax.Array:
  """If `failed`, calls `fail`, which raises, with `args` as NumPy arrays.

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
