# SPDX-License-Identifier: Apache-2.0
"""Measures one case: checks every contender's ops, then times them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import contextlib
import functools
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

from benchmarks import contenders, copies, memory, nccl_ep, timing
from benchmarks.ops import ALL
from benchmarks.oracle import Oracle, WrongResult
from benchmarks.workload import SPEC, Workload


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
  oracle = Oracle(workload)
  runs = {op: {} for op in ops}
  memories = {op: {} for op in ops}
  shared = workload.inputs(
    mesh, {"topk_idx"}.union(*(ALL[op].inputs for op in ops))
  )
  with contextlib.ExitStack() as stack:
    for name in names:
      mine = contenders.ops_of(name, ops)
      if name == contenders.MEMCPY or not mine:
        continue
      if name == contenders.NCCL_EP:
        make = stack.enter_context(nccl_ep.connect(mesh, workload, shared))
        bare = Oracle(workload, bare=True)
        for op in mine:
          runs[op][name] = make(op)
          _check(bare, name, op, runs[op][name](), exact=False)
        continue
      meter = memory.Meter()
      contender = stack.enter_context(
        contenders.make(name, mesh, workload.layout, workload.dtype)
      )
      inputs = dict(shared)
      if any("handle" in ALL[op].inputs for op in mine):
        prepare, args = compile_op("prepare", contender, mesh, inputs)
        inputs["handle"] = prepare(*args)
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
          _check(oracle, name, op, outputs, exact=contender.exact)
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


def compile_op(op: str, contender, mesh, inputs):
  """Returns an op, jitted and compiled, and its arguments among the inputs.

  A first call compiles it, because JAX takes longer to call a program that was
  compiled ahead of time.
  """
  args = [inputs[name] for name in ALL[op].inputs]
  program = jax.jit(
    jax.shard_map(
      functools.partial(ALL[op].run, contender),
      mesh=mesh,
      in_specs=SPEC,
      out_specs=SPEC,
      check_vma=False,
    )
  )
  jax.block_until_ready(program(*args))
  return program, args


def _check(oracle: Oracle, name: str, op: str, outputs, *, exact: bool) -> None:
  try:
    oracle.check(op, outputs, exact=exact)
  except WrongResult as error:
    raise WrongResult(f"{name}: {error}") from None


def _run(program, args) -> Callable[[], Any]:
  return lambda: jax.block_until_ready(program(*args))


def _sum_over_processes(number: float | None) -> float | None:
  """Returns the sum, or None if a process has no number or NaN."""
  number = np.float32(np.nan if number is None else number)
  total = float(np.sum(multihost_utils.process_allgather(number)))
  return None if np.isnan(total) else total
