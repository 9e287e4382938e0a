# SPDX-License-Identifier: Apache-2.0
"""A MoE layer as an Equinox module.

`eqx.nn.State` stores the layer's state, as it stores batch norm averages, so
gradients and weight decay do not change the state. Make the layer, or a model
of several layers, with

    layer = ep.MoE(config, mesh)
    model, state = eqx.nn.make_with_state(MoE)(layer, key=key)
"""

import equinox as eqx
import jax

import ep


class MoE(eqx.Module):
  """Maps tokens `[..., H]` and a state to tokens, metrics and the new state."""

  params: dict[str, jax.Array]
  state: eqx.nn.StateIndex
  layer: ep.MoE = eqx.field(static=True)

  def __init__(self, layer: ep.MoE, *, key: jax.Array):
    self.params = layer.init(key)
    self.state = eqx.nn.StateIndex(layer.init_state())
    self.layer = layer

  def __call__(
    self, x: jax.Array, state: eqx.nn.State
  ) -> tuple[jax.Array, ep.moe.Metrics, eqx.nn.State]:
    moe_state = state.get(self.state)
    y, metrics = self.layer(self.params, x, moe_state)
    return y, metrics, state.set(self.state, moe_state.after(metrics.load))
