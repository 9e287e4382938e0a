# SPDX-License-Identifier: Apache-2.0
"""A dense MoE layer, which applies every expert to every token, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def dense(
  outs: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array
) -> jax.Array:
  """Returns the weighted sum [N, H] of the outputs of each token's experts.

  Args:
    outs: [E, N, H], the outputs of every expert for every token.
    topk_idx: int [N, K]; -1 chooses no expert.
    topk_weights: [N, K].
  """
  chosen = jax.nn.one_hot(topk_idx, len(outs), dtype=outs.dtype)
  return jnp.einsum("nke,nk,enh->nh", chosen, topk_weights, outs)


def in_float64(fn: Callable[..., Any]) -> Callable[..., Any]:
  """Jits `fn`; the result converts floats to float64, and returns NumPy."""
  compiled = jax.jit(fn)

  def widen(x: Any) -> Any:
    x = np.asarray(x)
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(np.float64) if is_float else x

  def call(*args: Any) -> Any:
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
      return jax.tree.map(np.asarray, compiled(*jax.tree.map(widen, args)))

  return call
