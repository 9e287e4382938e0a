# SPDX-License-Identifier: Apache-2.0
"""Checks the result of every op, which must be the result of backend="xla".

Tests hold this backend to the numeric contract (ep/_src/ops/reference.py).
"""

from __future__ import annotations

import functools

import jax
import numpy as np

from benchmarks.ops import ALL, compile_op, LAYERS, with_handle
from benchmarks.workload import Workload
from ep._tools.records import expert_loads

# A sum may deviate by at most this share of the largest value of its array.
BOUNDS = {"float32": 2e-5, "bfloat16": 5e-2, "float16": 1e-2}


class WrongResult(Exception):
  """A contender's result is not the expected one."""


class Oracle:
  """Computes the ops of the inputs by `xla`, a contender. Collective."""

  def __init__(self, mesh, workload: Workload, xla, inputs, ops):
    self._layout = layout = workload.layout
    self._bound = BOUNDS[workload.dtype.name]
    self._inputs = with_handle(xla, mesh, inputs, ops)
    self._compiled = functools.cache(
      lambda op: compile_op(op, xla, mesh, self._inputs)[0]
    )
    loads = expert_loads.choices(
      "Oracle", workload.choices, layout.shape.num_experts, layout.ranks
    )
    self._received = expert_loads.received(loads, layout.ranks).sum(axis=1)

  def check(self, op: str, outputs, *, exact: bool) -> None:
    """Raises `WrongResult` unless this process's shards are right.

    They must have the expected bits if `exact`. Otherwise, and in whole layers,
    they may deviate by `BOUNDS`.
    """
    inputs = (self._inputs[name] for name in ALL[op].inputs)
    expected = self._compiled(op)(*inputs)
    has_tail = op in ("dispatch", "combine_bwd")
    skips_tail = has_tail and not self._layout.zero_tail
    bound = 0 if exact and op not in LAYERS else self._bound
    for arrays in zip(*map(jax.tree.leaves, (outputs, expected)), strict=True):
      for shards in zip(*(x.addressable_shards for x in arrays), strict=True):
        got, want = (np.asarray(shard.data) for shard in shards)
        rank = (shards[1].index[0].start or 0) // len(want)
        size = self._received[rank] if skips_tail else len(want)
        try:
          _compare(got[:size], want[:size], bound)
        except WrongResult as error:
          raise WrongResult(f"{op} on rank {rank}: {error}") from None


def _compare(got: np.ndarray, want: np.ndarray, bound: float) -> None:
  if got.shape != want.shape or got.dtype != want.dtype:
    raise WrongResult(
      f"{got.dtype}{list(got.shape)}, but {want.dtype}{list(want.shape)} is"
      " expected"
    )
  unsigned = f"u{got.dtype.itemsize}"
  wrong = got.view(unsigned) != want.view(unsigned)
  if bound and wrong.any():
    most = bound * abs(want.astype(np.float64)).max()
    error = abs(got.astype(np.float64) - want)
    wrong = ~(error <= most)  # NaN is wrong, too
  if wrong.any():
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    raise WrongResult(
      f"{wrong.sum()} of {wrong.size} values are wrong; the first is at"
      f" {list(at)}: {got[at]}, expected {want[at]}"
    )
