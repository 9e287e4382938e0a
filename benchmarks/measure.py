# SPDX-License-Identifier: Apache-2.0
"""Checks the results of every contender's ops, then times the ops."""

from __future__ import annotations

from collections.abc import Sequence
import contextlib

import jax
from jax.experimental import multihost_utils
import numpy as np

from benchmarks import contenders, memory, timing
from benchmarks.ops import ALL, compile_op, with_handle
from benchmarks.report import Result
from benchmarks.workload import Workload

# The largest allowed error, relative to the largest value of the array.
_BOUNDS = {"float32": 2e-5, "bfloat16": 5e-2, "float16": 1e-2}


class WrongResult(Exception):
  """Raised if a contender's result is wrong."""


def measure(
  mesh: jax.sharding.Mesh,
  workload: Workload,
  *,
  names: Sequence[str],
  ops: Sequence[str],
  rounds: int,
) -> dict[str, dict[str, Result]]:
  """Checks and times ops; returns results by op and contender. Collective.

  The result of every op must be close to the result of `backend="xla"`. Tests
  check that backend against the numeric contract (ep/_src/ops/reference.py).

  Raises:
    WrongResult: on the process of a rank with a wrong result.
  """
  runs = {op: {} for op in ops}
  memories = {}
  shared = workload.inputs(
    mesh, {"topk_idx"}.union(*(ALL[op].inputs for op in ops))
  )
  with contextlib.ExitStack() as stack:

    def make(name):
      contender = stack.enter_context(
        contenders.make(name, mesh, workload.layout, workload.dtype)
      )
      mine = contenders.ops_of(name, ops)
      return contender, mine, with_handle(contender, mesh, shared, mine)

    xla, _, inputs = make("xla")
    expected = {}
    for op in ops:
      program, args = compile_op(op, xla, mesh, inputs)
      expected[op] = program(*args)
    for name in names:
      meter = memory.Meter()
      contender, mine, inputs = make(name)
      for op in mine:
        program, args = compile_op(op, contender, mesh, inputs)
        planned = program.lower(*args).compile().memory_analysis()
        meter.start()
        outputs = jax.block_until_ready(program(*args))
        memories[op, name] = _sum_over_processes(
          meter.peak_bytes(),
          # XLA plans the memory of one device.
          planned.temp_size_in_bytes * mesh.local_mesh.size,
        )
        if op != "prepare":  # contenders' handles differ
          _check(f"{name}: {op}", workload, op, outputs, expected[op])
        del outputs
        runs[op][name] = lambda program=program, args=args: (
          jax.block_until_ready(program(*args))
        )
    del expected
    return {
      op: {
        name: Result(seconds, *memories[op, name])
        for name, seconds in timing.take_turns(runs[op], rounds).items()
      }
      for op in ops
      if runs[op]  # at least one contender has the op
    }


def _check(what, workload, op, outputs, expected) -> None:
  """Raises `WrongResult` if an output shard of this process is wrong."""
  has_tail = op in ("dispatch", "combine_bwd")
  bound = _BOUNDS[workload.dtype.name]
  for arrays in zip(*map(jax.tree.leaves, (outputs, expected)), strict=True):
    for shards in zip(*(x.addressable_shards for x in arrays), strict=True):
      got, want = (np.asarray(shard.data) for shard in shards)
      if got.shape != want.shape or got.dtype != want.dtype:
        raise WrongResult(
          f"{what}: {got.dtype}{list(got.shape)}, but {want.dtype}"
          f"{list(want.shape)} is expected"
        )
      rank = (shards[1].index[0].start or 0) // len(want)
      if has_tail and not workload.layout.zero_tail:
        size = workload.received[rank]
        got, want = got[:size], want[:size]
      got, want = got.astype(np.float64), want.astype(np.float64)
      most = bound * abs(want).max(initial=0)
      wrong = ~(abs(got - want) <= most)  # NaN is also wrong
      if wrong.any():
        raise WrongResult(
          f"{what} on rank {rank}: {wrong.sum()} of {wrong.size} values are"
          " wrong"
        )


def _sum_over_processes(*numbers: float) -> np.ndarray:
  every = multihost_utils.process_allgather(np.asarray(numbers, np.float32))
  return every.reshape(-1, len(numbers)).sum(axis=0)
