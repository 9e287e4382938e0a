# SPDX-License-Identifier: Apache-2.0
"""Starts the benchmarks of one process with four devices; has common flags."""

from __future__ import annotations

from collections.abc import Callable
import sys

from absl import app, flags

from benchmarks import timing
from ep import launch

DEVICES = 4
ROUNDS = flags.DEFINE_integer("rounds", 20, "runs that are timed", 1)
CLOCK = flags.DEFINE_enum(
  "clock",
  "wall",
  list(timing.CLOCKS),
  "wall time, or CPU time of all threads of a process",
)


def run(measure: Callable[[], int | None]) -> None:
  """Calls `measure`, which returns the exit code, in a process of its own."""

  def main(argv):
    if len(argv) > 1:
      raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if not launch.inside_launcher():
      return launch.launch(
        sys.argv, num_processes=1, devices_per_process=DEVICES
      )
    launch.initialize()
    return measure()

  app.run(main)
