# SPDX-License-Identifier: Apache-2.0
"""Metrics: the numbers that a MoE layer reports of a step."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


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
    drops: int32 [E], choices that found no row, by their expert.
    max_rank_rows: int32 [], rows wanted by the busiest rank.
  """

  load: jax.Array
  aux_loss: jax.Array
  z_loss: jax.Array
  entropy: jax.Array
  drops: jax.Array
  max_rank_rows: jax.Array

  @property
  def dropped(self) -> jax.Array:
    """int32 [], choices that found no row."""
    return self.drops.sum(axis=-1, dtype=jnp.int32)
