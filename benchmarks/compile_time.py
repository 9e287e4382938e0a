# SPDX-License-Identifier: Apache-2.0
"""Measures how long a scanned model with MoE layers takes to compile.

    bazel run //benchmarks:compile_time -- --layers=8 --rounds=5

The model is a decoder-only transformer, whose layers are scanned. Its
feed-forward networks are MoE layers on a backend of ep, or dense ones of the
same active size, K * F. The loss and all gradients are traced, lowered and
compiled for four devices of one process. They never run. The models take turns,
each with empty caches. Without layers, the programs are prepare, dispatch,
combine and their gradients.

It counts the instructions of a program, and the bytes that its collectives take
to a rank from the others, beside the rows that a uniform routing has for it.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import functools
import math
import re

from absl import flags
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np

from benchmarks import driver, report, timing
from benchmarks.workload import AXIS, SPEC
import ep

_LAYERS = flags.DEFINE_integer("layers", 8, "that are scanned", 0)
_CONFIG = ep.MoEConfig(hidden=256, inner=512, num_experts=16, top_k=2)
_BATCH, _LENGTH, _HEADS, _VOCABULARY = 8, 128, 4, 256
_TOKENS = _BATCH * _LENGTH // driver.DEVICES  # of a rank


def main() -> None:
  mesh = jax.make_mesh((driver.DEVICES,), (AXIS,), axis_types=(AxisType.Auto,))

  with contextlib.ExitStack() as stack:
    groups = {
      backend: stack.enter_context(bootstrap(mesh, backend))
      for backend in ("host", "xla")
    }
    lowerings = {
      name: functools.partial(_lower_ops, mesh, group)
      for name, group in groups.items()
    }
    if _LAYERS.value:
      lowerings = {
        name: functools.partial(lower, mesh, group, _LAYERS.value)
        for name, group in ({"dense": None} | groups).items()
      }
    programs = {name: low().compile() for name, low in lowerings.items()}
    times = timing.take_turns(
      {
        name: functools.partial(_compile_with_empty_caches, low)
        for name, low in lowerings.items()
      },
      mesh,
      rounds=driver.ROUNDS.value,
      warmup=1,
      clock=driver.CLOCK.value,
    )
  print(f"{_LAYERS.value} layers, {driver.CLOCK.value} time")
  records = {name: {"seconds": seconds} for name, seconds in times.items()}
  first = next(iter(records))
  for name, record in records.items():
    text = programs[name].as_text()
    print(
      f"{name:8} {np.median(record['seconds']):6.2f} s"
      f" {report.ratio(record, records[first]):6.2f} x {first},"
      f" {text.count(' = ')} instructions,"
      f" {_bytes_from_others(text) / 1e6:.1f} MB"
    )
  if not _LAYERS.value:  # rows travel there and back, and so do their gradients
    rows = _TOKENS * _CONFIG.top_k * (mesh.size - 1) // mesh.size
    print(f"rows     {4 * rows * (4 * _CONFIG.hidden + 2) / 1e6:.1f} MB")


def _compile_with_empty_caches(lower):
  jax.clear_caches()
  return lower().compile()


def bootstrap(mesh: jax.sharding.Mesh, backend: str) -> ep.EpGroup:
  """Makes a group for the model."""
  return ep.ep_bootstrap(
    mesh,
    num_experts=_CONFIG.num_experts,
    max_tokens_per_rank=_TOKENS,
    hidden_dim=_CONFIG.hidden,
    top_k=_CONFIG.top_k,
    backend=backend,
  )


def _lower_ops(mesh, group):
  """Lowers the ops and their gradients."""
  layer = ep.EpLayerConfig(group)

  def loss(tokens, weights, idx):
    handle = ep.ep_prepare(layer, idx)
    rows, row_weights = ep.ep_dispatch(handle, tokens, weights)
    return ep.ep_combine(handle, rows * row_weights[..., None]).sum()

  def argument(columns, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(
      (_TOKENS * mesh.size, columns), dtype, sharding=NamedSharding(mesh, SPEC)
    )

  return jax.jit(jax.value_and_grad(loss, (0, 1))).lower(
    argument(_CONFIG.hidden),
    argument(_CONFIG.top_k),
    argument(_CONFIG.top_k, jnp.int32),
  )


def _bytes_from_others(program):
  """Returns the bytes that a rank gets from others in its collectives."""
  results = re.findall(r" = (.*?) all-(?:to-all|gather)\(", program)
  sizes = re.findall(r"[a-z]+(\d+)\[([\d,]+)\]", " ".join(results))
  whole = sum(
    int(bits) // 8 * math.prod(map(int, shape.split(",")))
    for bits, shape in sizes
  )
  return whole * (driver.DEVICES - 1) / driver.DEVICES


def lower(
  mesh: jax.sharding.Mesh, group: ep.EpGroup | None, num_layers: int
) -> jax.stages.Lowered:
  """Traces and lowers the loss of a model and its gradients.

  The model has MoE layers of the group, or dense networks if it is None.
  """
  h, inner = _CONFIG.hidden, _CONFIG.top_k * _CONFIG.inner
  ffn = jax.eval_shape(lambda: ep.moe.init(jax.random.key(0), _CONFIG))
  specs = ep.moe.partition_specs(_CONFIG, lead=1)
  apply = _dense
  if group is None:
    ffn = _types(gate=(h, inner), up=(h, inner), down=(inner, h))
    specs = dict.fromkeys(ffn, PartitionSpec())
  else:
    apply = ep.MoE(_CONFIG, group)
  layers = _types(qkv=(h, 3, _HEADS, h // _HEADS), out=(h, h)) | {"ffn": ffn}
  params = _types(embed=(_VOCABULARY, h)) | jax.tree.map(
    lambda x: x.update(shape=(num_layers, *x.shape)), layers
  )
  specs = dict.fromkeys(params, PartitionSpec()) | {"ffn": specs}
  loss = jax.shard_map(
    functools.partial(_loss, apply),
    mesh=mesh,
    in_specs=(specs, SPEC),
    out_specs=PartitionSpec(),
  )
  text = jax.ShapeDtypeStruct((_BATCH, _LENGTH), jnp.int32)
  types = jax.tree.map(
    lambda x, spec: x.update(sharding=NamedSharding(mesh, spec)),
    (params, text),
    (specs, SPEC),
  )
  return jax.jit(jax.value_and_grad(loss)).lower(*types)


def _types(**shapes: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
  return {
    name: jax.ShapeDtypeStruct(shape, jnp.float32)
    for name, shape in shapes.items()
  }


def _dense(params, x):
  """Does what `ep.MoE` does, with one network that has gates."""
  hidden = jax.nn.silu(x @ params["gate"]) * (x @ params["up"])
  return hidden @ params["down"], None


def _loss(ffn: Callable, params, text):
  """Returns the mean cross-entropy of the next bytes and the balancing loss."""

  def block(x, layer):
    q, k, v = jnp.einsum("btd,dnhe->nbthe", _norm(x), layer["qkv"])
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + mixed.reshape(x.shape) @ layer["out"]
    y, metrics = ffn(layer["ffn"], _norm(x))
    return x + y, metrics.aux_loss if metrics else jnp.float32(0)

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
  driver.run(main)
