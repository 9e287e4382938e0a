# SPDX-License-Identifier: Apache-2.0
"""A decoder-only transformer whose feed-forward layers are mixtures of experts.

The code is ordinary JAX, for the local arrays of a rank, as in training, or for
global arrays. Only `partition_specs` shows that experts are sharded.
"""

from collections.abc import Callable
import dataclasses

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax

import ep
from text import VOCABULARY

HEAD = 32  # dimensions of an attention head


@dataclasses.dataclass(frozen=True)
class Config:
  """The model, its data, and its training.

  Two methods, which can be combined, balance the experts. `aux_loss` is the
  weight of a loss that is smallest when all experts are chosen equally often
  (Switch Transformer). `bias_rate` is the step by which a router's selection
  bias rises for idle experts and falls for busy ones (DeepSeek-V3).
  """

  layers: int
  hidden: int
  inner: int  # inner size of an expert
  num_experts: int
  top_k: int
  wire: str | None  # fp8 transport of rows to experts
  batch: int  # windows of text in a step
  shards: int  # the number of shards of a batch
  length: int  # bytes of a window
  learning_rate: float  # peak learning rate
  warmup: int  # steps until the peak learning rate
  decay_steps: int  # the rate is a tenth of the peak from this step on
  aux_loss: float
  bias_rate: float
  seed: int

  @property
  def dense(self) -> "Config":
    """A dense model whose inner size is top_k times the size of an expert."""
    inner = self.top_k * self.inner
    return dataclasses.replace(
      self, inner=inner, num_experts=1, top_k=1, wire=None
    )

  @property
  def moe(self) -> ep.MoEConfig:
    return ep.MoEConfig(
      self.hidden,
      self.inner,
      self.num_experts,
      self.top_k,
      wire=self.wire,
      balance="sequence",
      deterministic=True,
    )

  @property
  def schedule(self) -> optax.Schedule:
    """The learning rate by step; the length of the run does not change it."""
    return optax.warmup_cosine_decay_schedule(
      init_value=0.0,
      peak_value=self.learning_rate,
      warmup_steps=self.warmup,
      decay_steps=self.decay_steps,
      end_value=0.1 * self.learning_rate,
    )

  @property
  def optimizer(self) -> optax.GradientTransformation:
    return optax.adamw(self.schedule, b2=0.95, weight_decay=0.1, mask=_decays)


def _decays(params):
  """Returns a weight-decay mask: all parameters except scales of norms."""
  return jax.tree.map_with_path(
    lambda path, _: not path[-1].key.endswith("norm"), params
  )


def init(key: jax.Array, config: Config) -> dict:
  """Returns the parameters; arrays of "blocks" have a leading layer axis."""
  embed_key, unembed_key, blocks_key = jax.random.split(key, 3)
  hidden, heads = config.hidden, config.hidden // HEAD

  def normal(key, shape, fan_in):
    return jax.random.normal(key, shape) * fan_in**-0.5

  def block(key):
    qkv_key, out_key, moe_key = jax.random.split(key, 3)
    return {
      "attention_norm": jnp.ones(hidden),
      "qkv": normal(qkv_key, (3, hidden, heads, HEAD), hidden),
      "out": normal(out_key, (heads, HEAD, hidden), hidden),
      "moe_norm": jnp.ones(hidden),
      "moe": ep.moe.init(moe_key, config.moe, jnp.float32),
    }

  return {
    "embed": jax.random.normal(embed_key, (VOCABULARY, hidden)),
    "blocks": jax.vmap(block)(jax.random.split(blocks_key, config.layers)),
    "norm": jnp.ones(hidden),
    "unembed": normal(unembed_key, (hidden, VOCABULARY), hidden),
  }


def partition_specs(config: Config) -> dict:
  """Returns the specs of `init`'s arrays: only experts are sharded.

  The batch is split over all ranks, so each rank needs all other parameters.
  """
  blocks = dict.fromkeys(("attention_norm", "qkv", "out", "moe_norm"), P())
  blocks["moe"] = ep.moe.partition_specs(config.moe, lead=1)
  return {"embed": P(), "blocks": blocks, "norm": P(), "unembed": P()}


def apply(
  params: dict,
  layer: Callable,
  tokens: jax.Array,
  moe_state: ep.moe.State,
  mask: jax.Array,
) -> tuple[jax.Array, ep.moe.Metrics]:
  """Returns the logits of each next byte.

  One `lax.scan` runs all layers, so 64 layers compile as fast as 2.

  Args:
    layer: an `ep.MoE` of `Config.moe`, or `dense_layer`.
    tokens: int32 `[B, S]`, sharded over all ranks along B.
    moe_state: the stacked states of all layers.
    mask: bool `[B, S]`; where it is False, tokens visit no expert.

  Returns:
    Logits `[B, S, 256]`, and the stacked metrics of all MoE layers.
  """

  def block(x, params_and_state):
    p, state = params_and_state
    x = x + _attend(p, _norm(x, p["attention_norm"]))
    y, metrics = layer(p["moe"], _norm(x, p["moe_norm"]), state, mask=mask)
    return x + y, metrics

  x = params["embed"][tokens]
  x, metrics = lax.scan(block, x, (params["blocks"], moe_state))
  return _norm(x, params["norm"]) @ params["unembed"], metrics


def dense_layer(
  params: dict,
  x: jax.Array,
  state: ep.moe.State,
  mask: jax.Array | None = None,
) -> tuple[jax.Array, ep.moe.Metrics]:
  """Computes an `ep.MoE` of one expert, without routing; ignores the mask."""
  del state, mask
  hidden = jax.nn.silu(x @ params["w_gate"][0]) * (x @ params["w_up"][0])
  zeros = dict.fromkeys(ep.moe.Metrics._fields, jnp.zeros(()))
  own = {"load": jnp.ones(1), "drops": jnp.zeros(1, jnp.int32)}
  metrics = ep.moe.Metrics(**zeros | own)
  return hidden @ params["w_down"][0], metrics


def _attend(p, x):
  q, k, v = jnp.einsum("bsh,qhnd->qbsnd", x, p["qkv"])
  y = jax.nn.dot_product_attention(_rotate(q), _rotate(k), v, is_causal=True)
  return jnp.einsum("bsnd,ndh->bsh", y, p["out"])


def _rotate(x):
  """Rotates pairs of dimensions by angles proportional to the position.

  The dot product of a query and a key then depends on their distance (Su et
  al., "RoFormer", arXiv 2104.09864).
  """
  half = HEAD // 2
  frequencies = 10_000.0 ** (-jnp.arange(half) / half)
  positions = jnp.arange(x.shape[1])[:, None, None]
  angles = positions * frequencies  # [S, 1, HEAD / 2]
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  a, b = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def _norm(x, scale):
  mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
  return x * lax.rsqrt(mean_square + 1e-6) * scale
