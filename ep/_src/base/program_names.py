# SPDX-License-Identifier: Apache-2.0
"""Names the programs of a group, equally on all processes."""

from __future__ import annotations

import collections
import itertools

from ep._src.base import compat


class ProgramNames:
  """Numbers the programs of a group in the order of their lowering.

  Ops of different ranks are matched by their program, among other things, and
  two programs may have the same text: `jax.jit` of equal functions. The number
  in the name makes their texts differ, and so the fingerprints that XLA derives
  from them. Thread-safe.
  """

  def __init__(self, group: str):
    self._group = group
    # Two threads may lower at a time: `next` of a count is one atomic step.
    self._count: collections.defaultdict[str, itertools.count[int]]
    self._count = collections.defaultdict(itertools.count)

  def name(self, ctx: compat.mlir.LoweringRuleContext) -> str:
    """Returns the name of the program being lowered, like "jit_step#0"."""
    return compat.module_note(ctx, self._group, lambda: self._next(ctx))

  def _next(self, ctx: compat.mlir.LoweringRuleContext) -> str:
    module = compat.module_name(ctx)
    return f"{module}#{next(self._count[module])}"
