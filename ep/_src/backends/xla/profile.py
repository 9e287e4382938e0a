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
import json
import pathlib
import re
import tempfile
import time
from typing import Any

import jax

from ep._src.backends.xla import hlo
from ep._src.base import meshes
from ep._src.base.config import GroupConfig


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
  programs = hlo.programs(space)
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
) -> dict[tuple[jax.Device, int], list[hlo.Span]]:
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
      (e.start_ns, hlo.number(e.name))
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
