# SPDX-License-Identifier: Apache-2.0
"""A decoder-only transformer whose layers are scanned, to be compiled.

Its feed-forward networks are MoE layers, or dense ones of the same active size,
K * F. The program is the loss and all gradients.
"""

from __future__ import annotations

from collections.abc import Callable
import functools

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.workload import AXIS, SPEC
import ep

CONFIG = ep.MoEConfig(hidden=256, inner=512, num_experts=16, top_k=2)
_BATCH, _LENGTH, _HEADS, _VOCABULARY = 8, 128, 4, 256


def bootstrap(mesh: jax.sharding.Mesh, backend: str) -> ep.EpGroup:
  """Makes a group for the model."""
  return ep.ep_bootstrap(
    mesh,
    num_experts=CONFIG.num_experts,
    max_tokens_per_rank=_BATCH * _LENGTH // mesh.size,
    hidden_dim=CONFIG.hidden,
    top_k=CONFIG.top_k,
    max_token_dtype=jnp.float32,
    backend=backend,
  )


class Dense:
  """A dense network with gates."""

  specs = dict.fromkeys(["gate", "up", "down"], PartitionSpec())

  def init(self, _):
    h, f = CONFIG.hidden, CONFIG.top_k * CONFIG.inner
    return {
      "gate": jnp.zeros((h, f)),
      "up": jnp.zeros((h, f)),
      "down": jnp.zeros((f, h)),
    }

  def __call__(self, params, x):
    hidden = jax.nn.silu(x @ params["gate"]) * (x @ params["up"])
    return hidden @ params["down"], jnp.float32(0)


class MoE:
  """A MoE layer, with its router and its balancing loss."""

  specs = ep.moe.partition_specs(CONFIG, lead=1)

  def __init__(self, group: ep.EpGroup):
    self._layer = ep.MoE(CONFIG, group)

  def init(self, key):
    return ep.moe.init(key, CONFIG)

  def __call__(self, params, x):
    y, metrics = self._layer(params, x)
    return y, metrics.aux_loss


def lower(mesh: jax.sharding.Mesh, ffn, num_layers: int) -> jax.stages.Lowered:
  """Traces and lowers the loss of a model and its gradients."""
  everywhere = PartitionSpec()
  specs = {
    "embed": everywhere,
    "qkv": everywhere,
    "out": everywhere,
    "ffn": ffn.specs,
  }
  loss = jax.shard_map(
    functools.partial(_loss, ffn),
    mesh=mesh,
    in_specs=(specs, SPEC),
    out_specs=everywhere,
  )
  place = lambda spec: NamedSharding(mesh, spec)  # noqa: E731
  params = jax.tree.map(
    lambda shape, spec: shape.update(sharding=place(spec)),
    jax.eval_shape(lambda: _init(ffn, num_layers)),
    specs,
  )
  text = jax.ShapeDtypeStruct(
    (_BATCH, _LENGTH), jnp.int32, sharding=place(SPEC)
  )
  return jax.jit(jax.value_and_grad(loss)).lower(params, text)


def _init(ffn, num_layers):
  h = CONFIG.hidden
  return {
    "embed": jnp.zeros((_VOCABULARY, h)),
    "qkv": jnp.zeros((num_layers, h, 3, _HEADS, h // _HEADS)),
    "out": jnp.zeros((num_layers, h, h)),
    "ffn": jax.vmap(ffn.init)(jax.random.split(jax.random.key(0), num_layers)),
  }


def _loss(ffn: Callable, params, text):
  """Returns the mean cross-entropy of the next bytes and the balancing loss."""

  def block(x, layer):
    q, k, v = jnp.einsum("btd,dnhe->nbthe", _norm(x), layer["qkv"])
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + mixed.reshape(x.shape) @ layer["out"]
    y, balance = ffn(layer["ffn"], _norm(x))
    return x + y, balance

  embed = params["embed"]
  layers = {name: params[name] for name in ("qkv", "out", "ffn")}
  x, balance = lax.scan(block, embed[text], layers)
  logits = _norm(x[:, :-1]) @ embed.T
  log_probs = jnp.take_along_axis(
    jax.nn.log_softmax(logits), text[:, 1:, None], axis=-1
  )
  return lax.pmean(balance.sum() - log_probs.mean(), AXIS)


def _norm(x):
  return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
