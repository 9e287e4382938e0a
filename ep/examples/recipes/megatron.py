# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's `fused_a2a` in JAX, on ep, for ports of its token dispatchers.

The functions see the arrays of one rank, inside `jax.shard_map`. Rows come in
the order of the experts, so that Megatron's permutation after dispatch, and its
inverse before combine, are left out.
"""

import jax
import jax.numpy as jnp

import ep
from ep.examples.recipes import experts


def hybrid_ep_dispatch(
  x: jax.Array,
  routing_map: jax.Array,
  probs: jax.Array,
  group: ep.EpLayerConfig,
) -> tuple[jax.Array, jax.Array, None, jax.Array, ep.EpHandle]:
  """Sends tokens [T, H] to the experts that a map bool [T, E] marks.

  Returns rows [C, H], their probabilities [C], no scaling factor,
  tokens_per_expert [L] with padding, and the handle. Of theirs, `pad_multiple`
  is the layer's alignment, and `num_permuted_tokens` its capacity C.
  """
  topk_idx, topk_weights = ep.topk_from_map(routing_map, probs, group.top_k)
  handle = ep.ep_prepare(group, topk_idx, topk_weights)
  rows, row_probs = ep.ep_dispatch(handle, x, topk_weights)
  return rows, row_probs, None, handle.group_sizes, handle


def hybrid_ep_combine(x: jax.Array, handle: ep.EpHandle) -> jax.Array:
  """Returns for each token [T, H] the sum of its rows [C, H]."""
  return ep.ep_combine(handle, x)


def fused_dispatch(
  x: jax.Array,
  token_indices: jax.Array,
  token_probs: jax.Array,
  group: ep.EpLayerConfig,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, ep.EpHandle]:
  """Sends tokens [T, H] to the experts of ids [T, K], where -1 is none.

  Returns rows [C, H], the local expert of each [C, 1] with -1 for unused rows,
  its probability [C, 1], tokens_per_expert [L], and the handle. Theirs has one
  row for all experts of a token on a rank, and this has one for each of them.
  """
  handle = ep.ep_prepare(group, token_indices, token_probs)
  rows, row_probs = ep.ep_dispatch(handle, x, token_probs)
  ids = experts.row_experts(handle)
  ends = jnp.cumsum(handle.group_sizes)
  place = jnp.arange(handle.capacity) - (ends - handle.group_sizes)[ids]
  ids = jnp.where(place < handle.token_counts[ids], ids, -1)
  return rows, ids[:, None], row_probs[:, None], handle.token_counts, handle


def fused_combine(
  x: jax.Array, group: ep.EpLayerConfig, handle: ep.EpHandle
) -> tuple[jax.Array, None]:
  """Returns for each token [T, H] the sum of its rows, and no event."""
  del group
  return ep.ep_combine(handle, x), None
