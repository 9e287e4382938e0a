# SPDX-License-Identifier: Apache-2.0
"""Applies a function to the rows of tokens in receive buffers.

A receive buffer has the capacity for the worst routing, and also has rows
without a token. XLA computes all rows, but no row without a token, even NaN,
affects another row or a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from ep._src.base import contexts
from ep._src.base.arrays import expanded, iota
from ep._src.matmul.tail import cut


def map_used_rows(
  fn: Callable[..., Any],
  group_sizes: jax.Array,
  *arrays: jax.Array,
  is_padding: jax.Array | None = None,
  tail: str = "unspecified",
) -> Any:
  """Returns `fn(*arrays)`, where `fn` maps each row independently.

  Rows without a token read the first row, where `fn` is as finite as in other
  rows, and their results, tangents and gradients are zero. The first row has a
  token, unless no row has one. So a value over which `fn` closes also gets a
  finite gradient.

  Args:
    fn: maps arrays [C, ...] to one array [C, ...] or a sequence of them.
    group_sizes: int32 [L], rows of slabs, of a sum up to C.
    *arrays: [C, ...].
    is_padding: int32 [C], 1 for the rows that pad a slab, or None if no row
      does.
    tail: the rows of results after the last slab: "zero" or "unspecified".
  """
  num_used = group_sizes.sum(dtype=jnp.int32)
  is_token = iota(arrays[0].shape[0]) < num_used
  if is_padding is not None:
    is_token &= is_padding == 0

  def with_tokens(x: jax.Array, others: jax.Array | int) -> jax.Array:
    return jnp.where(expanded(is_token, x.ndim), x, others)

  def read(x: jax.Array) -> jax.Array:
    first = lax.stop_gradient(x[:1])
    return with_tokens(x, jnp.where(is_token[:1].any(), first, 1))

  outs = jax.tree.map(lambda x: with_tokens(x, 0), fn(*map(read, arrays)))
  if contexts.tail(tail) == "nan":
    outs = jax.tree.map(lambda x: cut(x, num_used, "nan"), outs)
  return outs


def weighted(rows: jax.Array, weights: jax.Array) -> jax.Array:
  """Returns rows [B, H] times weights [B], multiplied in float32."""
  products = weights[:, None] * rows.astype(jnp.float32)
  return products.astype(rows.dtype)
