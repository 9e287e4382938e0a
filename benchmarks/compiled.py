# SPDX-License-Identifier: Apache-2.0
"""Counts the costs of `ep.MoE`, which XLA compiles for TPUs and GPUs.

    bazel run //benchmarks:compiled -- --targets=v5e --shapes=mixtral_8x7b

No accelerator is needed, because XLA compiles ahead of time. A layer is
compiled with the gradients of its tokens and parameters. Tokens are bfloat16,
and parameters are float32. The costs are of one device:

  FLOPs    by XLA's cost model, over 18 C H F, the need of all C rows
  GB       bytes accessed, by the same model
  outside  GB accessed outside of Pallas kernels
  temp MB  temporaries at their peak
  rows ... others
           numbers of operations: gathers of rows, all gathers, scatters of
           rows, sorts, kernels, copies, ragged-all-to-alls, other collectives
  seconds  CPU time of the compilation, which depends less on other work on the
           machine than its duration

For GPUs the first two are unknown (nan), and `ep` multiplies matrices in a loop
over tiles, because JAX knows the properties of a GPU only with a driver.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from concurrent import futures
import dataclasses
import multiprocessing
import re
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from benchmarks import workload
from benchmarks.workload import Shape, SPEC
import ep
import targets

# The name of an operation precedes its operands. Types have no such text.
_OPCODE = re.compile(r" ([a-z][a-z0-9-]*)\(%")
_ROWS = re.compile(r"slice_sizes=\{(1,)*(?!1[,}])\d")  # several elements
_KERNEL = re.compile(r'custom_call_target="(tpu_custom_call|mosaic_gpu\w*)"')
_ESTIMATE = re.compile(r'"cost_estimate":\{.*?"bytes_accessed":"?(\d+)')
_COLLECTIVE = "all-(gather|reduce|to-all)|collective-permute|reduce-scatter"
# The columns of the table that count operations.
_COUNTS = "rows gather scatter sort kernel copy ragged-all-to-all others"


class Cost(NamedTuple):
  """The costs of a program for one device, as above."""

  flops: float
  num_bytes: float
  temporaries: int
  operations: Counter[str]
  seconds: float


def operations(text: str) -> Counter[str]:
  """Counts the operations of a compiled program by opcode.

  An operation of a fusion or a loop counts once, and an asynchronous operation
  counts when it starts. Scatters of single elements count as "scalars". Some
  operations also count under another name: "rows" (gathers of several
  elements), "kernel" (of Pallas), "unknown" (kernels without an estimate of
  their costs), "others" (collectives except ragged-all-to-all). "bytes" is the
  sum of the kernels' estimates.
  """
  found = Counter[str]()
  for line in text.splitlines():
    opcode = _OPCODE.search(line)
    if opcode is None or opcode[1].endswith("-done"):
      continue
    name = opcode[1].removesuffix("-start")
    if name == "scatter" and "update_window_dims={}" in line:
      name = "scalars"
    found[name] += 1
    found["rows"] += name == "gather" and bool(_ROWS.search(line))
    found["others"] += bool(re.fullmatch(_COLLECTIVE, name))
    if _KERNEL.search(line):
      estimate = _ESTIMATE.search(line)
      found["kernel"] += 1
      found["unknown"] += estimate is None
      found["bytes"] += int(estimate[1]) if estimate else 0
  return found


def lower(
  shape: Shape, factor: float | None, mesh: Mesh, **options: Any
) -> Any:
  """Lowers a layer with gradients for a mesh from `targets.mesh`.

  The capacity is `factor` times the rows of a balanced routing; None is the
  worst case. `ep.MoEConfig` gets the options.
  """
  config = ep.MoEConfig(
    shape.hidden,
    shape.inner,
    shape.num_experts,
    shape.top_k,
    capacity_factor=factor,
    overflow="drop" if factor else None,
    normalize=shape.top_k > 1,
    dtype=jnp.bfloat16,
    **options,
  )
  layer = ep.MoE(config, mesh, backend="xla")

  def loss(params: Any, x: jax.Array) -> jax.Array:
    return (layer(params, x)[0].astype(jnp.float32) ** 2).mean()

  def struct(spec: Any, x: Any) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  params = jax.eval_shape(lambda: ep.moe.init(jax.random.key(0), config))
  params = jax.tree.map(struct, layer.specs(), params)
  tokens = mesh.size * shape.tokens, shape.hidden
  x = struct(SPEC, jax.ShapeDtypeStruct(tokens, jnp.bfloat16))
  return jax.jit(jax.value_and_grad(loss, (0, 1))).lower(params, x)


def compiled(lowered: Any) -> Cost:
  """Compiles a lowered program, and returns its costs."""
  start = time.process_time()
  program = lowered.compile()
  seconds = time.process_time() - start
  found = operations(program.as_text())
  model = {} if found["unknown"] else program.cost_analysis() or {}
  return Cost(
    model.get("flops", float("nan")),
    model.get("bytes accessed", float("nan")),
    program.memory_analysis().temp_size_in_bytes,
    found,
    seconds,
  )


def needed_flops(shape: Shape, factor: float | None, ranks: int) -> float:
  """Returns the FLOPs of three products and their gradients, for all C rows."""
  local = shape.num_experts // ranks
  rows = ranks * shape.tokens * min(shape.top_k, local)
  if factor is not None:
    rows = min(rows, factor * shape.tokens * shape.top_k)
  return 18 * rows * shape.hidden * shape.inner


def measure(
  target: str,
  shapes: Sequence[Shape],
  most_experts: int,
  factors: Sequence[float | None],
) -> None:
  """Compiles for one target, and prints a line for each shape and factor."""
  jax.config.update("jax_platforms", "cpu")
  mesh = targets.mesh(target)
  print(f"\n# {target}: {mesh.size} devices, jax {jax.__version__}")
  titles = "factor FLOPs      GB outside temp MB", _COUNTS, "seconds"
  print(f"{'shape':24}", *titles)
  for shape in shapes:
    experts = min(shape.num_experts, most_experts * mesh.size)
    shape = dataclasses.replace(shape, num_experts=experts)
    for factor in factors:
      start = f"{shape!s:24} {factor or 'none':6}"
      try:
        cost = compiled(lower(shape, factor, mesh))
      except jax.errors.JaxRuntimeError as error:  # such as too little memory
        print(f"{start} {str(error).splitlines()[0]:.100}", flush=True)
        continue
      flops = cost.flops / needed_flops(shape, factor, mesh.size)
      print(
        f"{start} {flops:5.2f} {cost.num_bytes / 1e9:7.3f}"
        f" {(cost.num_bytes - cost.operations['bytes']) / 1e9:7.3f}"
        f" {cost.temporaries / 1e6:7.0f}",
        *(f"{cost.operations[x]:{len(x)}}" for x in _COUNTS.split()),
        f"{cost.seconds:7.1f}",
        flush=True,
      )


def main() -> None:
  known = ", ".join(targets.TPUS + targets.GPUS)
  parser = argparse.ArgumentParser()
  for flag, default, meaning in (
    ("targets", ",".join(targets.TPUS), f"machines: of {known}"),
    ("shapes", "mixtral_8x7b,qwen3_30b_a3b", "TxHxKxExF, or models"),
    ("tokens", 2048, "T of models"),
    ("experts_per_device", 8, "the most experts of a device"),
    ("capacity_factors", "none,1.25", "none is the worst case"),
  ):
    kind = type(default)
    parser.add_argument(f"--{flag}", type=kind, default=default, help=meaning)
  flags = parser.parse_args()
  names, factors = flags.shapes.split(","), flags.capacity_factors.split(",")
  factors = [None if f == "none" else float(f) for f in factors]
  shapes = workload.parse_shapes(names, tokens=flags.tokens, scale=1)
  context = multiprocessing.get_context("spawn")
  for target in flags.targets.split(","):
    # jaxlib compiles only for the first kind of GPU that a process describes.
    with futures.ProcessPoolExecutor(1, context) as process:
      process.submit(
        measure, target, shapes, flags.experts_per_device, factors
      ).result()


if __name__ == "__main__":
  main()
