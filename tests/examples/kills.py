# SPDX-License-Identifier: Apache-2.0
"""Trains with ranks that fail, and compares the losses with a calm run.

    PYTHONPATH=.:examples:tests python tests/examples/kills.py 20

runs train_moe_lm on four ranks with 20 failures, and prints a table. The
failures are planned: in the attempt that follows restart k, one or two ranks
fail in a given step, by one of `CAUSES`. The model has two layers: XLA inlines
a single one, and then rounds differently for other numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import resource
import signal
import subprocess
import sys

import programs

SNAPSHOT_EVERY = 3
_PLAN = "EP_TEST_FAILURES"
_FLAGS = (
  "--dp=1 --ep=4 --num_processes=4 --warmup=5 --batch=8 --length=16 --layers=2"
  f" --hidden=32 --inner=16 --num_experts=4 --snapshot_every={SNAPSHOT_EVERY}"
  " --timeout_s=40"
)


def _kill() -> None:
  os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
  os.kill(os.getpid(), signal.SIGSTOP)


def _run_out_of_memory() -> None:
  resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))
  bytearray(1 << 30)


def _kill_with_coordinator() -> None:
  """Kills this rank and the process of JAX's coordination service."""
  children = pathlib.Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children")
  for child in map(int, children.read_text().split()):
    with contextlib.suppress(OSError):
      command = pathlib.Path(f"/proc/{child}/cmdline").read_bytes()
      if b"_coordinator.py" in command:
        os.kill(child, signal.SIGKILL)
  _kill()


def _kill_in_snapshot() -> None:
  """Kills this rank when it has written half of the next snapshot."""
  from ep._tools.snapshots import memory

  write = memory._pwrite_all

  def half(fd, data, position):
    write(fd, data[: data.nbytes // 2], position)
    _kill()

  memory._pwrite_all = half


CAUSES = {
  "killed": _kill,
  "in a snapshot": _kill_in_snapshot,
  "stopped": _stop,
  "out of memory": _run_out_of_memory,
  "two killed": _kill,
  "with the coordinator": _kill_with_coordinator,
}


@dataclasses.dataclass(frozen=True)
class Failure:
  step: int
  cause: str
  place: float  # 0 stands for the first rank, and 1 for none

  def ranks(self, count: int) -> set[int]:
    if self.cause == "with the coordinator":
      return {0}
    first = int(self.place * count)
    return {first, (first + 1) % count} if "two" in self.cause else {first}


def plan(
  count: int, causes: Sequence[str] = (*CAUSES,), seed: int = 0
) -> list[Failure]:
  """Returns failures at random steps, with each cause equally often."""
  draw = random.Random(seed)
  step, failures = 0, []
  for at in range(count):
    step += draw.randint(2, 6)
    failures.append(Failure(step, causes[at % len(causes)], draw.random()))
  return failures


@dataclasses.dataclass(frozen=True)
class Run:
  """The exit code and output of a run, and the metrics of each step."""

  code: int
  output: str
  records: list[Mapping[str, object]]

  @property
  def restarts(self) -> list[tuple[str, int, float, int]]:
    """The cause, the ranks, the seconds and the first step of each restart."""
    found = re.findall(
      r"restart \d+ of \d+, because (.*): (\d+) ranks joined (\S+) s later"
      r"(?:, with a snapshot of step (\d+))?",
      self.output,
    )
    return [
      (why, int(ranks), float(seconds), int(step or 0))
      for why, ranks, seconds, step in found
    ]


def train(
  out: pathlib.Path, steps: int, failures: list[Failure], *more: str
) -> Run:
  """Trains in the folder `out`; one restart is allowed for each failure."""
  fields = [dataclasses.astuple(each) for each in failures]
  done = subprocess.run(
    [
      *(sys.executable, __file__, "train", *_FLAGS.split()),
      *(f"--text={__file__}", f"--out={out}", f"--steps={steps}"),
      *(f"--max_restarts={len(failures)}", *more),
    ],
    env=programs.environment(**{_PLAN: json.dumps(fields)}),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    errors="replace",
  )
  lines = (out / "metrics.jsonl").read_text().splitlines()
  return Run(done.returncode, done.stdout, [*map(json.loads, lines)])


def _train() -> None:
  """Runs train_moe_lm in this process, which fails if the plan says so."""
  from absl import app

  from ep import launch
  import train_moe_lm

  failures = [Failure(*fields) for fields in json.loads(os.environ[_PLAN])]
  at = int(os.environ.get("EP_LAUNCH_RESTART", "0"))
  if launch.inside_launcher() and at < len(failures):
    failure = failures[at]
    rank, count = (
      int(os.environ[f"JAX_{name}"]) for name in ("PROCESS_ID", "NUM_PROCESSES")
    )
    step = train_moe_lm.Step.__call__

    def fail(self, state, batch):
      if int(state.step) + 1 == failure.step and rank in failure.ranks(count):
        CAUSES[failure.cause]()
      return step(self, state, batch)

    train_moe_lm.Step.__call__ = fail
  train_moe_lm.__file__ = __file__  # the launcher starts this file
  sys.argv[1:2] = []
  if not launch.inside_launcher():
    original = launch.launch
    launch.launch = lambda argv, **options: original(
      [argv[0], "train", *argv[1:]], **options
    )
  app.run(train_moe_lm.main)


def compare(
  folder: pathlib.Path, failures: list[Failure], min_processes: int = 2
) -> Run:
  """Returns the run with failures, after its losses equal a calm run's."""
  steps = failures[-1].step + 2 * SNAPSHOT_EVERY
  fewest = f"--min_processes={min_processes}"
  run = train(folder / "failing", steps, failures, fewest)
  calm = train(folder / "calm", steps, [])
  assert run.code == 0, run.output
  assert calm.code == 0, calm.output
  for found, want in zip(run.records, calm.records, strict=True):
    assert found == want
  assert len(run.records) == steps
  assert len(run.restarts) == len(failures), run.output
  return run


def main(count: str) -> None:
  import tempfile

  failures = plan(int(count))
  with tempfile.TemporaryDirectory() as folder:
    run = compare(pathlib.Path(folder), failures)
  print("step | cause | restarts because | ranks | s | from snapshot")
  for failure, (why, ranks, seconds, step) in zip(
    failures, run.restarts, strict=True
  ):
    print(failure.step, failure.cause, why, ranks, seconds, step, sep=" | ")


if __name__ == "__main__":
  main(sys.argv[1]) if sys.argv[1:2] != ["train"] else _train()
