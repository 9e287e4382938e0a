# SPDX-License-Identifier: Apache-2.0
"""Metrics describe a step of a MoE layer; update_bias balances the next one."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ep._src.base import arguments


class Metrics(NamedTuple):
  """Numbers of a layer in a step, over all ranks' tokens; equal on all ranks.

  Attributes:
    load: float32 [E], choices that fell on each expert, dropped ones included.
    aux_loss: float32 [], the balancing loss; 1 if the load is even. It has a
      gradient, and so has `z_loss`.
    z_loss: float32 [], the mean of `logsumexp(logits)**2`.
    entropy: float32 [], the mean entropy of the softmax of a token's logits, in
      nats, from 0 to log E. It shows a router that never decides (near log E),
      and one that is always certain (near 0).
    dropped: int32 [], choices that found no row.
    max_rank_rows: int32 [], rows wanted by the busiest rank.
  """

  load: jax.Array
  aux_loss: jax.Array
  z_loss: jax.Array
  entropy: jax.Array
  dropped: jax.Array
  max_rank_rows: jax.Array


def update_bias(
  bias: jax.Array, load: jax.Array, rate: float = 1e-3
) -> jax.Array:
  """Returns the selection bias of the next step: raised for idle experts.

  Each entry moves by `rate`, up if the expert had less than the mean load and
  down if it had more (Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy
  for Mixture-of-Experts", arXiv 2408.15664, algorithm 1; DeepSeek-V3 uses a
  rate of 0.001).

  Args:
    bias: [..., E], what `ep.moe.apply` got as `bias`; zeros at first.
    load: [..., E], the `Metrics.load` of that step. Axes in front are layers.
    rate: how far an entry moves, in units of a score.

  Raises:
    ValueError: the shapes differ.
  """
  arguments.check(
    jnp.shape(bias) == jnp.shape(load),
    "ep.moe.update_bias",
    f"bias has shape {jnp.shape(bias)}, but load {jnp.shape(load)}; pass the"
    " bias and the Metrics.load of the same layers.",
  )
  mean = load.mean(axis=-1, keepdims=True)
  return bias + rate * jnp.sign(mean - load).astype(bias.dtype)
