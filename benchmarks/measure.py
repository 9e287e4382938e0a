# SPDX-License-Identifier: Apache-2.0
"""Measures one case: checks every contender's ops, then times them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import contextlib
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

from benchmarks import contenders, copies, memory, timing
from benchmarks.ops import ALL, compile_op, with_handle
from benchmarks.oracle import Oracle, WrongResult
from benchmarks.workload import Workload


def measure(
  mesh: jax.sharding.Mesh,
  workload: Workload,
  *,
  names: Sequence[str],
  ops: Sequence[str],
  rounds: int,
  warmup: int,
  clock: str = "wall",
) -> list[dict[str, Any]]:
  """Returns a record for each op and contender. Collective.

  A record has the op, the contender, its seconds in each round, and bytes of
  memory, summed over processes: the peak, and what XLA has planned for
  temporaries. They are None if not known.

  Raises:
    WrongResult: on the process of a rank where a contender is wrong.
  """
  runs = {op: {} for op in ops}
  memories = {op: {} for op in ops}
  shared = workload.inputs(
    mesh, {"topk_idx"}.union(*(ALL[op].inputs for op in ops))
  )
  with contextlib.ExitStack() as stack:

    def make(name):
      return stack.enter_context(
        contenders.make(name, mesh, workload.layout, workload.dtype)
      )

    oracle = Oracle(mesh, workload, make("xla"), shared, ops)
    for name in names:
      mine = contenders.ops_of(name, ops)
      if name == contenders.MEMCPY or not mine:
        continue
      meter = memory.Meter()
      contender = make(name)
      inputs = with_handle(contender, mesh, shared, mine)
      for op in mine:
        program, args = compile_op(op, contender, mesh, inputs)
        planned = program.lower(*args).compile().memory_analysis()
        meter.start()
        outputs = jax.block_until_ready(program(*args))
        memories[op][name] = {
          "peak_bytes": meter.peak_bytes(),
          # XLA plans for one device.
          "planned_bytes": planned.temp_size_in_bytes * mesh.local_mesh.size,
        }
        if op != "prepare":  # checked through the ops that use its handle
          try:
            oracle.check(op, outputs, exact=contender.exact)
          except WrongResult as error:
            raise WrongResult(f"{name}: {error}") from None
        del outputs
        runs[op][name] = _run(program, args)
    records = []
    for op in ops:
      if contenders.MEMCPY in names and ALL[op].directions:
        runs[op][contenders.MEMCPY] = copies.make(
          workload, mesh, ALL[op].directions
        )
      if not runs[op]:
        continue  # not every contender has every op
      times = timing.take_turns(
        runs[op], mesh, rounds=rounds, warmup=warmup, clock=clock
      )
      runs[op].clear()
      for name, seconds in times.items():
        memory_of = memories[op].get(name, {})
        records.append(
          {
            "op": op,
            "contender": name,
            "seconds": [float(s) for s in seconds],
            **{
              key: _sum_over_processes(memory_of.get(key))
              for key in ("peak_bytes", "planned_bytes")
            },
          }
        )
    return records


def _run(program, args) -> Callable[[], Any]:
  return lambda: jax.block_until_ready(program(*args))


def _sum_over_processes(number: float | None) -> float | None:
  """Returns the sum, or None if a process has no number or NaN."""
  number = np.float32(np.nan if number is None else number)
  total = float(np.sum(multihost_utils.process_allgather(number)))
  return None if np.isnan(total) else total
