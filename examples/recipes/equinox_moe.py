# SPDX-License-Identifier: Apache-2.0
"""A MoE layer as a module of Equinox.

The bias is in `eqx.nn.State`, like the averages of a batch norm, so no gradient
and no weight decay reaches it. Make the layer, or a model of several, with

    model, state = eqx.nn.make_with_state(MoE)(config, layer, key=key)
"""

import equinox as eqx
import jax
import jax.numpy as jnp

import ep


class MoE(eqx.Module):
  """Maps tokens `[..., H]` and a state to tokens, metrics and the new state."""

  params: dict[str, jax.Array]
  bias: eqx.nn.StateIndex
  config: ep.MoEConfig = eqx.field(static=True)
  layer: ep.EpLayerConfig = eqx.field(static=True)

  def __init__(
    self, config: ep.MoEConfig, layer: ep.EpLayerConfig, *, key: jax.Array
  ):
    self.params = ep.moe.init(key, config)
    self.bias = eqx.nn.StateIndex(jnp.zeros(config.num_experts))
    self.config, self.layer = config, layer

  def __call__(
    self, x: jax.Array, state: eqx.nn.State
  ) -> tuple[jax.Array, ep.moe.Metrics, eqx.nn.State]:
    bias = state.get(self.bias)
    y, metrics = ep.moe.apply(
      self.layer, self.config, self.params, x, bias=bias
    )
    state = state.set(self.bias, ep.moe.update_bias(bias, metrics.load))
    return y, metrics, state
