# SPDX-License-Identifier: Apache-2.0
"""Records times of ops for `ep.trace` with JAX's profiler; backend "xla".

XLA's profile has a span for each collective. A rank arrives when its span
begins, and the last rank's arrival begins the exchange. The profile does not
say how many rows a rank has.

The profile also has the optimized HLO of each program. The metadata of an
instruction names the op, as in "jit(step)/ep_dispatch[moe_3]/all_to_all".
"""

from __future__ import annotations

import bisect
import collections
from collections.abc import Iterator
import dataclasses
import json
import pathlib
import re
import tempfile
import time
from typing import Any, NamedTuple

import jax

from ep._src.base import meshes
from ep._src.base.config import GroupConfig

_COLLECTIVE = re.compile(
  r"(ragged-all-to-all|all-(to-all|gather|reduce)|collective-permute"
  r"|reduce-scatter)(-start)?"
)
_SCOPE = re.compile(r"(ep_\w+)\[([^]]*)\]")
# The ops that gather rows before they send them, and the other ops.
_GATHER_FIRST = "ep_prepare", "ep_dispatch", "ep_combine_bwd"
_SEND_FIRST = "ep_prepare", "ep_combine", "ep_dispatch_bwd"
# How far the instruction that names a collective may be; see `Program._op`.
_MAX_DISTANCE = 4
# An instruction, as (name, begin, end); times are in seconds.
_Span = tuple[str, float, float]


class Profile:
  """A recording of the collectives of this process's devices."""

  def __init__(self, group: GroupConfig):
    self._group = group
    self._part: pathlib.Path | None = None  # set while a trace is on

  def start(self, path: str) -> None:
    """Starts JAX's profiler; `stop` appends exchanges to the file `path`.

    Raises:
      RuntimeError: the profiler runs already.
    """
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = 1  # enough for the spans of XLA:CPU
    options.python_tracer_level = 0
    self._folder = tempfile.TemporaryDirectory(prefix="ep_trace_")
    jax.profiler.start_trace(self._folder.name, profiler_options=options)
    self._part = pathlib.Path(path)

  def stop(self) -> None:
    """Appends exchanges to the file, in the format of trace.h; idempotent."""
    if self._part is None:
      return
    part, self._part = self._part, None
    with self._folder as folder:
      jax.profiler.stop_trace()
      (space,) = pathlib.Path(folder).rglob("*.xplane.pb")
      found = exchanges(space.read_bytes(), self._group)
    with part.open("a") as file:
      file.writelines(json.dumps(e) + "\n" for e in (*found, dict(lost=0)))


def exchanges(space: bytes, group: GroupConfig) -> Iterator[dict[str, Any]]:
  """Yields the exchanges of this process in a serialized profile.

  The step of an exchange is the launch, counted from the end of the trace: -1
  is the last launch. Launches that began before the trace may be incomplete on
  some ranks, but all ranks finish the last launch.
  """
  mesh = group.mesh
  assert meshes.has_devices(mesh)
  me = jax.process_index()
  programs = _programs(space)
  found = _spans(space, mesh)
  used = sorted({i for _, i in found} & programs.keys())
  numbers: collections.Counter[str] = collections.Counter()
  for number in used:
    program = programs[number]
    name = f"{program.name}#{numbers[program.name]}"
    of_devices = {
      device: program.executions(spans)
      for (device, i), spans in found.items()
      if i == number
    }
    if any(of_devices.values()):
      numbers[program.name] += 1
    for domain, devices in enumerate(meshes.domains(mesh, group.axis_name)):
      mine = {r: d for r, d in enumerate(devices) if d.process_index == me}
      ranks = {r: of_devices.get(d, {}) for r, d in mine.items()}
      for site, step in next(iter(ranks.values()), {}):
        launches = [ran.get((site, step), []) for ran in ranks.values()]
        if len({*map(len, launches)}) > 1:
          continue
        for spans in zip(*launches, strict=True):
          begins = dict(zip(ranks, (begin for begin, _ in spans), strict=True))
          ends = [end for _, end in spans]
          yield dict(
            program.ops[site]._asdict(),
            program=name,
            site=f"{name}/{site}",
            step=step,
            domain=domain,
            began=None,  # known after the files of all processes are merged
            ended=max(ends),
            # All ranks, also of other processes, arrive before any rank ends.
            came=[begins.get(r, min(ends)) for r in range(len(devices))],
            rows=[-1] * len(devices),
            dropped=[-1] * len(devices),
            bytes=[-1] * len(devices),
            tokens=[[]] * len(devices),
          )


