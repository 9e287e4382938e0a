# SPDX-License-Identifier: Apache-2.0
"""A MoE layer as a module of Flax NNX.

The parameters are `nnx.Param`, so an optimizer for that type trains them and
leaves the bias alone, which is a `Variable` of a type of its own.
"""

from flax import nnx
import jax
import jax.numpy as jnp

import ep


class RouterBias(nnx.Variable):
  """The selection bias of a router, which balances its experts."""


class MoE(nnx.Module):
  """Maps tokens `[..., H]` to tokens and `ep.moe.Metrics`."""

  def __init__(
    self, config: ep.MoEConfig, layer: ep.EpLayerConfig, *, rngs: nnx.Rngs
  ):
    self.config, self.layer = config, layer
    params = ep.moe.init(rngs.params(), config)
    self.params = nnx.Dict({n: nnx.Param(x) for n, x in params.items()})
    self.bias = RouterBias(jnp.zeros(config.num_experts))

  def __call__(
    self, x: jax.Array, *, train: bool = False
  ) -> tuple[jax.Array, ep.moe.Metrics]:
    params = {name: param[...] for name, param in self.params.items()}
    y, metrics = ep.moe.apply(
      self.layer, self.config, params, x, bias=self.bias[...]
    )
    if train:
      self.bias[...] = ep.moe.update_bias(self.bias[...], metrics.load)
    return y, metrics
