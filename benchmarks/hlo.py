# SPDX-License-Identifier: Apache-2.0
"""Counts the operations in the text of a compiled program."""

from __future__ import annotations

from collections.abc import Iterator
import re
from typing import NamedTuple

# The name of an operation precedes its operands. Types have no such text.
_OPCODE = re.compile(r" ([a-z][a-z0-9-]*)\(%")
_SLICE = re.compile(r"slice_sizes=\{([\d,]*)\}")
_KERNELS = re.compile(r'custom_call_target="(tpu_custom_call|mosaic_gpu\w*)"')
COLLECTIVES = (
  "all-gather",
  "all-reduce",
  "all-to-all",
  "collective-permute",
  "reduce-scatter",
)


class Op(NamedTuple):
  """An operation: its opcode, and its line of text."""

  opcode: str
  line: str

  @property
  def is_kernel(self) -> bool:
    """Whether it is a kernel of Pallas."""
    return bool(_KERNELS.search(self.line))

  @property
  def is_counted(self) -> bool:
    """Whether XLA's cost model knows its costs.

    The model takes a kernel's estimate, or 0 if there is none.
    """
    return not self.is_kernel or '"cost_estimate"' in self.line

  @property
  def gathers_rows(self) -> bool:
    """Whether it gathers slices of several elements."""
    sizes = _SLICE.search(self.line) if self.opcode == "gather" else None
    return sizes is not None and any(n != "1" for n in sizes[1].split(","))


def ops(text: str) -> Iterator[Op]:
  """Yields all operations, also of fusions and loops, each once.

  Of an asynchronous operation, yields the start under the operation's name.
  """
  for line in text.splitlines():
    opcode = _OPCODE.search(line)
    if opcode is None or opcode.group(1).endswith("-done"):
      continue
    yield Op(opcode.group(1).removesuffix("-start"), line)
