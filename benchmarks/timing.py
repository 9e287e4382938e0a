# SPDX-License-Identifier: Apache-2.0
"""Starts a benchmark's ranks, and times functions in interleaved rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import inspect
import random
import sys
import time
from typing import Any

from absl import app, flags, logging
import jax
from jax.experimental import multihost_utils
import numpy as np

from ep import launch

ROUNDS = flags.DEFINE_integer("rounds", 20, "runs that are timed", 1)
_WARMUP = 2


def make_main(
  measure: Callable[[], int | None],
  worlds: Callable[[], Iterable[dict[str, Any]]],
) -> Callable:
  """Returns a `main` that calls `measure` on all ranks of each process layout.

  `measure` returns the exit code. A nonzero code terminates the program.
  `worlds` yields the keyword arguments of `ep.launch.launch` per layout.
  """

  def main(argv):
    if len(argv) > 1:
      raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    if launch.inside_launcher():
      launch.initialize()
      return measure()
    program = [inspect.getfile(measure), *sys.argv[1:]]
    codes = (launch.launch(program, **world) for world in worlds())
    return next(filter(None, codes), 0)

  return main


def take_turns(
  runs: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, np.ndarray]:
  """Returns each function's seconds in each round, on the slowest process.

  A round runs each function once, in random order, so that other work on the
  machine affects all functions equally. Each run starts on all processes at the
  same time. Warm-up rounds do not count. Collective.
  """
  draw = random.Random(0)  # the same order on all processes
  names = list(runs)
  times = np.zeros((len(names), rounds), np.float32)
  for round in range(-_WARMUP, rounds):
    for at in draw.sample(range(len(names)), len(names)):
      if jax.process_count() > 1:
        multihost_utils.sync_global_devices("turn")
      start = time.perf_counter()
      result = runs[names[at]]()
      seconds = time.perf_counter() - start
      del result  # frees the result outside of the timing
      if round >= 0:
        times[at, round] = seconds
  times = multihost_utils.process_allgather(times).reshape(-1, *times.shape)
  return dict(zip(names, times.max(axis=0), strict=True))


def ratio(slow: np.ndarray, fast: np.ndarray) -> float:
  """Returns the median over the rounds of `slow / fast`.

  Each round runs both functions, so other work that lasts longer than a round
  does not affect the ratio.
  """
  return float(np.median(slow / fast))
