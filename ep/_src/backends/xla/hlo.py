# SPDX-License-Identifier: Apache-2.0
"""Finds the collectives of ops in XLA's profiles and optimized programs.

The metadata of an instruction names its op: "jit(step)/ep_dispatch[moe_3]/...".
A profile has the optimized HLO of its programs as serialized `HloProto`s.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import re
from typing import Any, NamedTuple

_COLLECTIVE = re.compile(
  r"(ragged-all-to-all|all-(to-all|gather|reduce)|collective-permute"
  r"|reduce-scatter)(-start)?"
)
_SCOPE = re.compile(r"(ep_\w+)\[([^]]*)\]")
# The ops that gather the rows to send, and the ops that gather received rows.
_GATHER_SENT = "ep_dispatch", "ep_combine_bwd"
_GATHER_RECEIVED = "ep_combine", "ep_dispatch_bwd"
# How far the gather may be from the collective; see `Program._op`.
_MAX_DISTANCE = 12
# An instruction, as (name, begin, end); times are in seconds.
Span = tuple[str, float, float]


class Op(NamedTuple):
  op: str
  layer: str


def _op_in(op_name: str) -> Op | None:
  match = _SCOPE.search(op_name)
  return Op(*match.groups()) if match else None


@dataclasses.dataclass
class _Instruction:
  """An instruction of HLO; `operands` and `calls` are ids.

  `index` is the number of a parameter, or of a tuple's element.
  """

  name: str
  opcode: str
  op_name: str
  index: int
  operands: list[int]
  calls: list[int]


class Program:
  """The collectives of an optimized program that belong to ops.

  Attributes:
    name: the program's name, as "jit_step".
    ops: the ops by the name of their collective.
  """

  def __init__(self, module: memoryview):
    by_field = _by_field(module)
    self.name = str(by_field[1][0], "utf-8")
    self._all: dict[int, _Instruction] = {}
    (self._entry,) = by_field[6]
    # The computation of each instruction, by its name.
    self._body: dict[str, int] = {}
    bodies: dict[int, list[int]] = {}
    roots: dict[int, int] = {}
    for body in map(_by_field, by_field[3]):
      (place,) = body[5]
      (roots[place],) = body[6]
      ids = bodies[place] = []
      for fields in map(_by_field, body[2]):
        metadata = _by_field(fields[7][0]) if fields[7] else {}
        (key,) = fields[35]
        ids.append(key)
        name = str(fields[1][0], "utf-8")
        self._body[name] = place
        self._all[key] = _Instruction(
          name,
          str(fields[2][0], "utf-8"),
          str(b"".join(metadata.get(2, [])), "utf-8"),
          sum(fields[9] + fields[13]),
          _integers(fields[36]),
          _integers(fields[38]),
        )
    for x in self._all.values():
      if x.opcode in ("fusion", "async-start"):
        # Connect the instructions of the fusion with its operands and users.
        for y in map(self._all.__getitem__, bodies[x.calls[0]]):
          if y.opcode == "parameter":
            y.operands = [x.operands[y.index]]
        x.operands = [roots[x.calls[0]]]
    for x in self._all.values():
      if x.opcode == "get-tuple-element":
        results = self._all[x.operands[0]]
        root = self._all[results.operands[0]] if results.operands else results
        if results.opcode == "fusion" and root.opcode == "tuple":
          x.operands = [root.operands[x.index]]
    self._users: dict[int, list[int]] = collections.defaultdict(list)
    for key, x in self._all.items():
      for operand in x.operands:
        self._users[operand].append(key)
    # The name of the collective that an instruction begins or ends.
    self._collectives: dict[str, str] = {}
    self._ends: set[str] = set()
    self.ops: dict[str, Op] = {}
    for key, x in self._all.items():
      is_async = x.opcode == "async-start"
      for i in [j for c in x.calls for j in bodies[c]] if is_async else [key]:
        if _COLLECTIVE.fullmatch(self._all[i].opcode):
          self._add(key, i)

  def _add(self, start: int, key: int) -> None:
    """Adds the collective `key`, which the instruction `start` starts."""
    name = self._all[key].name
    op = self._op(key)
    if op is None or (start == key and name in self.ops):
      return
    if op.op != "ep_prepare" and "to-all" not in self._all[key].opcode:
      # XLA shares a check between ops, and names one of them.
      op = op._replace(op="ep_check")
    self.ops[name] = op
    self._collectives |= {name: name, self._all[start].name: name}
    self._body[name] = self._body[self._all[start].name]
    pending = [start]
    while pending:
      for i in self._users[pending.pop()]:
        if self._all[i].opcode.endswith(("-done", "async-update")):
          pending.append(i)
          self._collectives[self._all[i].name] = name
          self._ends.add(self._all[i].name)

  def _op(self, key: int) -> Op | None:
    """Returns the op of a collective; None if it belongs to no op.

    XLA drops the metadata of some collectives. The metadata of the op's gather
    then names the op. No path to the gather of another op is without its
    collective.
    """
    x = self._all[key]
    if x.op_name:
      return _op_in(x.op_name)
    is_rows = "to-all" in x.opcode
    down: tuple[str, ...] = _GATHER_RECEIVED
    if not is_rows:
      down += ("ep_prepare",)
    last = "/gather" if is_rows else "/all_gather"
    for ops, near, step in (
      (_GATHER_SENT, x.operands[:1], lambda key: self._all[key].operands),
      (down, self._users[key], self._users.__getitem__),
    ):
      seen: set[int] = set()
      for _ in range(_MAX_DISTANCE):
        near = [
          key
          for key in dict.fromkeys(near)
          if key not in seen
          and not _COLLECTIVE.fullmatch(self._all[key].opcode)
        ]
        seen.update(near)
        for name in (self._all[key].op_name for key in near):
          op = _op_in(name)
          if op and op.op in ops and name.endswith(last):
            return op
        near = [other for key in near for other in step(key)]
    return None

  def executions(
    self, spans: list[Span]
  ) -> dict[tuple[str, int], list[list[float]]]:
    """Returns [begin, end] on a device, by collective and launch.

    An instruction runs once in each run of its computation, which is the entry
    or the body of a loop. On GPUs, it can have several spans, one per kernel.
    """
    begins: dict[int, dict[str, list[float]]] = collections.defaultdict(
      lambda: collections.defaultdict(list)
    )
    for name, begin, _ in spans:
      if name in self._body:
        begins[self._body[name]][name].append(begin)
    # A run begins with the first instruction. Most instructions have a span per
    # run. The trace may miss the begin of the first run.
    runs = {}
    for body, of_names in begins.items():
      counts = collections.Counter(map(len, of_names.values()))
      ((usual, _),) = counts.most_common(1)
      runs[body] = min(
        (x for x in of_names.values() if usual - 1 <= len(x) <= usual),
        key=lambda x: x[-1],
      )
    first = runs.get(self._entry, [])
    found: dict[Any, list[float]] = {}
    last: dict[str, list[float]] = {}
    for name, begin, end in spans:
      if site := self._collectives.get(name):
        if name not in self._ends:
          launch = bisect.bisect(first, begin) - 1 - len(first)
          run = bisect.bisect(runs[self._body[name]], begin)
          last[site] = found.setdefault((site, launch, run), [begin, end])
        if site in last:
          last[site][1] = max(last[site][1], end)
    ran: dict[Any, list[list[float]]] = collections.defaultdict(list)
    for (site, launch, _), span in found.items():
      ran[site, launch].append(span)
    return dict(ran)


def programs(space: bytes) -> dict[int, Program]:
  """Returns the programs of a profile by their numbers."""
  found: dict[int, Program] = {}
  for plane in map(_by_field, _by_field(memoryview(space))[1]):
    if plane[2] and bytes(plane[2][0]) == b"/host:metadata":
      for entry in map(_by_field, plane[4]):
        metadata = _by_field(entry[2][0])
        key = number(str(metadata[2][0], "utf-8"))
        protos = [p for s in map(_by_field, metadata[5]) for p in s[6]]
        if key is not None and protos:
          found[key] = Program(_by_field(protos[0])[1][0])
  return found


def _by_field(message: memoryview) -> dict[int, list[Any]]:
  """Returns the values of a serialized protocol buffer by field number.

  A value is an integer or a memoryview. A missing field is an empty list.
  """
  fields: dict[int, list[Any]] = collections.defaultdict(list)
  at = 0
  while at < len(message):
    key, at = _varint(message, at)
    kind = key & 7
    if kind == 0:
      value, at = _varint(message, at)
      fields[key >> 3].append(value)
      continue
    size = {1: 8, 5: 4}.get(kind, 0)
    if not size:
      size, at = _varint(message, at)
    fields[key >> 3].append(message[at : at + size])
    at += size
  return fields


def _integers(values: list[Any]) -> list[int]:
  """Returns the integers of a repeated field, packed or not."""
  found = []
  for value in values:
    if isinstance(value, int):
      found.append(value)
      continue
    at = 0
    while at < len(value):
      item, at = _varint(value, at)
      found.append(item)
  return found


def _varint(message: memoryview, at: int) -> tuple[int, int]:
  """Returns the integer at a position, and the position after it."""
  value = shift = 0
  while True:
    byte = message[at]
    at += 1
    value |= (byte & 127) << shift
    if byte < 128:
      return value, at
    shift += 7


def number(name: str) -> int | None:
  """Returns the number of a program: 7 for "jit_step(7)"."""
  match = re.fullmatch(r".*\((\d+)\)", name)
  return int(match[1]) if match else None
