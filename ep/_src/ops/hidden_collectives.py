# SPDX-License-Identifier: Apache-2.0
"""Finds the collectives of a compiled program that are no exchange of ours."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import re

import jax

from ep._src.base.backend import OPS

# These are opcodes of HLO; an asynchronous collective counts by its start.
OPCODES = (
  "all-gather",
  "all-reduce",
  "all-to-all",
  "collective-broadcast",
  "collective-permute",
  "ragged-all-to-all",
  "recv",
  "reduce-scatter",
  "send",
)

_INSTRUCTION = re.compile(
  r"^\s*(?:ROOT )?%?(?P<name>\S+) = (?:\(.*?\)|\S+)"
  rf" (?P<opcode>{'|'.join(OPCODES)})(?:-start)?\(.*$",
  re.MULTILINE,
)

# A backend without custom calls names the scope of its collectives like the op.
_EXCHANGES = {
  *OPS,
  *("ep_assign", "ep_check", "ep_replicate", "ep_weighted_combine"),
}


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective instruction of a compiled program."""

  opcode: str  # like "all-reduce"
  name: str  # the instruction's, like "all-reduce.3"
  op_name: str  # the path of scopes and primitives that JAX gave it, or ""
  # The path of what the partitioner made it for, or the name of an argument.
  cause: str
  source: str  # of op_name or cause, like "model.py:12", or ""

  @property
  def scopes(self) -> set[str]:
    """The parts of `op_name`.

    "transpose(jvp(x))" counts as x, too, and "ep_prepare[moe]" as ep_prepare.
    """
    parts = re.split(r"[/()]+", self.op_name)
    names = [part.partition("[")[0] for part in parts]
    return {*self.op_name.split("/"), *parts, *names}


def assert_no_hidden_collectives(
  compiled: jax.stages.Compiled | str, allow: Sequence[str] = ()
) -> None:
  """Fails if a program has a collective that is no exchange of `ep`.

  The partitioner inserts collectives where shardings do not fit: a replicated
  array that should have been sharded costs an all-gather in each step, and
  nothing says so. In a test of a training step,

      compiled = jax.jit(step).lower(*args).compile()
      ep.assert_no_hidden_collectives(compiled, allow=["all-reduce"])

  Reads text, runs nothing, and is not collective.

  Args:
    compiled: what `jax.jit(f).lower(...).compile()` returns, or its
      `as_text()`.
    allow: the collectives that are intended, by any number of
      * opcodes: "all-gather", "all-reduce", "all-to-all",
        "collective-broadcast", "collective-permute", "ragged-all-to-all",
        "recv", "reduce-scatter", "send";
      * names of a scope in the path of the collective, such as "grad_sync" for
        those under `jax.named_scope("grad_sync")`. (XLA may merge two
        all-reduces into one, which has the path of either.)

  Raises:
    AssertionError: there are others; the message gives opcode, path and source
      line of each. The partitioner's have those of what they work on.
    TypeError: `compiled` is not a compiled program.
  """
  hidden = [
    c
    for c in collectives(compiled)
    if c.opcode not in allow and c.scopes.isdisjoint(allow)
  ]
  if hidden:
    raise AssertionError(
      "the program has collectives besides the exchanges of ep:"
      + "".join(
        f"\n  {c.opcode} %{c.name}, "
        f"{c.op_name or f'made by the partitioner for {c.cause}'},"
        f" {c.source or 'no source line'}"
        for c in hidden
      )
      + "\nCheck the shardings of what they work on, or pass in `allow` the"
      " opcodes, or scopes, of those that are meant."
    )


def collectives(compiled: jax.stages.Compiled | str) -> list[Collective]:
  """Returns the collectives that are no exchange of ours, in program order."""
  hlo = as_text("assert_no_hidden_collectives", compiled)
  sources = _Sources(hlo)
  instructions = dict(re.findall(r"^\s*(?:ROOT )?%?(\S+) = (.*)$", hlo, re.M))
  found = []
  for match in _INSTRUCTION.finditer(hlo):
    line = match[0]
    if "is_host_transfer=true" in line:
      continue
    named = _with_metadata(line, instructions)
    collective = Collective(
      opcode=match["opcode"],
      name=match["name"],
      op_name=op_name(line),
      cause=op_name(named) or "a value without a name",
      source=sources.of(named),
    )
    if collective.scopes.isdisjoint(_EXCHANGES):
      found.append(collective)
  return found


def op_name(instruction: str) -> str:
  """Returns the path of scopes that a line of HLO names, or an empty text."""
  found = re.search(r'op_name="([^"]*)"', instruction)
  return found[1] if found else ""


def _with_metadata(instruction: str, instructions: dict[str, str]) -> str:
  """Returns the instruction, or the nearest that it works on, with a name."""
  while not op_name(instruction):
    operand = re.search(r"[\w-]+\(%([^\s,)]+)", instruction)
    if not operand or operand[1] not in instructions:
      break
    instruction = instructions[operand[1]]
  return instruction


def as_text(function: str, compiled: object) -> str:
  """Returns the HLO of a compiled program; `function` is for the error."""
  if isinstance(compiled, jax.stages.Compiled):
    compiled = compiled.as_text()
  if not isinstance(compiled, str) or not compiled.startswith("HloModule"):
    what = "text" if isinstance(compiled, str) else type(compiled).__name__
    raise TypeError(
      f"{function}: compiled is a {what} that is not a compiled program; pass"
      " jax.jit(f).lower(...).compile(). Before compilation there are no"
      " partitioner's collectives to be seen."
    )
  return compiled


class _Sources:
  """Finds the source lines of instructions.

  A line is in the instruction itself or, in newer versions of XLA, in tables at
  the top of the module: a stack frame has a location, which has a file.
  """

  def __init__(self, hlo: str):
    self._files = dict(
      re.findall(r'^(\d+) "(.*)"$', _table(hlo, "FileNames"), re.M)
    )
    self._locations = {
      at: (file, line)
      for at, file, line in re.findall(
        r"^(\d+) \{file_name_id=(\d+).*? line=(\d+)",
        _table(hlo, "FileLocations"),
        re.M,
      )
    }
    self._frames = dict(
      re.findall(
        r"^(\d+) \{file_location_id=(\d+)", _table(hlo, "StackFrames"), re.M
      )
    )

  def of(self, instruction: str) -> str:
    """Returns "file:line" of an instruction, or "" if it is unknown."""
    if at := re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction):
      return f"{at[1]}:{at[2]}"
    frame = re.search(r"stack_frame_id=(\d+)", instruction)
    location = self._frames.get(frame[1]) if frame else None
    file, line = self._locations.get(location, ("", ""))
    return f"{self._files[file]}:{line}" if file in self._files else ""


def _table(hlo: str, title: str) -> str:
  """Returns the lines below `title` in the head of a module."""
  table = re.search(rf"^{title}\n((?:\d+ .*\n)*)", hlo, re.M)
  return table[1] if table else ""
