# SPDX-License-Identifier: Apache-2.0
"""Plans a training step for 64 devices, and tests it on a laptop.

    python examples/dry_run.py

First the script plans the step of a published MoE layer on an abstract mesh of
64 devices: array shapes, bytes per device, and the lowered program for TPUs.
Then it runs the same step, scaled down, on 8 virtual CPU devices. It checks

* the results against a dense model;
* the bits of an exchange against the numeric contract;
* the collectives of the program against the intended ones;
* the program's argument bytes against the bytes of a device's shards.
"""

import argparse
import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

import ep

AXES = ("dp", "fsdp", "ep", "tp")
CLUSTER = (2, 4, 4, 2)
LAPTOP = (1, 2, 2, 2)
TOKENS = P(("dp", "fsdp", "ep"))

MODEL = dataclasses.replace(
  ep.presets.QWEN3_30B_A3B,
  capacity_factor=1.25,
  overflow="chunk",  # drops no token, as in the dense model
  fsdp_axis="fsdp",
  tp_axis="tp",
)
# JAX's primitives of the intended collectives: FSDP gathers expert weights and
# scatters their gradients; the step sums the loss and the other gradients.
# Collectives that XLA adds to reshard arrays have other names.
MEANT = ("all_gather", "reduce_scatter", "psum_invariant", "reduce_sum")
# The largest allowed deviation, relative to an array's largest value.
BOUND = 2e-5


def make_step(layer):
  """Returns `step(state, batch) -> state, loss`: SGD with momentum."""

  def loss_fn(params, x, target):
    y, metrics = layer(params, x)
    error = jnp.mean(jnp.square((x + y - target).astype(jnp.float32)))
    return error + 1e-2 * metrics.aux_loss

  def step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], *batch)
    return descend(state, grads), loss

  return step


def descend(state, grads):
  momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
  params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
  return {"params": params, "momentum": momentum}


def inputs(mesh, cfg, lead, dtype):
  """Returns the shapes, dtypes and shardings of a state and a batch."""

  def put(x, spec):
    sharding = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  params = jax.eval_shape(lambda key: ep.moe.init(key, cfg), jax.random.key(0))
  specs = ep.moe.partition_specs(cfg, "ep")
  params = {name: put(x, specs[name]) for name, x in params.items()}
  tokens = put(jax.ShapeDtypeStruct((*lead, cfg.hidden), dtype), TOKENS)
  return {"params": params, "momentum": params}, (tokens, tokens)


def bytes_of_device(types) -> int:
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(types)
  )


def plan() -> None:
  """Prints shapes and bytes of the step on 64 devices; needs no device."""
  mesh = AbstractMesh(CLUSTER, AXES, axis_types=(AxisType.Auto,) * len(AXES))
  state, batch = inputs(mesh, MODEL, (64, 4096), jnp.bfloat16)
  tokens = math.prod(batch[0].sharding.shard_shape(batch[0].shape)[:-1])
  layer = ep.MoE(MODEL, mesh, max_tokens_per_rank=tokens)
  with layer.group:
    step = make_step(layer)
    new_state, loss = jax.eval_shape(step, state, batch)
    for old, new in zip(*map(jax.tree.leaves, (state, new_state)), strict=True):
      assert (old.shape, old.dtype) == (new.shape, new.dtype)
    assert loss.shape == ()
    program = (
      jax.jit(step).trace(state, batch).lower(lowering_platforms=("tpu",))
    )
  exchanges = program.as_text().count("@ragged_all_to_all")
  print(f"{mesh.size} devices, {dict(mesh.shape)}")
  for name, x in state["params"].items():
    shard = x.sharding.shard_shape(x.shape)
    print(f"  {name:8}{x.shape!s:18} of which a device has {shard}")
  rows = layer.ep_layer.capacity
  print(
    f"  tokens of a device {tokens}, rows that it can receive {rows}\n"
    f"  parameters and momentum {bytes_of_device(state) / 2**20:.0f} MiB of a"
    f" device, rows {rows * MODEL.hidden * 2 / 2**20:.0f} MiB\n"
    f"  lowered for TPUs, with {exchanges} ragged all-to-alls"
  )


def compile_step(mesh, cfg, types, backend=None):
  """Compiles the step for the given types. The layer's ep group stays open."""
  shardings = jax.tree.map(lambda x: x.sharding, types)
  layer = ep.MoE(cfg, mesh, backend=backend)
  step = jax.jit(make_step(layer), out_shardings=(shardings[0], None))
  return step.lower(*types).compile()


