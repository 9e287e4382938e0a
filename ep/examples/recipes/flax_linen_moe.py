# SPDX-License-Identifier: Apache-2.0
"""A MoE layer as a module of Flax Linen.

The bias is in a collection of its own, "router". A call that may change that
collection, `apply(..., mutable="router")`, is one of training, and updates it.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

import ep


class MoE(nn.Module):
  """Maps tokens `[..., H]` to tokens and `ep.moe.Metrics`."""

  config: ep.MoEConfig
  layer: ep.EpLayerConfig

  @nn.compact
  def __call__(self, x: jax.Array) -> tuple[jax.Array, ep.moe.Metrics]:
    params = self.param("moe", ep.moe.init, self.config)
    bias = self.variable("router", "bias", jnp.zeros, self.config.num_experts)
    y, metrics = ep.moe.apply(
      self.layer, self.config, params, x, bias=bias.value
    )
    if self.is_mutable_collection("router") and not self.is_initializing():
      bias.value = ep.moe.update_bias(bias.value, metrics.load)
    return y, metrics
