# SPDX-License-Identifier: Apache-2.0
"""A decoder-only transformer whose feed-forward layers are mixtures of experts.

Everything here is ordinary JAX, which works on the arrays of a rank, as in
training, and on global arrays. Experts are sharded over the EP axis of the
mesh, which does not show in the code.

The layers are alike, so their parameters are stacked and one `lax.scan` runs
them; a program of 64 layers compiles as fast as one of 2.
"""

from collections.abc import Callable
import dataclasses
from typing import TypeAlias

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import ep
from text import VOCABULARY

# Maps parameters, tokens and a state to tokens and metrics, as `ep.MoE` does.
Layer: TypeAlias = Callable[..., tuple[jax.Array, ep.moe.Metrics]]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The shape of a model. A head has `hidden / heads` dimensions, in pairs."""

  layers: int
  hidden: int
  heads: int
  inner: int  # of each expert
  num_experts: int
  top_k: int
  score: str  # of the router, as in ep.MoEConfig
  wire: str | None = None  # how rows travel to experts
  replicas: int = 0  # slots of a rank for copies of other ranks' experts

  @property
  def dense(self) -> "ModelConfig":
    """A model of one expert, as large as the experts of a token together."""
    inner = self.top_k * self.inner
    return dataclasses.replace(
      self, inner=inner, num_experts=1, top_k=1, wire=None, replicas=0
    )

  @property
  def moe(self) -> ep.MoEConfig:
    return ep.MoEConfig(
      self.hidden,
      self.inner,
      self.num_experts,
      self.top_k,
      score=self.score,
      wire=self.wire,
      balance="sequence",
      replica_slots=self.replicas,
      deterministic=self.replicas == 0,
    )


def init(key: jax.Array, config: ModelConfig) -> dict:
  """Returns the parameters; those below "blocks" lead with `[layers]`."""
  embed_key, unembed_key, blocks_key = jax.random.split(key, 3)
  hidden, heads = config.hidden, config.heads

  def normal(key, shape, fan_in):
    return jax.random.normal(key, shape) * fan_in**-0.5

  def block(key):
    qkv_key, out_key, moe_key = jax.random.split(key, 3)
    return {
      "attention_norm": jnp.ones(hidden),
      "qkv": normal(qkv_key, (3, hidden, heads, hidden // heads), hidden),
      "out": normal(out_key, (heads, hidden // heads, hidden), hidden),
      "moe_norm": jnp.ones(hidden),
      "moe": ep.moe.init(moe_key, config.moe, jnp.float32),
    }

  return {
    "embed": jax.random.normal(embed_key, (VOCABULARY, hidden)),
    "blocks": jax.vmap(block)(jax.random.split(blocks_key, config.layers)),
    "norm": jnp.ones(hidden),
    "unembed": normal(unembed_key, (hidden, VOCABULARY), hidden),
  }


def partition_specs(config: ModelConfig) -> dict:
  """Returns the specs of `init`'s arrays: only experts are sharded."""
  return {
    "embed": P(),
    "blocks": {
      "attention_norm": P(),
      "qkv": P(),
      "out": P(),
      "moe_norm": P(),
      "moe": ep.moe.partition_specs(config.moe, lead=1),
    },
    "norm": P(),
    "unembed": P(),
  }


def apply(
  params: dict,
  layer: Layer,
  tokens: jax.Array,
  *,
  moe_state: ep.moe.State,
  placement: ep.Placement | None = None,
) -> tuple[jax.Array, ep.moe.Metrics]:
  """Returns the logits of each next byte.

  Args:
    params: what `init` returns.
    layer: `ModelConfig.moe` on a mesh, or `dense_layer`.
    tokens: int32 `[B, S]`, sharded over all ranks along B.
    moe_state: of all layers, stacked.
    placement: where the experts of each layer are, `[layers, E]`.

  Returns:
    Logits `[B, S, 256]`, and the metrics of each MoE layer, stacked.
  """

  def block(x, block_params):
    p, state, placement = block_params
    x = x + _attend(p, _norm(x, p["attention_norm"]))
    y, metrics = layer(
      p["moe"], _norm(x, p["moe_norm"]), state, placement=placement
    )
    return x + y, metrics

  x = params["embed"][tokens]
  of_layers = params["blocks"], moe_state, placement
  x, metrics = lax.scan(block, x, of_layers)
  return _norm(x, params["norm"]) @ params["unembed"], metrics


def dense_layer(
  params: dict, x: jax.Array, state: ep.moe.State, *, placement=None
) -> tuple[jax.Array, ep.moe.Metrics]:
  """Computes what an `ep.MoE` of one expert does, without routing."""
  del state, placement
  hidden = jax.nn.silu(x @ params["w_gate"][0]) * (x @ params["w_up"][0])
  zero, none = jnp.zeros(()), jnp.zeros((), jnp.int32)
  metrics = ep.moe.Metrics(
    load=jnp.ones(1),
    aux_loss=zero,
    z_loss=zero,
    entropy=zero,
    drops=none[None],
    max_rank_rows=none,
  )
  return hidden @ params["w_down"][0], metrics


def _attend(p, x):
  q, k, v = jnp.einsum("bsh,qhnd->qbsnd", x, p["qkv"])
  y = jax.nn.dot_product_attention(_rotate(q), _rotate(k), v, is_causal=True)
  return jnp.einsum("bsnd,ndh->bsh", y, p["out"])


def _rotate(x):
  """Rotates pairs of dimensions by angles that grow with the position.

  The scalar product of a query and a key then depends on their distance (Su et
  al., "RoFormer", arXiv 2104.09864).
  """
  half = x.shape[-1] // 2
  frequencies = 10_000.0 ** (-jnp.arange(half) / half)
  positions = jnp.arange(x.shape[1])[:, None, None]
  angles = positions * frequencies  # [S, 1, D / 2]
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  a, b = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def _norm(x, scale):
  mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
  return x * lax.rsqrt(mean_square + 1e-6) * scale
