# SPDX-License-Identifier: Apache-2.0
"""MaxText's `RoutedMoE.sparse_matmul` on ep.

Between the router and the sum of outputs, theirs are `permute`, a
`ragged_all_to_all`, `local_permute`, three `gmm`, the permutation back, a
second `ragged_all_to_all` and `unpermute`. Here `ep_dispatch` and `ep_combine`
are around the three grouped matmuls.
"""

import jax
import jax.numpy as jnp

import ep
from ep.examples.recipes import experts


def sparse_matmul(
  layer: ep.EpLayerConfig,
  inputs: jax.Array,
  gate_logits: jax.Array,
  pre_bias_logits: jax.Array | None,
  w0_kernel: jax.Array,
  w1_kernel: jax.Array,
  wo_kernel: jax.Array,
  w0_bias: jax.Array | None,
  w1_bias: jax.Array | None,
  wo_bias: jax.Array | None,
  *,
  load_balance_loss_weight: float = 0.01,
  routed_bias_update_rate: float = 0.001,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns output [B, S, H], lb_loss, and bias_updates [E].

  `inputs` are [B, S, H], sharded over the axes "data", "fsdp" and "expert" of
  the batch, and `gate_logits` [B, S, E]. Kernels may be sharded over "fsdp",
  too, and over "tensor" along the inner size.
  """
  top_k, num_experts = layer.top_k, layer.group.num_experts
  topk_weights, topk_idx = get_topk(gate_logits, pre_bias_logits, top_k)
  output, _ = experts.routed(
    layer,
    inputs,
    topk_idx,
    topk_weights,
    (w0_kernel, w1_kernel, wo_kernel),
    (w0_bias, w1_bias, wo_bias),
    tensor_axis="tensor",
  )
  # Their loss counts the choices of a token, and not the shares of choices.
  lb_loss = top_k * ep.sequence_balancing_loss(gate_logits, topk_idx)
  load = jnp.bincount(topk_idx.ravel(), length=num_experts)
  bias_updates = ep.moe.update_bias(
    jnp.zeros(num_experts), load, routed_bias_update_rate
  )
  return output, load_balance_loss_weight * lb_loss, bias_updates


def get_topk(
  gate_logits: jax.Array, pre_bias_logits: jax.Array | None, top_k: int
) -> tuple[jax.Array, jax.Array]:
  """Returns the weights and the ids [B, S, K] of the experts of each token.

  With `pre_bias_logits` they are those of DeepSeek-V3: `gate_logits` are scores
  with a bias, which chooses, and the weights are of the scores without it.
  """
  # Outside of `shard_map`, XLA would gather the operand of `lax.top_k`.
  topk_idx, topk_weights = ep.route_topk(gate_logits, top_k)
  if pre_bias_logits is None:
    return topk_weights, topk_idx
  scores = jnp.take_along_axis(pre_bias_logits, topk_idx, axis=-1)
  return scores / scores.sum(axis=-1, keepdims=True), topk_idx
