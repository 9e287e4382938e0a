# SPDX-License-Identifier: Apache-2.0
"""Counts the operations in the text of a compiled program."""

from __future__ import annotations

from collections.abc import Iterator
import math
import re
from typing import NamedTuple

# The name of an operation precedes its operands. Types have no such text.
_OPCODE = re.compile(r" ([a-z][a-z0-9-]*)\(%")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_SLICE = re.compile(r"slice_sizes=\{([\d,]*)\}")
_TYPE = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_OPERANDS = re.compile(r"operand_layout_constraints=\{(.*?)\}, [a-z_]+=")
_KERNELS = re.compile(r'custom_call_target="(tpu_custom_call|mosaic_gpu\w*)"')
COLLECTIVES = (
  "all-gather",
  "all-reduce",
  "all-to-all",
  "collective-permute",
  "reduce-scatter",
)


class Op(NamedTuple):
  """An operation: its opcode, JAX's name of it, and its line of text."""

  opcode: str
  name: str
  line: str

  @property
  def is_kernel(self) -> bool:
    """Whether it is a kernel of Pallas."""
    return bool(_KERNELS.search(self.line))

  @property
  def gathers_rows(self) -> bool:
    """Whether it gathers slices of several elements."""
    sizes = _SLICE.search(self.line) if self.opcode == "gather" else None
    return sizes is not None and math.prod(_numbers(sizes.group(1))) > 1


def ops(text: str) -> Iterator[Op]:
  """Yields all operations, also of fusions and loops, each once.

  Of an asynchronous operation, yields the start under the operation's name.
  """
  for line in text.splitlines():
    opcode = _OPCODE.search(line)
    if opcode is None or opcode.group(1).endswith("-done"):
      continue
    name = _OP_NAME.search(line)
    yield Op(
      opcode.group(1).removesuffix("-start"),
      name.group(1) if name else "",
      line,
    )


def uncounted_bytes(text: str) -> int:
  """Returns the bytes that XLA leaves out of its "bytes accessed".

  XLA counts a Pallas kernel by its estimate, and as 0 if it has none. This
  function returns the bytes of operands and results of kernels without one.
  """
  return sum(
    _num_bytes(op.line.partition(" custom-call(")[0])
    + sum(map(_num_bytes, _OPERANDS.findall(op.line)))
    for op in ops(text)
    if op.is_kernel and '"cost_estimate"' not in op.line
  )


def _num_bytes(types: str) -> int:
  """Returns the bytes of all arrays whose types are in a text."""
  return sum(
    math.prod(_numbers(shape)) * int(bits or 8) // 8
    for bits, shape in _TYPE.findall(types)
  )


def _numbers(text: str) -> list[int]:
  return [int(n) for n in text.split(",") if n]
