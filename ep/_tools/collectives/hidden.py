# SPDX-License-Identifier: Apache-2.0
"""Finds the collectives of a compiled program besides the exchanges of `ep`."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import re

import jax

from ep._src.base import arguments
from ep._src.base.backend import OPS

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

# Name and opcode of an instruction, after its shape.
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?(\S+) = .*? ([a-z][a-z0-9-]*)\(")

# Scopes of ep's own collectives: backend "xla" names a scope after each op.
_EXCHANGES = {
  *OPS,
  *("ep_assign", "ep_check", "ep_reshard", "ep_weighted_combine"),
}


@dataclasses.dataclass(frozen=True)
class Instruction:
  """An HLO instruction."""

  name: str  # like "all-reduce.3"
  opcode: str  # like "all-reduce"; -start is cut off, -done is not
  line: str
  uses: tuple[str, ...]  # operands, and computations that it calls

  def __str__(self) -> str:
    return f"{self.opcode} {self.op_name}"

  @property
  def op_name(self) -> str:
    """The path of scopes and primitives that JAX gave it, or ""."""
    found = re.search(r'op_name="([^"]*)"', self.line)
    return found[1] if found else ""

  @property
  def scopes(self) -> set[str]:
    """The components of the path `op_name`.

    "transpose(jvp(x))" also counts as x, and "ep_prepare[moe]" as ep_prepare.
    """
    parts = re.split(r"[/()]+", self.op_name)
    names = [part.partition("[")[0] for part in parts]
    return {*self.op_name.split("/"), *parts, *names}


def assert_no_hidden_collectives(
  compiled: jax.stages.Compiled | str, allow: Sequence[str] = ()
) -> None:
  """Fails if a program has a collective besides the exchanges of `ep`.

  The partitioner inserts collectives where shardings do not fit: a replicated
  array that should have been sharded silently costs an all-gather in each step.
  Call this in a test of a training step:

      compiled = jax.jit(step).lower(*args).compile()
      ep.assert_no_hidden_collectives(compiled, allow=["all-reduce"])

  The function only reads the text of the program. Not collective.

  Args:
    compiled: the result of `jax.jit(f).lower(...).compile()`, or its
      `as_text()`.
    allow: the intended collectives, as a list of
      * opcodes: "all-gather", "all-reduce", "all-to-all",
        "collective-broadcast", "collective-permute", "ragged-all-to-all",
        "recv", "reduce-scatter", "send";
      * names of a scope in the path of the collective, such as "grad_sync" for
        `jax.named_scope("grad_sync")`. (XLA may merge two all-reduces into
        one, which has the path of either.)

  Raises:
    AssertionError: the program has other collectives; the message gives opcode,
      path and source line of each. A collective that the partitioner made has
      the path and source line of its operand.
    TypeError: `compiled` is not a compiled program, or `allow` is no list.
  """
  if isinstance(allow, str):  # a part of its text would allow collectives
    raise arguments.wrong_type(
      "assert_no_hidden_collectives", "allow", allow, "a list of names"
    )
  hlo = as_text("assert_no_hidden_collectives", compiled)
  every, frames = instructions(hlo), _frames(hlo)
  intended, hidden = _EXCHANGES.union(allow), ""
  for x in every.values():
    if (
      x.opcode not in OPCODES
      or x.opcode in allow
      or "is_host_transfer=true" in x.line
      or not x.scopes.isdisjoint(intended)
    ):
      continue
    named = _with_metadata(x, every)
    cause = named.op_name or "a value without a name"
    path = x.op_name or f"made by the partitioner for {cause}"
    source = _source(named.line, frames) or "no source line"
    hidden += f"\n  {x.opcode} %{x.name}, {path}, {source}"
  if hidden:
    raise AssertionError(
      f"the program has collectives besides the exchanges of ep:{hidden}\nCheck"
      " the shardings of their operands, or pass the opcodes or scopes of the"
      " intended ones in `allow`."
    )


def instructions(hlo: str) -> dict[str, Instruction]:
  """Returns the instructions of a program or a computation, in their order."""
  found = {}
  for line in hlo.splitlines():
    if x := _INSTRUCTION.match(line):
      uses = re.findall(r"%([^\s,(){}]+)", line[x.end() :])
      opcode = x[2].removesuffix("-start")
      found[x[1]] = Instruction(x[1], opcode, line, tuple(uses))
  return found


def _with_metadata(
  x: Instruction, instructions: dict[str, Instruction]
) -> Instruction:
  """Returns the instruction, or its nearest operand that has an op_name."""
  while not x.op_name and x.uses and x.uses[0] in instructions:
    x = instructions[x.uses[0]]
  return x


def as_text(function: str, compiled: object) -> str:
  """Returns the HLO text of a compiled program; errors name `function`."""
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


def _frames(hlo: str) -> dict[str, str]:
  """Returns the source line of each stack frame, as "file:line".

  Tables in the head of the module map frames to locations, and locations to
  files.
  """
  names, _, others = hlo.partition("\nFunctionNames\n")
  files = dict(re.findall(r'^(\d+) "(.*)"$', names, re.M))
  location = r"^(\d+) \{file_name_id=(\d+).*? line=(\d+)"
  lines = {
    number: f"{files[file]}:{line}"
    for number, file, line in re.findall(location, others, re.M)
  }
  frame = r"^(\d+) \{file_location_id=(\d+)"
  return {n: lines[at] for n, at in re.findall(frame, others, re.M)}


def _source(instruction: str, frames: dict[str, str]) -> str:
  """Returns "file:line" of an instruction, or "" if it is unknown.

  An instruction has its source line itself or, in newer versions of XLA, a
  stack frame.
  """
  if at := re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction):
    return f"{at[1]}:{at[2]}"
  frame = re.search(r"stack_frame_id=(\d+)", instruction)
  return frames.get(frame[1], "") if frame else ""
