# SPDX-License-Identifier: Apache-2.0
"""Measures how long a scanned model with MoE layers takes to compile.

    bazel run //benchmarks:compile_time -- --layers=8

The program is that of scanned_model.py, traced, lowered and compiled for four
devices of one process. It never runs. The models, on backends of ep and with
dense networks of the same active size, take turns, each with empty caches.
"""

from __future__ import annotations

import contextlib
import sys

from absl import app, flags
import jax
from jax.sharding import AxisType
import numpy as np

from benchmarks import report, scanned_model, timing
from benchmarks.workload import AXIS
from ep import launch

_LAYERS = flags.DEFINE_integer("layers", 8, "that are scanned", 1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "compilations that are timed", 1)
_CLOCK = flags.DEFINE_enum(
  "clock", "wall", list(timing.CLOCKS), "wall time, or CPU time of all threads"
)
_BACKENDS = ("host", "xla")


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
    ffns = {"dense": scanned_model.Dense()}
    for backend in _BACKENDS:
      group = stack.enter_context(scanned_model.bootstrap(mesh, backend))
      ffns[backend] = scanned_model.MoE(group)
    times = timing.take_turns(
      {name: _compiler(mesh, ffn) for name, ffn in ffns.items()},
      mesh,
      rounds=_ROUNDS.value,
      warmup=1,
      clock=_CLOCK.value,
    )
  print(f"{_LAYERS.value} layers, {_CLOCK.value} time, {_ROUNDS.value} rounds")
  records = {name: {"seconds": seconds} for name, seconds in times.items()}
  for name, record in records.items():
    ratio = report.ratio(record, records["dense"])
    median = np.median(record["seconds"])
    print(f"{name:8} {median:6.2f} s {ratio:6.2f} x dense")
  return 0


def _compiler(mesh, ffn):
  def compile_with_empty_caches():
    jax.clear_caches()
    return scanned_model.lower(mesh, ffn, _LAYERS.value).compile()

  return compile_with_empty_caches


if __name__ == "__main__":
  app.run(main)
