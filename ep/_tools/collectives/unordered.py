# SPDX-License-Identifier: Apache-2.0
"""Finds the collectives of a program that XLA:CPU may start in any order.

XLA:CPU matches the ranks' collectives by the order in which each rank starts
them. Collectives of one computation start in program order. A loop is one step
of this order, and the next step may start as soon as the loop's call returns.
Ops of ep return before they are done, and so does a loop around ops of ep: the
rest of the loop runs in another thread. A collective of the loop and a later
collective of the program then start in any order, which may differ between
ranks. Ranks exchange values of different collectives, and XLA terminates the
process if the sizes differ. The same holds for a branch with a collective after
an op of ep.

A loop with ops and collectives is safe if all later collectives need its
results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
import functools
import itertools
import re

import jax

from ep._src.base.backend import OPS
from ep._tools.collectives.hidden import (
  as_text,
  Instruction,
  instructions,
  OPCODES,
)

# The custom calls of ep's ops, whose handlers return before the ops are done.
_TARGET = re.compile(f'custom_call_target="(?:{"|".join(OPS)})"')


def assert_ordered_collectives(compiled: jax.stages.Compiled | str) -> None:
  """Fails if a loop with ops of `ep` lets XLA start collectives in any order.

  On CPUs, XLA runs a loop or a branch around ops of `ep` beside the rest of the
  program. If the loop has collectives of XLA, such as the all-reduce of a
  gradient, and a collective after the loop does not need the loop's results,
  ranks may start the two in different orders. The ranks then exchange the
  values of different collectives: results are wrong, or the process terminates.
  Call this in a test of a training step:

      compiled = jax.jit(step).lower(*args).compile()
      ep.assert_ordered_collectives(compiled)

  The function only reads the text of the program. Not collective. A program of
  backend "xla" always passes, since XLA orders all of its collectives.

  Args:
    compiled: the result of `jax.jit(f).lower(...).compile()`, or its
      `as_text()`.

  Raises:
    AssertionError: there are such collectives; the message names each with its
      loop, and the cure.
    TypeError: `compiled` is not a compiled program.
  """
  program = Program(as_text("assert_ordered_collectives", compiled))
  unordered = [
    f"\n  {collective} beside {loop}"
    for loop, collective in program.unordered()
  ]
  if unordered:
    raise AssertionError(
      "on CPUs, nothing orders these collectives and the collectives of a loop"
      f" around ops of ep:{''.join(unordered)}\nLet the later collective need a"
      " result of the loop, unroll the loop (lax.scan(..., unroll=True)), or"
      ' use ep_bootstrap(backend="xla").'
    )


class Program:
  """The computations of a program, with instructions in scheduled order."""

  def __init__(self, hlo: str):
    bodies = dict(
      re.findall(r"^(?:ENTRY )?%?(\S+) \(.*\{\n((?:  .*\n)*)", hlo, re.M)
    )
    self._computations = {
      computation: instructions(body) for computation, body in bodies.items()
    }
    self._runs = functools.cache(self._search)

  def loops(self) -> Iterable[Instruction]:
    """Yields the loops and branches that start collectives after ops of ep."""
    for computation in self._computations.values():
      yield from filter(self._is_loose, computation.values())

  def unordered(self) -> Iterable[tuple[Instruction, Instruction]]:
    """Yields (loop, later collective that does not need the loop's results)."""
    for computation in self._computations.values():
      every = [*computation.values()]
      for i, loop in enumerate(every):
        if not self._is_loose(loop):
          continue
        needing = {loop.name}
        for x in every[i + 1 :]:
          if not needing.isdisjoint(x.uses):
            needing.add(x.name)
          elif self._runs(x, _is_collective):
            yield loop, x

  def _is_loose(self, x: Instruction) -> bool:
    """Returns whether `x` may start a collective after `x` has returned."""
    if x.opcode == "while":
      return self._runs(x, _is_op) and self._runs(x, _is_collective)
    return any(map(self._starts_late, self._called(x)))

  def _starts_late(self, computation: str) -> bool:
    is_late = False
    for x in self._computations[computation].values():
      if (is_late and self._runs(x, _is_collective)) or self._is_loose(x):
        return True
      is_late |= self._runs(x, _is_op)
    return False

  def _search(
    self, x: Instruction, is_kind: Callable[[Instruction], bool]
  ) -> bool:
    """Returns whether `is_kind` holds for `x` or a callee of `x`."""
    called = (self._computations[c].values() for c in self._called(x))
    every = itertools.chain.from_iterable(called)
    return is_kind(x) or any(self._runs(y, is_kind) for y in every)

  def _called(self, x: Instruction) -> Iterable[str]:
    return filter(self._computations.__contains__, x.uses)


def _is_op(x: Instruction) -> bool:
  return bool(_TARGET.search(x.line))


def _is_collective(x: Instruction) -> bool:
  return x.opcode in OPCODES
