# SPDX-License-Identifier: Apache-2.0
"""Tunix's `MoELayer` of Qwen3 on ep: an NNX module with its parameters' names.

Tunix shards experts and tokens over one axis, "fsdp", so that is the EP axis.
Theirs computes every expert for every token on CPUs; this one runs there as it
is.
"""

from flax import nnx
import jax

import ep
from ep.examples.recipes import experts


class MoELayer(nnx.Module):
  """Maps tokens `[B, T, D]` to tokens, both split over "tp" along D."""

  def __init__(
    self,
    layer: ep.EpLayerConfig,
    embed_dim: int,
    hidden_dim: int,
    *,
    rngs: nnx.Rngs,
  ):
    self.layer = layer
    num_experts = layer.group.num_experts
    self.router = nnx.Linear(embed_dim, num_experts, use_bias=False, rngs=rngs)
    normal = nnx.initializers.normal()

    def param(*shape):
      return nnx.Param(normal(rngs.params(), (num_experts, *shape)))

    self.gate_proj = param(embed_dim, hidden_dim)
    self.up_proj = param(embed_dim, hidden_dim)
    self.down_proj = param(hidden_dim, embed_dim)

  def __call__(self, x: jax.Array) -> jax.Array:
    topk = ep.route_topk(self.router(x), self.layer.top_k)
    kernels = self.gate_proj[...], self.up_proj[...], self.down_proj[...]
    y, _ = experts.routed(self.layer, x, *topk, kernels, tensor_axis="tp")
    return y
