# SPDX-License-Identifier: Apache-2.0
"""Measures ep's ops beside their alternatives, in one run.

    bazel run //benchmarks:ep_bench -- --shapes=goals --json=results.json

starts worlds of ranks: "4x1" stands for 4 processes with 1 device each. In
each world all contenders take turns and run the same ops on the same inputs.
The contenders are ep's backends, dispatch and combine written by hand in JAX,
and a plain copy of the payload (workload.py defines it). The results of a
contender are checked before it is timed. The shapes are TxHxKxE, with T tokens
on a rank.

    ep_bench --shapes=2048x4096x4x64 --dtypes=bfloat16 --ops=round_trip
    ep_bench --shapes=1024x1024x2x16 --routings=skewed,to_one_expert
    ep_bench --ops=moe,moe_grad --shapes=mixtral_8x7b --scale=8 --tokens=256
    ep_bench --gate=1.0     exit code 1 if host is slower than hand-written JAX

The ops moe and moe_grad are a whole layer with its experts, for a given
routing: forward, and that with all gradients. They have contenders of their
own (layers.py), and shapes TxHxKxExF or those of models.

Only numbers of the same run can be compared: other work on the machine slows
all of them, and their ratios hardly change.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import sys
import tempfile
from typing import Any

from absl import app, flags, logging
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
import numpy as np

from benchmarks import contenders, driver, measure, report, workload
from benchmarks.ops import ALL, LAYERS, OPS
from ep import launch, presets
from ep.testing._routings import ROUTINGS

_WORLDS = flags.DEFINE_list(
  "worlds", ["1x4", "4x1"], "processes x devices of each"
)
_SHAPES = flags.DEFINE_list(
  "shapes",
  None,
  "TxHxKxE or TxHxKxExF, or among"
  f" {', '.join([*workload.PRESETS, *presets.BY_NAME])}, models",
)
_TOKENS = flags.DEFINE_integer("tokens", 512, "T, for the shape of a model", 1)
_SCALE = flags.DEFINE_integer(
  "scale", 16, "what divides H and F in the shape of a model", 1
)
_DTYPES = flags.DEFINE_list("dtypes", None, "of tokens; default: float32")
_OPS = flags.DEFINE_list(
  "ops", None, f"default: {','.join(OPS)}; whole layers: {','.join(LAYERS)}"
)
_CONTENDERS = flags.DEFINE_list("contenders", None, "default: all there are")
_ROUTINGS = flags.DEFINE_list("routings", ["uniform"], ", ".join(ROUTINGS))
_CAPACITY_FACTOR = flags.DEFINE_float(
  "capacity_factor",
  None,
  "rows that a rank can receive, relative to a balanced routing; default: the"
  " worst case, as in ep",
)
_OVERFLOW = flags.DEFINE_enum(
  "overflow",
  "error",
  ["error", "chunk"],
  "what ep's layers do with more rows; --ops=moe,moe_grad can send chunks",
)
_TAIL = flags.DEFINE_enum(
  "tail", "zero", ["zero", "unspecified"], "rows past the last, as in ep"
)
_WARMUP = flags.DEFINE_integer("warmup", 2, "runs before the timed ones", 0)
_RANKS_PER_GPU = flags.DEFINE_integer(
  "ranks_per_gpu", 1, "processes that share a GPU, with JAX_PLATFORMS=cuda", 1
)
_JSON = flags.DEFINE_string("json", None, "file to write all results to")
_GATE = flags.DEFINE_float(
  "gate",
  None,
  "fail unless host's round trip is this many times as fast as that of"
  f" {contenders.HAND_WRITTEN}; by default measures little else",
)
_PART = flags.DEFINE_bool(
  "part", False, "this is one of several worlds; its parent makes the report"
)


for _flag, _known in (
  ("ops", ALL),
  ("dtypes", ("float32", "bfloat16", "float16")),
  ("contenders", contenders.names()),
  ("routings", ROUTINGS),
):
  flags.register_validator(
    _flag,
    lambda names, known=_known: set(names or ()) <= set(known),
    f"choose among {', '.join(_known)}",
  )


def main(argv) -> int:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  logging.set_verbosity(logging.WARNING)
  if launch.inside_launcher():
    return run_ranks()
  try:
    worlds = [parse_world(world) for world in _WORLDS.value]
    for ranks in {processes * devices for processes, devices in worlds}:
      all_cases(ranks)  # here an error is reported once, not by every rank
  except ValueError as error:
    sys.exit(f"ep_bench: {error}")
  runs = []
  for processes, devices in worlds:
    with tempfile.TemporaryDirectory() as folder:
      part = pathlib.Path(folder, "part.json")
      code = launch.launch(
        [__file__, *sys.argv[1:], "--part", f"--json={part}"],
        num_processes=processes,
        devices_per_process=devices,
        ranks_per_gpu=_RANKS_PER_GPU.value,
      )
      if code != 0:
        return code
      runs.append(json.loads(part.read_text()))
  return finish(
    {**runs[0], **{k: sum((r[k] for r in runs), []) for k in LISTS}}
  )


# These lists in the results of all worlds are joined.
LISTS = ("skipped", "results")


def run_ranks() -> int:
  """Runs the ranks of this process; returns the exit code. Rank 0 reports."""
  launch.initialize()
  _silence_libraries()
  leads = jax.process_index() == 0
  say = print if leads else lambda *_: None
  load = os.getloadavg()
  world = f"{jax.process_count()}x{jax.local_device_count()}"
  mesh = jax.make_mesh(
    (jax.device_count(),), (workload.AXIS,), axis_types=(AxisType.Auto,)
  )
  say(f"world {world}, load average {load[0]:.1f}, {driver.CLOCK.value} time")
  names, skipped = [], []
  for name in _chosen(_CONTENDERS, contenders.names(), _GATE_CONTENDERS):
    if why := contenders.why_not(name, mesh):
      skipped.append({"world": world, "contender": name, "why": why})
      say(f"skipped {name}: {why}")
    else:
      names.append(name)
  results = []
  for routing, layout, choices in all_cases(mesh.size):
    for dtype in _chosen(_DTYPES, ["float32"]):
      records = measure_case(mesh, names, layout, choices, dtype)
      common = {"world": world, "routing": routing}
      records = [report.add_statistics({**common, **r}) for r in records]
      if leads:
        report.print_tables(records)
      results += records
  if not leads:
    return 0
  return finish(
    {
      "jax": jax.__version__,
      "clock": driver.CLOCK.value,
      "platform": mesh.devices.flat[0].platform,
      "cpus": len(os.sched_getaffinity(0)),
      "load_average": load,
      "skipped": skipped,
      "results": results,
    }
  )


def measure_case(mesh, names, layout, choices, dtype) -> list[dict[str, Any]]:
  """Returns the records of one shape, routing and dtype."""
  work = workload.Workload(layout, choices, jnp.dtype(dtype))
  common = {
    "shape": str(layout.shape),
    "dtype": dtype,
    "tail": _TAIL.value,
    "capacity": layout.capacity,
    "tokens": layout.ranks * layout.shape.tokens,
    "payload_bytes": work.payload_bytes,
  }
  records = measure.measure(
    mesh,
    work,
    names=names,
    ops=_ops(),
    rounds=driver.ROUNDS.value,
    warmup=_WARMUP.value,
    clock=driver.CLOCK.value,
  )
  return [{**common, **record} for record in records]


def finish(run: dict[str, Any]) -> int:
  """Writes and prints what the flags ask for; returns the exit code."""
  if not _PART.value:
    run["summary"] = report.summary(run["results"])
    report.print_summary(run["summary"])
  if _JSON.value:
    user_path(_JSON.value).write_text(json.dumps(run, indent=1) + "\n")
  if _GATE.value is not None and not _PART.value:
    return 0 if report.gate(run["results"], _GATE.value) else 1
  return 0


def all_cases(ranks: int) -> list[tuple[str, workload.Layout, np.ndarray]]:
  """Returns each routing with its layout and choices.

  Raises:
    ValueError: if flags do not fit each other.
  """
  cases = []
  with_experts = any(op in LAYERS for op in _ops())
  shapes = workload.parse_shapes(
    _chosen(_SHAPES, ["models" if with_experts else "goals"], ["gate"]),
    tokens=_TOKENS.value,
    scale=_SCALE.value,
  )
  if with_experts and any(shape.inner is None for shape in shapes):
    raise ValueError(
      f"--ops={','.join(LAYERS)} need F, the inner size of the experts; write"
      " TxHxKxExF, or name a model."
    )
  for shape, routing in itertools.product(shapes, _ROUTINGS.value):
    choices = workload.draw(routing, shape, ranks)
    layout = workload.make_layout(
      shape,
      choices,
      ranks,
      capacity_factor=_CAPACITY_FACTOR.value,
      zero_tail=_TAIL.value == "zero",
      overflow=_OVERFLOW.value,
    )
    cases.append((routing, layout, choices))
  return cases


def parse_world(world: str) -> tuple[int, int]:
  """Returns the processes and the devices of each, given "4x1"."""
  try:
    processes, devices = map(int, world.split("x"))
  except ValueError:
    raise ValueError(f"--worlds: {world!r} is none; write 4x1.") from None
  return processes, devices


def user_path(path: str) -> pathlib.Path:
  """Returns a path relative to the user's folder; `bazel run` changes it."""
  return pathlib.Path(os.environ.get("BUILD_WORKING_DIRECTORY", ""), path)


def _ops() -> list[str]:
  return _chosen(_OPS, list(OPS), ["round_trip"])


_GATE_CONTENDERS = ["host", contenders.HAND_WRITTEN]


def _chosen(flag, default, default_of_gate=None):
  """Returns a flag's value, or its default."""
  if flag.value is not None:
    return flag.value
  return default if _GATE.value is None else default_of_gate or default


def _silence_libraries() -> None:
  """Suppresses what XLA's transport between processes prints on stdout."""
  sys.stdout.flush()
  sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
  os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
  app.run(main)
