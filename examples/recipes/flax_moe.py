# SPDX-License-Identifier: Apache-2.0
"""A MoE layer as a Flax NNX module.

The parameters are `nnx.Param`. The state has another `Variable` type, so an
optimizer of `nnx.Param` does not change the state.
"""

from flax import nnx
import jax

import ep


class MoEState(nnx.Variable):
  """The variable with the `ep.moe.State` that balances the experts."""


class MoE(nnx.Module):
  """Maps tokens `[..., H]` to tokens and `ep.moe.Metrics`."""

  def __init__(self, layer: ep.MoE, *, rngs: nnx.Rngs):
    self.layer = layer
    params = layer.init(rngs.params())
    self.params = nnx.Dict({n: nnx.Param(x) for n, x in params.items()})
    self.state = MoEState(layer.init_state())

  def __call__(
    self, x: jax.Array, *, train: bool = False
  ) -> tuple[jax.Array, ep.moe.Metrics]:
    params = {name: param[...] for name, param in self.params.items()}
    state = self.state.get_value()
    y, metrics = self.layer(params, x, state)
    if train:
      self.state.set_value(state.after(metrics.load))
    return y, metrics
