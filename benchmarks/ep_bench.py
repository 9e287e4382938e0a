# SPDX-License-Identifier: Apache-2.0
"""Times ep's ops and whole MoE layers against alternatives, in one run.

    bazel run //benchmarks:ep_bench -- --shapes=goals

starts the ranks of each process layout: "4x1" stands for 4 processes with 1
device each. In each layout all contenders take turns and run the same ops on
the same inputs. The contenders are ep's backends, and dispatch and combine
written by hand in JAX. The program checks a contender's results before it times
the contender. The shapes are TxHxKxE, with T tokens per rank; the routing is
uniform.

    ep_bench --shapes=2048x4096x4x64 --dtypes=bfloat16 --ops=round_trip
    ep_bench --ops=moe,moe_grad --shapes=mixtral_8x7b --scale=8 --tokens=256
    ep_bench --gate=1.0     exit code 1 if host is slower than hand-written JAX

The ops moe and moe_grad run a whole layer with its experts, for a given
routing: moe is forward, moe_grad is forward with all gradients. They have
separate contenders (layers.py), and shapes TxHxKxExF or the shapes of models.

Compare only numbers of the same run: other work on the machine slows all
contenders, and their ratios hardly change.
"""

from __future__ import annotations

import itertools
import os
import re
import sys

from absl import app, flags
import jax
from jax.sharding import AxisType
import numpy as np

from benchmarks import contenders, measure, report, timing, workload
from benchmarks.contenders import EXCHANGES, LAYER_OPS, OPS
from ep import presets
from ep.testing._routings import ROUTINGS

_WORLDS = flags.DEFINE_list(
  "worlds", ["1x4", "4x1"], "processes x devices per process"
)
_SHAPES = flags.DEFINE_list(
  "shapes",
  None,
  "TxHxKxE or TxHxKxExF, or among"
  f" {', '.join([*workload.NAMED, *presets.BY_NAME])}, models",
)
_TOKENS = flags.DEFINE_integer("tokens", 512, "T, for the shape of a model", 1)
_SCALE = flags.DEFINE_integer(
  "scale", 16, "divisor of H and F in the shape of a model", 1
)
_DTYPES = flags.DEFINE_list("dtypes", ["float32"], "of tokens")
_OPS = flags.DEFINE_list(
  "ops",
  None,
  f"default: {','.join(EXCHANGES)}; whole layers: {','.join(LAYER_OPS)}",
)
_CONTENDERS = flags.DEFINE_list("contenders", None, "default: all")
_CAPACITY_FACTOR = flags.DEFINE_float(
  "capacity_factor",
  None,
  "rows that a rank can receive, relative to a balanced routing; default: the"
  " worst case, as in ep",
)
_TAIL = flags.DEFINE_enum(
  "tail", "zero", ["zero", "unspecified"], "rows past the last, as in ep"
)
_RANKS_PER_GPU = flags.DEFINE_integer(
  "ranks_per_gpu", 1, "processes that share a GPU, with JAX_PLATFORMS=cuda", 1
)
_GATE = flags.DEFINE_float(
  "gate",
  None,
  "fail unless host's round trip is this many times as fast as the one of"
  f" {contenders.HAND_WRITTEN}; by default measures only these two",
)

for _flag, _known in (
  ("ops", OPS),
  ("dtypes", ("float32", "bfloat16", "float16")),
  ("contenders", contenders.NAMES),
):
  flags.register_validator(
    _flag,
    lambda names, known=_known: set(names or ()) <= set(known),
    f"choose among {', '.join(_known)}",
  )


def worlds():
  """Yields the launch options per process layout; exits if flags do not fit."""
  try:
    sizes = [_parse_world(world) for world in _WORLDS.value]
    for processes, devices in sizes:
      list(workloads(processes * devices))  # reports errors before launch
  except ValueError as error:
    sys.exit(f"ep_bench: {error}")
  for processes, devices in sizes:
    yield dict(
      num_processes=processes,
      devices_per_process=devices,
      ranks_per_gpu=_RANKS_PER_GPU.value,
    )


def _parse_world(world: str) -> tuple[int, int]:
  if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", world):
    raise ValueError(f"--worlds: {world!r} is no process layout; write 4x1.")
  processes, devices = map(int, world.split("x"))
  return processes, devices


def run_ranks() -> int:
  """Measures all cases, prints reports, and returns the exit code."""
  _silence_libraries()
  world = f"{jax.process_count()}x{jax.local_device_count()}"
  print(f"processes {world}, load average {os.getloadavg()[0]:.1f}")
  mesh = jax.make_mesh(
    (jax.device_count(),), (workload.AXIS,), axis_types=(AxisType.Auto,)
  )
  names = []
  for name in _chosen(
    _CONTENDERS, contenders.NAMES, ["host", contenders.HAND_WRITTEN]
  ):
    if why := contenders.why_not(name, mesh):
      print(f"skipped {name}: {why}")
    else:
      names.append(name)
  results = {}
  for work in workloads(mesh.size):
    shape, dtype = str(work.layout.shape), work.dtype.name
    measured = measure.measure(
      mesh, work, names=names, ops=_ops(), rounds=timing.ROUNDS.value
    )
    of_case = {
      report.Case(world, shape, dtype, op): of_op
      for op, of_op in measured.items()
    }
    report.print_tables(of_case)
    results |= of_case
  report.print_summary(results)
  if _GATE.value is None:
    return 0
  return 0 if report.gate(results, _GATE.value) else 1


def workloads(ranks: int):
  """Yields the workload of each shape and dtype.

  Raises:
    ValueError: flags contradict each other.
  """
  with_experts = any(op in LAYER_OPS for op in _ops())
  shapes = workload.parse_shapes(
    _chosen(_SHAPES, ["models" if with_experts else "goals"], ["gate"]),
    tokens=_TOKENS.value,
    scale=_SCALE.value,
  )
  if with_experts and any(shape.inner is None for shape in shapes):
    raise ValueError(
      f"--ops={','.join(LAYER_OPS)} need F, the inner size of the experts;"
      " write TxHxKxExF, or name a model."
    )
  for shape, dtype in itertools.product(shapes, _DTYPES.value):
    size = ranks * shape.tokens, shape.top_k
    rng = np.random.default_rng(0)  # the same on all processes
    yield workload.Workload(
      shape,
      ROUTINGS["uniform"](rng, size, shape.num_experts),
      ranks,
      dtype=dtype,
      capacity_factor=_CAPACITY_FACTOR.value,
      zero_tail=_TAIL.value == "zero",
    )


def _ops() -> list[str]:
  return _chosen(_OPS, list(EXCHANGES), ["round_trip"])


def _chosen(flag, default, default_of_gate):
  """Returns a flag's value, or its default with or without --gate."""
  if flag.value is not None:
    return flag.value
  return default if _GATE.value is None else default_of_gate


def _silence_libraries() -> None:
  """Suppresses the output of XLA's interprocess transport on stdout."""
  sys.stdout.flush()
  sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
  os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


main = timing.make_main(run_ranks, worlds)

if __name__ == "__main__":
  app.run(main)
