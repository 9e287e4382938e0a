# SPDX-License-Identifier: Apache-2.0
"""Counts the costs of layers and ops that XLA compiles for TPUs and GPUs.

    bazel run //benchmarks:compiled -- --targets=v5e,v6e --shapes=mixtral_8x7b

No accelerator is needed, because XLA compiles ahead of time (targets.py). A
layer is compiled with the gradients of its tokens and parameters. Tokens are
bfloat16, and parameters are float32. `ep.MoE` and the layers of peers.py have
the same router, and no loss that balances the load. The costs are of one
device:

  FLOPs    by XLA's cost model, over 18 C H F, the need of all C rows
  GB       bytes accessed, by the same model
  temp MB  temporaries at their peak
  rows, gathers, scatters, sorts, kernels, copies, ragged, others
           numbers of operations: gathers of rows, all gathers, scatters, sorts,
           kernels of Pallas, copies, ragged-all-to-alls, other collectives
  seconds  CPU time of the compilation, which depends less on other work on the
           machine than its duration

For GPUs the first two are unknown (nan). `ep` then multiplies matrices in a
loop over tiles. It would choose kernels of Mosaic GPU by properties of the
device that JAX knows only with a driver.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent import futures
import dataclasses
import functools
import multiprocessing
import time
from typing import Any, NamedTuple

from absl import app, flags
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks import contenders, hlo, ops, peers, targets, workload
from benchmarks.workload import Shape, SPEC
import ep

PEERS = {
  "maxtext_ragged": peers.Ragged,
  "maxtext_ring": peers.Ring,
  "levanter": peers.Chunked,
}
# The peers drop a rank's last rows, as drop_by="slot" does. "fair" is our
# default.
DROPS = {"ep": "slot", "ep_fair": "fair"}
NAMES = (*DROPS, *PEERS)
OPS = ("prepare", "dispatch", "combine", "dispatch_bwd", "combine_bwd")

_TARGETS = flags.DEFINE_list(
  "targets",
  [*targets.TPUS],
  f"machines: of {', '.join(targets.TPUS + targets.GPUS)}",
)
_SHAPES = flags.DEFINE_list(
  "shapes",
  ["2048x1024x2x16x2048", "mixtral_8x7b", "qwen3_30b_a3b"],
  "shapes TxHxKxExF, or models of ep.presets",
)
_TOKENS = flags.DEFINE_integer("tokens", 2048, "T of models", 1)
_EXPERTS = flags.DEFINE_integer(
  "experts_per_device", 8, "the most experts of a device", 1
)
_FACTORS = flags.DEFINE_list(
  "capacity_factors", ["none", "1.25"], "none is the worst case"
)
_LAYERS = flags.DEFINE_list("layers", [*NAMES], f"of {', '.join(NAMES)}")
_OPS = flags.DEFINE_list("ops", [], f"ops of ep, of {', '.join(OPS)}")


class Cost(NamedTuple):
  """The costs of a program for one device; see above. NaN if unknown."""

  flops: float
  num_bytes: float
  temporaries: int
  row_gathers: int
  gathers: int
  scatters: int
  sorts: int
  kernels: int
  copies: int
  ragged: int
  collectives: int
  seconds: float


def compiled(lowered: Any) -> Cost:
  """Compiles a lowered program, and returns its costs."""
  start = time.process_time()
  program = lowered.compile()
  seconds = time.process_time() - start
  found = [*hlo.ops(program.as_text())]

  def count(*opcodes: str) -> int:
    return sum(op.opcode in opcodes for op in found)

  model = {"flops": float("nan"), "bytes accessed": float("nan")}
  if all(op.is_counted for op in found):
    model |= program.cost_analysis() or {}
  return Cost(
    model["flops"],
    model["bytes accessed"],
    program.memory_analysis().temp_size_in_bytes,
    sum(op.gathers_rows for op in found),
    count("gather"),
    count("scatter"),
    count("sort"),
    sum(op.is_kernel for op in found),
    count("copy"),
    count("ragged-all-to-all"),
    count(*hlo.COLLECTIVES),
    seconds,
  )


def lower_layer(
  name: str, shape: Shape, factor: float | None, mesh: Mesh
) -> Any:
  """Lowers a layer with gradients.

  Args:
    name: one of `NAMES`.
    shape: T, H, K, E and F.
    factor: capacity relative to a balanced routing; None is the worst case.
    mesh: from `targets.mesh`.
  """
  config = ep.MoEConfig(
    shape.hidden,
    shape.inner,
    shape.num_experts,
    shape.top_k,
    capacity_factor=factor,
    overflow="drop" if factor else None,
    drop_by=DROPS.get(name) if factor else None,
    normalize=shape.top_k > 1,
  )
  layer = ep.MoE(config, mesh, backend="xla")

  def apply(params: Any, x: jax.Array) -> jax.Array:
    return layer(params, x)[0]

  if name in PEERS:
    apply = jax.shard_map(
      functools.partial(_peer, name, config, mesh),
      mesh=mesh,
      in_specs=(layer.specs(), SPEC),
      out_specs=SPEC,
      check_vma=False,
    )

  def loss(params: Any, x: jax.Array) -> jax.Array:
    return (apply(params, x).astype(jnp.float32) ** 2).mean()

  def make_args() -> Any:
    x = jnp.zeros((mesh.size * shape.tokens, shape.hidden), jnp.bfloat16)
    return dict(ep.moe.init(jax.random.key(0), config)), x

  args = _structs(mesh, jax.eval_shape(make_args), (layer.specs(), SPEC))
  program = jax.jit(jax.value_and_grad(loss, (0, 1)))
  return program.lower(*args)


def _peer(name: str, config: ep.MoEConfig, mesh: Mesh, params: Any, x: Any):
  logits = jnp.matmul(
    x.astype(jnp.float32), params["router"], precision=lax.Precision.HIGHEST
  )
  topk_idx, topk_weights = ep.route_topk(
    logits, config.top_k, normalize=config.normalize
  )
  on_tpu = mesh.devices.flat[0].platform == "tpu"
  layer = PEERS[name](
    mesh.size,
    config.num_experts,
    config.capacity_factor,
    peers.megablox if on_tpu else peers.ragged_dot,
  )
  matrices = (params[n] for n in ("w_gate", "w_up", "w_down"))
  return layer.moe(topk_idx, x, topk_weights, *matrices)


def _structs(mesh: Mesh, arrays: Any, specs: Any) -> Any:
  """Returns the types of arrays, sharded by `specs`, a prefix of the tree."""

  def struct(spec: PartitionSpec, x: Any) -> Any:
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), x
    )

  return jax.tree.map(struct, specs, arrays)


def lower_ops(
  names: Sequence[str], shape: Shape, mesh: Mesh
) -> Iterator[tuple[str, Any]]:
  """Yields names of ops of `ep`, and the ops, lowered."""
  work = workload.Workload(
    shape,
    workload.uniform(shape, mesh.size),
    mesh.size,
    dtype="bfloat16",
    zero_tail=False,
  )
  inputs = work.structs(mesh)
  with contenders.make("xla", mesh, work.layout, work.dtype) as contender:
    prepare = ops.program("prepare", contender, mesh)
    handle = jax.eval_shape(prepare, inputs["topk_idx"])
    inputs["handle"] = _structs(mesh, handle, SPEC)
    for name in names:
      args = (inputs[n] for n in ops.ALL[name].inputs)
      yield name, ops.program(name, contender, mesh).lower(*args)


def measure(
  target: str,
  shapes: Sequence[Shape],
  most_experts: int,
  factors: Sequence[float | None],
  layers: Sequence[str],
  op_names: Sequence[str],
) -> None:
  """Compiles for one target, and prints a table for each shape and factor."""
  jax.config.update("jax_platforms", "cpu")
  mesh = targets.mesh(target)
  kind = mesh.devices.flat[0].device_kind
  print(f"\n# {target}: {mesh.size} x {kind}, jax {jax.__version__}")
  for shape in shapes:
    experts = min(shape.num_experts, most_experts * mesh.size)
    shape = dataclasses.replace(shape, num_experts=experts)
    for factor in factors:
      print(f"\n{shape}  capacity factor {factor}\n{_HEADER}")
      costs, need = {}, _needed_flops(shape, factor, mesh.size)
      for name in layers:
        lowered = lower_layer(name, shape, factor, mesh)
        costs[name] = _print_row(name, lowered, need)
      _print_ratios(costs)
    if op_names:
      print(f"\n{shape}  ops\n{_HEADER}")
      for name, lowered in lower_ops(op_names, shape, mesh):
        _print_row(name, lowered, float("nan"))


def _needed_flops(shape: Shape, factor: float | None, ranks: int) -> float:
  """Returns the FLOPs of three products and their gradients, for all C rows."""
  local = shape.num_experts // ranks
  rows = ranks * shape.tokens * min(shape.top_k, local)
  if factor is not None:
    rows = min(rows, factor * shape.tokens * shape.top_k)
  return 18 * rows * shape.hidden * shape.inner


_HEADER = (
  "                FLOPs      GB  temp MB rows gathers scatters sorts kernels"
  " copies ragged others seconds"
)


def _print_row(name: str, lowered: Any, need: float) -> Cost | None:
  try:
    cost = compiled(lowered)
  except jax.errors.JaxRuntimeError as error:  # such as too little memory
    print(f"{name:15} {str(error).splitlines()[0]:.100}", flush=True)
    return None
  counts = zip(cost[3:-1], (4, 7, 8, 5, 7, 6, 6, 6), strict=True)
  print(
    f"{name:15} {cost.flops / need:5.2f} {cost.num_bytes / 1e9:7.3f}"
    f" {cost.temporaries / 1e6:8.0f}",
    *(f"{n:{width}}" for n, width in counts),
    f"{cost.seconds:7.1f}",
    flush=True,
  )
  return cost


def _print_ratios(costs: dict[str, Cost | None]) -> None:
  """Prints the costs of `ep` over the costs of each peer."""
  ours = costs.get("ep")
  for name, theirs in costs.items():
    if name in PEERS and ours and theirs:
      print(
        f"ep / {name}: bytes {ours.num_bytes / theirs.num_bytes:.2f},"
        f" temporaries {ours.temporaries / theirs.temporaries:.2f},"
        f" compile time {ours.seconds / theirs.seconds:.2f}"
      )


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  shapes = workload.parse_shapes(_SHAPES.value, tokens=_TOKENS.value, scale=1)
  factors = [None if f == "none" else float(f) for f in _FACTORS.value]
  context = multiprocessing.get_context("spawn")
  for target in _TARGETS.value:
    with futures.ProcessPoolExecutor(1, context) as process:
      process.submit(
        measure,
        target,
        shapes,
        _EXPERTS.value,
        factors,
        _LAYERS.value,
        _OPS.value,
      ).result()


if __name__ == "__main__":
  app.run(main)
