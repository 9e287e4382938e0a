# SPDX-License-Identifier: Apache-2.0
"""Times functions that take turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import random
import time

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np

from benchmarks.workload import SPEC

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def take_turns(
  runs: Mapping[str, Callable[[], object]],
  mesh: jax.sharding.Mesh,
  *,
  rounds: int,
  warmup: int,
  clock: str = "wall",
) -> dict[str, np.ndarray]:
  """Returns each function's seconds in each round, on the slowest process.

  A round is one run of each function, in a random order, so that other work on
  the machine affects all of them alike. Every run starts on all processes at
  once. Rounds of warm-up do not count. The clock is among `CLOCKS`: "cpu" adds
  the time of all threads of a process, which other work hardly affects.
  Collective.
  """
  clock = CLOCKS[clock]
  barrier = _make_barrier(mesh)
  draw = random.Random(0)  # the same order on all processes
  names = list(runs)
  times = np.zeros((len(names), rounds), np.float32)
  for round in range(-warmup, rounds):
    for at in draw.sample(range(len(names)), len(names)):
      barrier()
      start = clock()
      result = runs[names[at]]()
      seconds = clock() - start
      del result  # the time to free it does not count
      if round >= 0:
        times[at, round] = seconds
  times = multihost_utils.process_allgather(times).reshape(-1, *times.shape)
  return dict(zip(names, times.max(axis=0), strict=True))


def _make_barrier(mesh: jax.sharding.Mesh) -> Callable[[], None]:
  if jax.process_count() == 1:
    return lambda: None
  ones = jax.make_array_from_callback(
    (mesh.size,), NamedSharding(mesh, SPEC), lambda _: np.ones(1, np.float32)
  )
  total = jax.jit(jnp.sum).lower(ones).compile()
  return lambda: total(ones).block_until_ready()
