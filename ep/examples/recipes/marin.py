# SPDX-License-Identifier: Apache-2.0
"""Marin's `moe_mlp` (levanter, Grug) on ep, with its drops and its counts.

It takes the place of `_moe_mlp_ep_ragged_a2a_local` and its siblings.
"""

from collections.abc import Callable
import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

import ep
from ep.examples.recipes import experts


class MoeDispatchCounts(NamedTuple):
  """Choices of all ranks that visited no expert, and why."""

  sender_dropped: jax.Array
  receiver_dropped: jax.Array
  padding_skipped: jax.Array


def moe_mlp(
  layer: ep.EpLayerConfig,
  x: jax.Array,
  selected_experts: jax.Array,
  combine_weights: jax.Array,
  w_up_gate: jax.Array,
  w_down: jax.Array,
  *,
  token_valid: jax.Array | None = None,
  activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
  capacity_factor: float = 1.25,
) -> tuple[jax.Array, MoeDispatchCounts]:
  """Returns the outputs [T, D] of tokens [T, D], and what was dropped.

  `selected_experts` and `combine_weights` are [T, K], `w_up_gate` is [E, D, 2
  I] with the gate first, `w_down` [E, I, D], and `token_valid` bool [T].
  """
  num_tokens, top_k = selected_experts.shape
  if token_valid is None:
    token_valid = jnp.ones(num_tokens, bool)
  even = num_tokens // layer.group.num_token_ranks * top_k
  rows = max(layer.num_local_experts, math.ceil(capacity_factor * even))
  y, dropped = experts.routed(
    dataclasses.replace(layer, overflow="drop", recv_capacity_per_rank=rows),
    x,
    jnp.where(token_valid[:, None], selected_experts, -1),
    combine_weights,
    (*jnp.split(w_up_gate, 2, axis=-1), w_down),
    activation=activation,
  )
  return y, MoeDispatchCounts(
    sender_dropped=jnp.zeros_like(dropped),  # a sender has no capacity here
    receiver_dropped=dropped,
    padding_skipped=top_k * jnp.sum(~token_valid),
  )