def _spans(
  space: bytes, mesh: jax.sharding.Mesh
) -> dict[tuple[jax.Device, int], list[_Span]]:
  """Returns the spans by device and program, sorted by their begin.

  The profile of a TPU names programs only in the spans of whole launches.
  """
  data = jax.profiler.ProfileData.from_serialized_xspace(space)
  # By the name of the plane, and by the device in a plane of several devices.
  devices = {
    ("CPU", d.id) if d.platform == "cpu" else (d.local_hardware_id, 0): d
    for d in mesh.local_devices
  }
  # Convert times to the monotonic clock, which counts from a later time: the
  # files of `ep.trace` would round nanoseconds since 1970.
  start_ns = time.monotonic_ns() - time.time_ns()
  found: Any = collections.defaultdict(list)
  planes = list(data.planes)
  for plane in planes:
    start_ns += int(dict(plane.stats).get("profile_start_time", 0))
  for plane in planes:
    match = re.fullmatch(r"/(?:host:(CPU)|device:[GT]PU:(\d+))", plane.name)
    if not match:
      continue
    place = match[1] or int(match[2])
    lines = list(plane.lines)
    is_tpu = any(line.name == "XLA Ops" for line in lines)
    launches = [
      (e.start_ns, _number(e.name))
      for line in lines
      if line.name == "XLA Modules"
      for e in line.events
    ]
    launches.sort()
    for line in lines:
      if is_tpu and line.name != "XLA Ops":
        continue
      for e in line.events:
        if is_tpu:
          # The name is the text of an instruction: "%all-reduce.1 = ...".
          name, ordinal = e.name.removeprefix("%").split(" ")[0], 0
          at = bisect.bisect(launches, e.start_ns, key=lambda x: x[0]) - 1
          program = launches[at][1] if at >= 0 else None
        else:
          stats = dict(e.stats)
          name, program = stats.get("hlo_op"), stats.get("program_id")
          ordinal = stats.get("device_ordinal", 0)
        device = devices.get((place, ordinal))
        if device and name and program is not None:
          begin = (start_ns + e.start_ns) * 1e-9
          span = name, begin, begin + e.duration_ns * 1e-9
          found[device, int(program) % 2**64].append(span)
  for spans in found.values():
    spans.sort(key=lambda span: span[1])
  return dict(found)


def _number(name: str) -> int | None:
  """Returns the number of a program: 7 for "jit_step(7)"."""
  match = re.fullmatch(r".*\((\d+)\)", name)
  return int(match[1]) if match else None


class Op(NamedTuple):
  op: str
  layer: str


@dataclasses.dataclass
class _Instruction:
  """An instruction of HLO; `operands` and `calls` are ids."""

  name: str
  opcode: str
  op_name: str
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
    for body in map(_by_field, by_field[3]):
      (number,) = body[5]
      ids = bodies[number] = []
      for fields in map(_by_field, body[2]):
        metadata = _by_field(fields[7][0]) if fields[7] else {}
        (key,) = fields[35]
        ids.append(key)
        name = str(fields[1][0], "utf-8")
        self._body[name] = number
        self._all[key] = _Instruction(
          name,
          str(fields[2][0], "utf-8"),
          str(b"".join(metadata.get(2, [])), "utf-8"),
          _integers(fields[36]),
          _integers(fields[38]),
        )
    self._users: dict[int, list[int]] = collections.defaultdict(list)
    for key, x in self._all.items():
      for operand in x.operands:
        self._users[operand].append(key)
    # The name of the collective that an instruction begins or ends.
    self._collectives: dict[str, str] = {}
    self._ends: set[str] = set()
    self.ops: dict[str, Op] = {}
    for key, x in self._all.items():
      if x.opcode == "async-start":
        inner = [j for c in x.calls for j in bodies[c]]
      else:
        inner = [key]
      for i in inner:
        if _COLLECTIVE.fullmatch(self._all[i].opcode):
          self._add(key, i)

  def _add(self, start: int, key: int) -> None:
    """Adds the collective `key`, which the instruction `start` starts."""
    name = self._all[key].name
    op = self._op([key, start])
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

  def _op(self, keys: list[int]) -> Op | None:
    """Returns the op of a collective; None if it belongs to no op.

    Some passes of XLA drop the metadata of collectives. The op is then in the
    metadata of the instruction that gathers the rows: of a producer if the op
    gathers rows and then sends them, and otherwise of a user.
    """
    for names, step in (
      (_GATHER_FIRST, lambda key: self._all[key].operands[:1]),
      (_SEND_FIRST, self._users.__getitem__),
    ):
      near = keys
      for _ in range(_MAX_DISTANCE):
        named = [x for key in near if (x := self._all[key].op_name)]
        for match in filter(None, map(_SCOPE.search, named)):
          if near is keys or match[1] in names:
            return Op(*match.groups())
        if named and near is keys:
          return None
        near = [
          other
          for key in near
          if not self._all[key].op_name
          for other in step(key)
        ]
    return None

  def executions(
    self, spans: list[_Span]
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
    # A run begins with the first instruction. Of the instructions, most have a
    # span per run, and some none in the first run, which began before the trace.
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


def _programs(space: bytes) -> dict[int, Program]:
  """Returns the programs of a profile by their numbers."""
  programs: dict[int, Program] = {}
  for plane in map(_by_field, _by_field(memoryview(space))[1]):
    if plane[2] and bytes(plane[2][0]) == b"/host:metadata":
      for entry in map(_by_field, plane[4]):
        metadata = _by_field(entry[2][0])
        number = _number(str(metadata[2][0], "utf-8"))
        protos = [p for s in map(_by_field, metadata[5]) for p in s[6]]
        if number is not None and protos:
          programs[number] = Program(_by_field(protos[0])[1][0])
  return programs


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
      number, at = _varint(value, at)
      found.append(number)
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
