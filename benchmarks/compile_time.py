# SPDX-License-Identifier: Apache-2.0
"""Measures how long a scanned model with MoE layers takes to compile.

    bazel run //benchmarks:compile_time -- --layers=8

The model is a decoder-only transformer whose layers are scanned; the program is
its loss and all gradients, traced, lowered and compiled for four devices of one
process. It never runs. Its feed-forward networks are MoE layers on a backend of
ep, or dense ones of the same active size, K * F. The models take turns, each
with empty caches.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import functools
import sys
import time

from absl import app, flags
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks import report, timing
from benchmarks.workload import AXIS, SPEC
import ep
from ep import launch

_LAYERS = flags.DEFINE_integer("layers", 8, "that are scanned", 1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "compilations that are timed", 1)
_CLOCK = flags.DEFINE_enum(
  "clock", "cpu", ["cpu", "wall"], "CPU time of all threads, or wall time"
)
_BACKENDS = ("host", "xla")
_CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}

_BATCH, _LENGTH, _HEADS, _VOCABULARY = 8, 128, 4, 256
CONFIG = ep.MoEConfig(hidden=256, inner=512, num_experts=16, top_k=2)


def main(argv) -> int:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  if not launch.inside_launcher():
    return launch.launch(
      [__file__, *sys.argv[1:]], num_processes=1, devices_per_process=4
    )
  launch.initialize()
  mesh = jax.make_mesh((4,), (AXIS,), axis_types=(AxisType.Auto,))
  with contextlib.ExitStack() as stack:
    ffns = {"dense": Dense()}
    for backend in _BACKENDS:
      group = ep.ep_bootstrap(
        mesh,
        num_experts=CONFIG.num_experts,
        max_tokens_per_rank=_BATCH * _LENGTH // mesh.size,
        hidden_dim=CONFIG.hidden,
        top_k=CONFIG.top_k,
        max_token_dtype=jnp.float32,
        backend=backend,
      )
      ffns[backend] = MoE(stack.enter_context(group))
    times = timing.take_turns(
      {
        name: functools.partial(compile_model, mesh, ffn, _LAYERS.value)
        for name, ffn in ffns.items()
      },
      mesh,
      rounds=_ROUNDS.value,
      warmup=1,
      clock=_CLOCKS[_CLOCK.value],
    )
  records = {
    name: {"median_s": sorted(seconds)[len(seconds) // 2], "seconds": seconds}
    for name, seconds in times.items()
  }
  print(f"{_LAYERS.value} layers, {_CLOCK.value} time, {_ROUNDS.value} rounds")
  for name, record in records.items():
    ratio = report.ratio(record, records["dense"])
    print(f"{name:8} {record['median_s']:6.2f} s {ratio:6.2f} x dense")
  return 0


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
    self._layer = CONFIG.layer(group)

  def init(self, key):
    return ep.moe.init(key, CONFIG)

  def __call__(self, params, x):
    y, metrics = ep.moe.apply(self._layer, CONFIG, params, x)
    return y, metrics.aux_loss


def compile_model(mesh: jax.sharding.Mesh, ffn, num_layers: int):
  """Returns the loss of a model and its gradients, compiled."""
  jax.clear_caches()
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
  return jax.jit(jax.value_and_grad(loss)).lower(params, text).compile()


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


if __name__ == "__main__":
  app.run(main)