def rehearse() -> None:
  """Runs the step on 8 virtual devices, and compares the results."""
  mesh = jax.make_mesh(LAPTOP, AXES, axis_types=(AxisType.Auto,) * len(AXES))
  print(f"{mesh.size} virtual devices, {dict(mesh.shape)}")
  cfg = ep.presets.scaled(MODEL, 64)
  types = inputs(mesh, cfg, (8, 16), jnp.float32)
  values = initial_values(cfg, types[1][0].shape)
  args = jax.tree.map(lambda x, t: jax.device_put(x, t.sharding), values, types)
  wanted = jax.jit(dense_step, static_argnums=0)(cfg, *values)
  for backend in ("host", "xla"):  # `plan` uses "xla"
    check_bits(mesh, cfg, backend)
    print(f"  {backend}: an exchange has the bits of the contract")
    compiled = compile_step(mesh, cfg, types, backend)
    got = jax.device_get(jax.block_until_ready(compiled(*args)))
    deviations = jax.tree.map(relative_deviation, got, wanted)
    largest = max(jax.tree.leaves(deviations))
    assert largest <= BOUND, deviations
    print(
      f"  {backend}: loss and state are the dense model's, within {BOUND:g}"
    )
    ep.assert_no_hidden_collectives(compiled, allow=MEANT)
    print(f"  {backend}: only the intended collectives")
    memory, held = compiled.memory_analysis(), bytes_of_device(types)
    assert memory.argument_size_in_bytes == held, memory
    print(f"  {backend}: a device holds its shards, {held} bytes, and no more")
    print(
      f"  {backend}: deviation {largest:.1e}; while the step runs, XLA takes"
      f" {memory.temp_size_in_bytes / 2**20:.1f} MiB of a device"
    )


def check_bits(mesh, cfg, backend) -> None:
  """Checks the bits of an exchange against the numeric contract.

  The check leaves out the experts, because XLA may round their results
  differently in each program.
  """
  rng = np.random.default_rng(0)
  x = rng.standard_normal((8 * 16, cfg.hidden), np.float32)
  logits = rng.standard_normal((8 * 16, cfg.num_experts), np.float32)
  with ep.MoE(cfg, mesh, backend=backend).group as group:
    layer = ep.EpLayerConfig(group)

    @jax.jit
    def exchange(x, logits):
      topk_idx, topk_weights = ep.route_topk(logits, cfg.top_k)
      handle = ep.ep_prepare(layer, topk_idx)
      rows, row_weights = ep.ep_dispatch(handle, x, topk_weights)
      return ep.ep_combine(handle, rows, weights=row_weights), topk_weights

    # Wait for the results of all tp ranks before the group is closed.
    results = jax.block_until_ready(exchange(x, logits))
  y, weights = jax.device_get(results)
  wanted = np.zeros_like(x)
  for k in range(cfg.top_k):  # ascending k; each product and sum is rounded
    wanted += weights[:, k, None] * x
  np.testing.assert_array_equal(y, wanted)


def initial_values(cfg, shape):
  """Returns a state and a batch as whole arrays."""
  params = ep.moe.init(jax.random.key(0), cfg)
  x, target = jax.random.normal(jax.random.key(1), (2, *shape))
  momentum = jax.tree.map(jnp.zeros_like, params)
  return {"params": params, "momentum": momentum}, (x, target)


def dense_step(cfg, state, batch):
  """Computes the step without ep, with every expert for every token."""

  def loss_fn(params, x, target):
    logits = jnp.matmul(x, params["router"], precision="highest")
    scores = jax.nn.softmax(logits)
    least = jnp.sort(scores)[..., -cfg.top_k, None]
    chosen = scores >= least
    shares = jnp.where(chosen, scores, 0.0)
    shares /= shares.sum(axis=-1, keepdims=True)
    gate = jnp.einsum("bsh,ehf->bsef", x, params["w_gate"])
    up = jnp.einsum("bsh,ehf->bsef", x, params["w_up"])
    out = jnp.einsum(
      "bsef,efh,bse->bsh", jax.nn.silu(gate) * up, params["w_down"], shares
    )
    load = chosen.mean((0, 1)) / cfg.top_k
    aux_loss = cfg.num_experts * jnp.sum(load * scores.mean((0, 1)))
    return jnp.mean((x + out - target) ** 2) + 1e-2 * aux_loss

  loss, grads = jax.value_and_grad(loss_fn)(state["params"], *batch)
  return descend(state, grads), loss


def relative_deviation(got, wanted) -> float:
  """Returns the largest deviation, relative to the largest wanted value."""
  got, wanted = np.float64(got), np.float64(wanted)
  return float(np.max(np.abs(got - wanted)) / np.max(np.abs(wanted)))


def main() -> None:
  argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", math.prod(LAPTOP))
  plan()
  rehearse()


if __name__ == "__main__":
  main()
