# SPDX-License-Identifier: Apache-2.0
"""Checks the results of every contender's ops, then measures the ops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import ctypes
import functools
import gc
import pathlib
from typing import NamedTuple

import jax
from jax.experimental import multihost_utils
import numpy as np

from benchmarks import contenders, timing
from benchmarks.contenders import OPS
from benchmarks.workload import SPEC, Workload

# The largest allowed error, relative to the largest value of the array.
_BOUNDS = {"float32": 2e-5, "bfloat16": 5e-2, "float16": 1e-2}


class Result(NamedTuple):
  """The measurements of one contender.

  Attributes:
    seconds: time of each round.
    peak_bytes: resident memory that the op adds, over all processes; or NaN.
    planned_bytes: XLA's temporaries, over all processes.
  """

  seconds: np.ndarray
  peak_bytes: float
  planned_bytes: float


def programs(contender, mesh, inputs, ops: Sequence[str]) -> Iterator:
  """Yields ops, their compiled programs, and the programs' arguments.

  A first call compiles a program, because JAX takes longer to call programs
  that were compiled ahead of time. No op donates an input: only the output of a
  round trip could reuse the memory of an input, and a round trip would first
  have to copy its tokens.
  """

  def compiled(op):
    run = functools.partial(OPS[op].run, contender)
    program = jax.jit(
      jax.shard_map(
        run, mesh=mesh, in_specs=SPEC, out_specs=SPEC, check_vma=False
      )
    )
    args = [inputs[name] for name in OPS[op].inputs]
    jax.block_until_ready(program(*args))
    return program, args

  if any("handle" in OPS[op].inputs for op in ops):
    prepare, args = compiled("prepare")
    inputs = inputs | {"handle": prepare(*args)}
  for op in ops:
    yield op, *compiled(op)


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
    AssertionError: on the process of a rank with a wrong result.
  """
  runs = {op: {} for op in ops}
  memories = {}
  inputs = workload.inputs(
    mesh, {"topk_idx"}.union(*(OPS[op].inputs for op in ops))
  )
  with contextlib.ExitStack() as stack:

    def of(name):
      contender = stack.enter_context(
        contenders.make(name, mesh, workload.layout, workload.dtype)
      )
      return programs(contender, mesh, inputs, contenders.ops_of(name, ops))

    expected = {op: program(*args) for op, program, args in of("xla")}
    for name in names:
      meter = _Meter()
      for op, program, args in of(name):
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
  """Fails if an output shard of this process is wrong."""
  has_tail = op in ("dispatch", "combine_bwd")
  bound = _BOUNDS[workload.dtype.name]
  for arrays in zip(*map(jax.tree.leaves, (outputs, expected)), strict=True):
    for shards in zip(*(x.addressable_shards for x in arrays), strict=True):
      got, want = (np.asarray(shard.data) for shard in shards)
      assert got.dtype == want.dtype, what
      rank = (shards[1].index[0].start or 0) // len(want)
      if has_tail and not workload.layout.zero_tail:
        size = workload.received[rank]
        got, want = got[:size], want[:size]
      got, want = got.astype(np.float64), want.astype(np.float64)
      np.testing.assert_allclose(
        got,
        want,
        rtol=0,
        atol=bound * abs(want).max(initial=0),
        err_msg=f"{what} on rank {rank}",
        equal_nan=False,
      )


def _sum_over_processes(*numbers: float) -> np.ndarray:
  every = multihost_utils.process_allgather(np.asarray(numbers, np.float32))
  return every.reshape(-1, len(numbers)).sum(axis=0)


class _Meter:
  """A meter of the resident memory that a contender adds (Linux).

  The meter counts outputs and temporaries, but not inputs and programs. Shared
  memory from after `__init__` counts in every run, and in each process that
  touched it, because a communicator keeps its shared memory.
  """

  def __init__(self):
    self._shared = _kib("RssShmem")

  def start(self) -> None:
    """Resets the peak."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or freed memory would be reused
    try:
      pathlib.Path("/proc/self/clear_refs").write_text("5")  # see proc(5)
    except OSError:
      self._before = None
      return
    self._before = _kib("VmRSS") - (_kib("RssShmem") - self._shared)

  def peak_bytes(self) -> float:
    """Returns the peak since `start`, or NaN if peaks cannot be reset."""
    if self._before is None:
      return float("nan")
    return 1024.0 * max(0, _kib("VmHWM") - self._before)


def _kib(field: str) -> int:
  status = pathlib.Path("/proc/self/status").read_text()
  return int(status.partition(f"{field}:")[2].split()[0])
