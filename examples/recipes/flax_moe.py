# SPDX-License-Identifier: Apache-2.0
"""A MoE layer as a Flax NNX module.

The parameters are `nnx.Param`. The selection bias has another `Variable` type,
so an optimizer of `nnx.Param` does not change the bias.

Each variable carries its sharding, for `nnx.get_partition_spec` and
`nnx.get_named_sharding`. Moments of an `nnx.Optimizer` inherit the shardings.
"""

from flax import nnx
import jax

import ep


class SelectionBias(nnx.Variable):
  """The variable with the bias of `ep.moe.State`, which balances experts."""


class MoE(nnx.Module):
  """Maps tokens `[..., H]` to tokens and `ep.moe.Metrics`."""

  def __init__(self, layer: ep.MoE, *, rngs: nnx.Rngs):
    self.layer = layer
    mesh, specs = layer.group.mesh, layer.specs()
    self.params = nnx.Dict(
      {
        name: nnx.Param(x, out_sharding=specs[name], mesh=mesh)
        for name, x in layer.init(rngs.params()).items()
      }
    )
    self.bias = SelectionBias(layer.init_state().bias)

  def __call__(
    self, x: jax.Array, *, train: bool = False
  ) -> tuple[jax.Array, ep.moe.Metrics]:
    params = {name: param[...] for name, param in self.params.items()}
    state = ep.moe.State(self.bias[...])
    y, metrics = self.layer(params, x, state)
    if train:
      self.bias[...] = state.after(metrics.load).bias
    return y, metrics
