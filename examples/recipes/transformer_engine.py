# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's `ep_dispatch`, `ep_combine` and `_MoEBlock` on ep.

The two functions let code that was written for its ops run here. The block, a
module of Flax Linen with its fields and parameters' names, is `ep.moe.apply`.
"""

import dataclasses
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

import ep


def ep_dispatch(
  cfg: ep.EpLayerConfig,
  topk_idx: jax.Array,
  tokens: jax.Array,
  topk_weights: jax.Array,
  recv_capacity_per_rank: int,
) -> tuple[jax.Array, jax.Array, ep.EpHandle, jax.Array, jax.Array]:
  """Returns the five results of theirs, in the global view.

  They are recv_tokens [R, C, H], recv_topk_weights [R, C], the handle in the
  place of their handle_mem, token_counts [R, L] with padding, total_recv_tokens
  [R, 1].
  """
  layer = dataclasses.replace(
    cfg, recv_capacity_per_rank=recv_capacity_per_rank
  )
  handle = ep.ep_prepare(layer, topk_idx, topk_weights)
  rows, row_weights = ep.ep_dispatch(handle, tokens, topk_weights)
  return rows, row_weights, handle, handle.group_sizes, handle.total_recv_tokens


def ep_combine(
  cfg: ep.EpLayerConfig,
  handle_mem: ep.EpHandle,
  token_counts: jax.Array,
  expert_out: jax.Array,
  num_local_tokens: int | tuple[int, ...],
) -> jax.Array:
  """Returns the sums of the rows [R, C, H], which were weighted before.

  The handle knows what the other three arguments say.
  """
  del cfg, token_counts, num_local_tokens
  return ep.ep_combine(handle_mem, expert_out)


class MoEBlock(nn.Module):
  """Maps tokens `[B, S, H]` to tokens, a loss, and the fullest rank's rows."""

  group: ep.EpGroup
  num_experts: int = 8
  num_experts_per_tok: int = 2
  intermediate_size: int = 2048
  score_function: Literal["softmax", "sigmoid"] = "softmax"
  use_pre_softmax: bool = False
  num_groups: int | None = None
  group_topk: int | None = None
  scaling_factor: float = 1.0
  use_expert_routing_bias: bool = False
  aux_loss_coeff: float = 0.0
  apply_topk_weights_early: bool = False
  dtype: jnp.dtype = jnp.float32
  use_ffn_bias: bool = False

  def config(self, hidden: int) -> ep.MoEConfig:
    """Returns what the fields are in ep."""
    top_groups = self.group_topk or 1
    return ep.MoEConfig(
      hidden=hidden,
      inner=self.intermediate_size,
      num_experts=self.num_experts,
      top_k=self.num_experts_per_tok,
      score=self.score_function,
      normalize=self.score_function == "sigmoid" or not self.use_pre_softmax,
      scale=self.scaling_factor,
      num_groups=self.num_groups or 1,
      top_groups=top_groups,
      group_best=self.num_experts_per_tok // top_groups,
      biases=self.use_ffn_bias,
      weigh="early" if self.apply_topk_weights_early else "late",
    )

  @nn.compact
  def __call__(
    self, inputs: jax.Array
  ) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    hidden, inner = inputs.shape[-1], self.intermediate_size
    config = self.config(hidden)
    kernel, zeros = nn.initializers.lecun_normal(), nn.initializers.zeros
    per_expert = nn.initializers.lecun_normal(batch_axis=0)

    def param(name, init, *shape):
      return self.param(name, init, shape, self.dtype)

    experts = self.num_experts
    params = {
      "router": param("gate_kernel", kernel, hidden, experts),
      "w_gate": param("wi_0", per_expert, experts, hidden, inner),
      "w_up": param("wi_1", per_expert, experts, hidden, inner),
      "w_down": param("wo", per_expert, experts, inner, hidden),
    }
    if self.use_ffn_bias:
      params |= {
        "b_gate": param("wi_0_bias", zeros, experts, inner),
        "b_up": param("wi_1_bias", zeros, experts, inner),
        "b_down": param("wo_bias", zeros, experts, hidden),
      }
    bias = None
    if self.use_expert_routing_bias:
      bias = param("expert_bias", zeros, experts)
    y, metrics = ep.moe.apply(
      config.layer(self.group), config, params, inputs, bias=bias
    )
    loss = self.aux_loss_coeff * metrics.aux_loss
    return y, loss if self.aux_loss_coeff else None, metrics.max_rank_rows
