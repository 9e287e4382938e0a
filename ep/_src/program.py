# SPDX-License-Identifier: Apache-2.0
"""Names for the programs of a group, equal on all processes."""

from __future__ import annotations

import collections
import itertools

from ep._src import compat


class ProgramNames:
  """Names the programs of a group, by order of lowering.

  Ops of different ranks meet by the program that they belong to, and two
  programs may have the same text: `jax.jit` of equal functions. The number in
  the name makes their texts differ, and so all that XLA derives from them.
  """

  def __init__(self, group: str):
    self._group = group
    # One step of the interpreter for each number: threads may lower at a time.
    self._count = collections.defaultdict(itertools.count)

  def name(self, ctx: compat.mlir.LoweringRuleContext) -> str:
    """The name of the program being lowered, like "jit_step#0"."""
    return compat.module_note(ctx, self._group, lambda: self._next(ctx))

  def _next(self, ctx: compat.mlir.LoweringRuleContext) -> str:
    module = compat.module_name(ctx)
    return f"{module}#{next(self._count[module])}"
