# SPDX-License-Identifier: Apache-2.0
"""Generates tokens with a MoE transformer, and times steps beside a dense one.

    JAX_NUM_CPU_DEVICES=4 bazel run //examples:decode

runs in one process with four devices, and under a launcher in several.

Prefill and decode call one function, `apply`, with the same layer. The program
checks the logits of each step against a pass without a cache. The dense model
has the active size of the MoE model: its inner size is top_k times the inner
size of an expert, and each device has a copy of its parameters.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import statistics
import time
from typing import Any, NamedTuple

from absl import app, flags, logging
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

import ep
from ep import launch

VOCABULARY, HEAD = 256, 32

_BATCHES = flags.DEFINE_list("batches", ["1", "8", "64"], "batch sizes")
_LAYERS = flags.DEFINE_integer("layers", 4, "layers of the model", 1)
_HIDDEN = flags.DEFINE_integer("hidden", 256, "hidden size", HEAD)
_INNER = flags.DEFINE_integer("inner", 512, "inner size of an expert", 1)
_EXPERTS = flags.DEFINE_integer("num_experts", 8, "experts of a layer", 1)
_TOP_K = flags.DEFINE_integer("top_k", 2, "experts of a token", 1)
_PROMPT = flags.DEFINE_integer("prompt", 16, "tokens of a prompt", 1)
_NEW = flags.DEFINE_integer("new", 32, "tokens to generate", 2)

flags.register_validator(
  "batches",
  lambda sizes: all(size.isdecimal() and int(size) > 0 for size in sizes),
  "batches must be positive integers",
)
flags.register_validator(
  "hidden",
  lambda hidden: hidden % HEAD == 0,
  f"hidden must be a multiple of {HEAD}, the size of an attention head",
)
flags.register_multi_flags_validator(
  ["num_experts", "top_k"],
  lambda values: values["top_k"] <= values["num_experts"],
  "top_k must not exceed num_experts",
)


class Cache(NamedTuple):
  """The keys and values [layers, B, N, heads, HEAD] of `length` tokens."""

  keys: jax.Array
  values: jax.Array
  length: jax.Array


def main(argv) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  logging.set_verbosity(logging.WARNING)
  launch.initialize()
  mesh = jax.make_mesh((jax.device_count(),), ("ep",), (AxisType.Auto,))
  sizes = dict(hidden=_HIDDEN.value, num_experts=_EXPERTS.value)
  cfg = ep.MoEConfig(inner=_INNER.value, top_k=_TOP_K.value, **sizes)
  moe = ep.MoE(cfg, mesh)
  say(f"{jax.process_count()} processes, {mesh.size} devices; ms of a step")
  say("batch   dense     moe  ratio  moe with metrics")
  with moe.group:
    for batch in map(int, _BATCHES.value):
      times = measure(mesh, moe, batch)
      dense, plain, full = (1e3 * statistics.median(t) for t in times)
      ratio = statistics.median(b / a for a, b in zip(*times[:2], strict=True))
      say(f"{batch:5} {dense:7.2f} {plain:7.2f} {ratio:6.2f} {full:17.2f}")


def measure(mesh: Mesh, moe: ep.MoE, batch: int) -> list[list[float]]:
  """Returns the times of decode steps: dense, MoE, and MoE with metrics."""
  layer = functools.partial(moe, pad=True)
  inner = moe.config.top_k * moe.config.inner
  models = [
    (init(mesh, dense_params(mesh, inner)), dense_layer, False),
    (init(mesh, moe.init), layer, False),
    (init(mesh, moe.init), layer, True),
  ]
  generators = [Generator(mesh, *model, batch) for model in models]
  for generator in generators:
    generator.check()
  times: list[list[float]] = [[] for _ in models]
  for _ in range(_NEW.value):  # in turn, since the machine's speed may change
    for generator, of_model in zip(generators, times, strict=True):
      began = time.perf_counter()
      generator.decode()
      of_model.append(time.perf_counter() - began)
  return times


class Generator:
  """Generates the most probable tokens after random prompts."""

  def __init__(
    self, mesh: Mesh, params: Any, layer: Callable, metrics: bool, batch: int
  ):
    # A batch that the devices cannot split is replicated; `pad` splits it.
    split = "ep" if batch % mesh.size == 0 else None
    self.params, self.layer = params, layer
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, VOCABULARY, (batch, _PROMPT.value), np.int32)
    self.prompts = put(mesh, P(split), prompts)
    heads, N = _HIDDEN.value // HEAD, _PROMPT.value + 2 * _NEW.value
    zeros = np.zeros((_LAYERS.value, batch, N, heads, HEAD), np.float32)
    keys, values = (put(mesh, P(None, split), zeros) for _ in range(2))
    self.cache = Cache(keys, values, put(mesh, P(), np.int32(0)))

    # Without metrics in the result, XLA removes their all-reduce.
    @functools.partial(jax.jit, donate_argnums=2)
    def step(params, tokens, cache):
      logits, cache, of_layers = apply(params, layer, tokens, cache)
      tokens = jnp.argmax(logits[:, -1:], axis=-1).astype(jnp.int32)
      return tokens, logits, cache, of_layers if metrics else None

    self._step = step
    self.tokens, *_ = self._run(self.prompts)  # prefill

  def _run(self, tokens):
    tokens, logits, self.cache, metrics = self._step(
      self.params, tokens, self.cache
    )
    jax.block_until_ready((tokens, metrics))
    return tokens, logits

  def decode(self):
    """Generates a token of each sequence; returns the logits."""
    self.tokens, logits = self._run(self.tokens)
    return logits

  def check(self) -> None:
    """Compares the logits of decode steps with one pass over all tokens."""
    tokens, logits = [self.prompts], []
    for _ in range(_NEW.value):
      tokens.append(self.tokens)
      logits.append(self.decode())

    @jax.jit
    def deviation(params, tokens, logits, cache):
      tokens, logits = (jnp.concatenate(x, axis=1) for x in (tokens, logits))
      empty = jax.tree.map(jnp.zeros_like, cache)
      expected, *_ = apply(params, self.layer, tokens, empty)
      return jnp.abs(expected[:, _PROMPT.value :] - logits).max()

    largest = deviation(self.params, tokens, logits, self.cache)
    assert largest < 1e-3, largest


def apply(params: Any, layer: Callable, tokens: jax.Array, cache: Cache):
  """Returns logits [B, S, 256], the cache, and the metrics of all layers.

  The tokens [B, S] follow the tokens of the cache. Prefill passes a prompt, and
  decode passes one token of each sequence.
  """
  positions = cache.length + jnp.arange(tokens.shape[1])

  def block(x, of_layer):
    p, *cached = of_layer
    y, cached = attend(p, norm(x), positions, *cached)
    x = x + y
    y, metrics = layer(p["layer"], norm(x))
    return x + y, (*cached, metrics)

  x = params["embed"][tokens] + params["positions"][positions]
  x, (keys, values, metrics) = lax.scan(
    block, x, (params["blocks"], cache.keys, cache.values)
  )
  cache = Cache(keys, values, cache.length + tokens.shape[1])
  return norm(x) @ params["embed"].T, cache, metrics


def attend(p, x, positions, keys, values):
  """Returns the attention of x [B, S, H], and the longer keys and values."""
  q, k, v = jnp.einsum("bsh,qhnd->qbsnd", x, p["qkv"])
  append = functools.partial(lax.dynamic_update_slice_in_dim, axis=1)
  keys = append(keys, k, positions[0])
  values = append(values, v, positions[0])
  mask = jnp.arange(keys.shape[1]) <= positions[:, None]
  y = jax.nn.dot_product_attention(q, keys, values, mask=mask[None, None])
  return jnp.einsum("bsnd,ndh->bsh", y, p["out"]), (keys, values)


def norm(x):
  return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def dense_layer(params, x):
  """Computes a dense layer, which has no metrics."""
  hidden = jax.nn.silu(x @ params["w_gate"]) * (x @ params["w_up"])
  return hidden @ params["w_down"], None


def dense_params(mesh: Mesh, inner: int) -> Callable:
  """Returns a function of a key to the parameters of `dense_layer`."""
  shapes = dict.fromkeys(("w_gate", "w_up"), (_HIDDEN.value, inner))
  shapes["w_down"] = inner, _HIDDEN.value

  @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P()))
  def params(key):
    keys = jax.random.split(key, len(shapes))
    named = zip(keys, shapes.items(), strict=True)
    return {name: normal(k, shape) for k, (name, shape) in named}

  return params


def init(mesh: Mesh, init_layer: Callable) -> Any:
  """Returns parameters; arrays of "blocks" have a leading layer axis."""
  hidden, heads = _HIDDEN.value, _HIDDEN.value // HEAD
  keys = jax.random.split(jax.random.key(0), 5)
  stacked = jax.random.split(keys[0], _LAYERS.value)

  @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P()))
  def others():
    length = _PROMPT.value + 2 * _NEW.value
    lead = (_LAYERS.value,)
    return {
      "embed": normal(keys[1], (VOCABULARY, hidden)),
      "positions": normal(keys[2], (length, hidden)),
      "blocks": {
        "qkv": normal(keys[3], (*lead, 3, hidden, heads, HEAD), hidden),
        "out": normal(keys[4], (*lead, heads, HEAD, hidden), hidden),
      },
    }

  params = others()
  params["blocks"]["layer"] = jax.vmap(init_layer)(stacked)
  return params


def normal(key, shape, fan_in=None):
  return jax.random.normal(key, shape) * (fan_in or shape[0]) ** -0.5


def put(mesh: Mesh, spec: P, whole: np.ndarray) -> jax.Array:
  """Makes a global array; every process passes the whole array."""
  return jax.make_array_from_callback(
    whole.shape, NamedSharding(mesh, spec), lambda index: whole[index]
  )


def say(line: str) -> None:
  if jax.process_index() == 0:
    print(line, flush=True)


if __name__ == "__main__":
  app.run(main)
