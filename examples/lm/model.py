# SPDX-License-Identifier: Apache-2.0
"""A decoder-only transformer whose feed-forward layers are mixtures of experts.

Everything here is ordinary JAX, which works in both views: on the arrays of a
rank, as in training, and on global arrays, as for samples. Experts are sharded
over the EP axis of the mesh, which does not show in the code.
The layers are alike, so their parameters are stacked and one `lax.scan` runs
them; a program of 64 layers compiles as fast as one of 2.
"""

from collections.abc import Callable
import dataclasses
from typing import NamedTuple, TypeAlias

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
  score: str  # of the router, "softmax" or "sigmoid"
  wire: str | None = None  # how rows travel to experts
  replicas: int = 0  # slots of a rank for copies of other ranks' experts

  @property
  def dense(self) -> "ModelConfig":
    """A model of one expert, as large as those that a token visits."""
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


class Cache(NamedTuple):
  """The keys and values of earlier positions: `[layers, B, T, heads, D]`."""

  keys: jax.Array
  values: jax.Array

  @classmethod
  def zeros(cls, config: ModelConfig, batch: int, length: int) -> "Cache":
    dim = config.hidden // config.heads
    shape = config.layers, batch, length, config.heads, dim
    return cls(jnp.zeros(shape), jnp.zeros(shape))


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
  config: ModelConfig,
  layer: Layer,
  tokens: jax.Array,
  *,
  moe_state: ep.moe.State,
  start: jax.Array | int = 0,
  cache: Cache | None = None,
  mask: jax.Array | None = None,
  placement: ep.Placement | None = None,
) -> tuple[jax.Array, ep.moe.Metrics, Cache | None]:
  """Returns the logits of each next byte.

  Args:
    params: what `init` returns.
    config: the shape of the model.
    layer: `config.moe` on a mesh, or `dense_layer`.
    tokens: int32 `[B, S]`, sharded over all ranks along B.
    moe_state: of all layers, stacked.
    start: the position of the first token.
    cache: keys and values of the positions before `start`; tokens attend to
      these, too. Without it they attend to each other only.
    mask: bool `[B, S]`, False for tokens that no expert needs to see.
    placement: where the experts of each layer are, `[layers, E]`.

  Returns:
    Logits `[B, S, 256]`, the metrics of each MoE layer, stacked, and the cache
    with the keys and values of these tokens written to it.
  """
  positions = start + jnp.arange(tokens.shape[1])

  def block(x, block_params):
    p, state, cache, placement = block_params
    y, cache = _attend(p, _norm(x, p["attention_norm"]), positions, cache)
    x = x + y
    y, metrics = layer(
      p["moe"], _norm(x, p["moe_norm"]), state, mask=mask, placement=placement
    )
    return x + y, (metrics, cache)

  x = params["embed"][tokens]
  of_layers = params["blocks"], moe_state, cache, placement
  x, (metrics, cache) = lax.scan(block, x, of_layers)
  return _norm(x, params["norm"]) @ params["unembed"], metrics, cache


def dense_layer(
  params: dict, x: jax.Array, state: ep.moe.State, *, mask=None, placement=None
) -> tuple[jax.Array, ep.moe.Metrics]:
  """Computes what an `ep.MoE` of one expert does, without routing."""
  del state, mask, placement
  hidden = jax.nn.silu(x @ params["w_gate"][0]) * (x @ params["w_up"][0])
  zero, none = jnp.zeros(()), jnp.zeros((), jnp.int32)
  metrics = ep.moe.Metrics(
    load=jnp.ones(1),
    aux_loss=zero,
    z_loss=zero,
    entropy=zero,
    drops=none[None],
    moved=none,
    max_rank_rows=none,
  )
  return hidden @ params["w_down"][0], metrics


def _attend(p, x, positions, cache):
  q, k, v = jnp.einsum("bsh,qhnd->qbsnd", x, p["qkv"])
  q, k = _rotate(q, positions), _rotate(k, positions)
  if cache is not None:
    k, v = cache = Cache(
      lax.dynamic_update_slice_in_dim(cache.keys, k, positions[0], axis=1),
      lax.dynamic_update_slice_in_dim(cache.values, v, positions[0], axis=1),
    )
  past = jnp.arange(k.shape[1]) <= positions[:, None]
  y = jax.nn.dot_product_attention(q, k, v, mask=past[None, None])
  return jnp.einsum("bsnd,ndh->bsh", y, p["out"]), cache


def _rotate(x, positions):
  """Rotates pairs of dimensions by angles that grow with the position.

  The scalar product of a query and a key then depends on their distance (Su et
  al., "RoFormer", arXiv 2104.09864).
  """
  half = x.shape[-1] // 2
  frequencies = 10_000.0 ** (-jnp.arange(half) / half)
  angles = positions[:, None, None] * frequencies  # [S, 1, D / 2]
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  a, b = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def _norm(x, scale):
  mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
  return x * lax.rsqrt(mean_square + 1e-6) * scale
