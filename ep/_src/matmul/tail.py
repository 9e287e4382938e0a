# SPDX-License-Identifier: Apache-2.0
"""The rows of a buffer after the last slab."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ep._src.base.arrays import expanded, iota

# The value of rows after the last slab, where XLA must write these rows.
TAILS = {"unspecified": 0, "zero": 0, "nan": jnp.nan}


def cut(rows: jax.Array, num_used: jax.Array, tail: str = "zero") -> jax.Array:
  """Returns the rows, with zeros or NaNs after the first `num_used`."""
  if tail == "unspecified":
    return rows
  used = iota(rows.shape[0]) < num_used
  return jnp.where(expanded(used, rows.ndim), rows, TAILS[tail])
