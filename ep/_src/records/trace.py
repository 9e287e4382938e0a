# SPDX-License-Identifier: Apache-2.0
"""trace: writes when each rank came to each exchange, and what it moved."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
import contextlib
import gzip
import itertools
import json
import os
import pathlib
from typing import Any

import jax
import numpy as np

from ep._src.base import arguments, meshes, tracing
from ep._src.group import agreement
from ep._src.group.group import EpGroup

_COUNTS = "rows", "dropped", "bytes"


@contextlib.contextmanager
def trace(group: EpGroup, path: str | os.PathLike[str]) -> Iterator[None]:
  """Writes one file for all ranks, which ui.perfetto.dev opens.

      with ep.trace(group, "steps.json.gz"):
        for batch in data:
          state = step(state, batch)
        jax.block_until_ready(state)
      print(ep.explain("steps.json.gz"))

  Each rank has a track with slices "waiting"
  and "moving"; an arrow runs from the rank that came last to those that waited.
  Wait for the results of the last step, as above: what has not ended when the
  context is left is not in the file.

  Collective over the processes of the group. Each writes a part beside the
  path, and the first one merges them. After an error in the context the parts
  stay as they are; `ep.explain` of their folder merges them, and says which
  rank the error began with. A process keeps 262144 exchanges; the file says how
  many came after that.

  To trace a program without editing it, set EP_TRACE to a folder: every group
  is traced from its begin to its end, and ep.explain merges the parts there.

  Args:
    group: a group with devices. With "host" and "nccl" programs do not change;
      with "nccl" times are of the GPUs' clocks, and `group.check()`, or the end
      of the context, waits for the device. With "xla" programs that run in the
      context are traced anew: they call Python before and after each op, which
      takes time, and XLA may fuse what is around an op otherwise. There an
      iteration of a loop counts as a step.
    path: the file; it is compressed if its name ends with ".gz".

  Raises:
    ValueError, OSError: the group has no trace, or the file cannot be written.
    RuntimeError: the group was finalized or is traced already, or a process did
      not come.
  """
  group.connection.check_open("ep.trace")
  arguments.check(
    group.connection.has_trace,
    "ep.trace",
    f'the group "{group.name}" has no trace, because its mesh has no devices.',
  )
  path = pathlib.Path(path).absolute()
  group.connection.start_trace(str(path))
  try:
    with tracing.on(True):
      yield
  finally:
    group.connection.stop_trace()
  processes = meshes.processes(group.mesh)

  def merge_on_first():
    if jax.process_index() == processes[0]:
      _merge_parts(path, range(len(processes)))
    return group

  agreement.agree("ep.trace", group, lambda: group)  # all parts are written
  agreement.agree("ep.trace", group, merge_on_first)


def files(path: str | os.PathLike[str]) -> list[pathlib.Path]:
  """Returns the traces at `path`: a file, or those in a folder.

  There it merges the parts that the processes of ended groups have written.

  Raises:
    ValueError: there is no trace, or a part is missing.
  """
  path = pathlib.Path(path)
  if not path.is_dir():
    return [path]
  for part in sorted(path.glob("*.part*")):
    if not part.exists():  # it has been merged
      continue
    name, _, process = part.name.rpartition(".part")
    head = json.loads(part.read_text().partition("\n")[0] or "{}")
    processes = set(head.get("processes", [process]))
    _merge_parts(part.with_name(name), processes)
  found = sorted(path.glob("*.json.gz"))
  arguments.check(
    found != [],
    "ep.explain",
    f"{path} has no trace. If it was EP_TRACE: the program's groups must have"
    " had devices, and have ended.",
  )
  return found


def _merge_parts(path: pathlib.Path, processes: Iterable[int]) -> None:
  """Writes the file of a trace, from the parts of these processes.

  A part that has no end is merged only if another one tells of a failure.
  """
  parts = [path.with_name(f"{path.name}.part{p}") for p in processes]
  texts = [p.read_text() if p.exists() else "" for p in parts]
  is_failure = any('"failed":' in text for text in texts)
  for part, text in zip(parts, texts, strict=True):
    arguments.check(
      '"lost":' in text or (text != "" and is_failure),
      "ep.trace",
      f"{part} is missing or has no end: its process still runs, or was"
      " killed.",
    )
  merged = merge(texts)
  text = json.dumps({"traceEvents": list(_slices(merged)), "ep": merged})
  data = text.encode()
  path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
  for part in parts:
    part.unlink()


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns what `merge` returned, from a file that `trace` wrote.

  A folder must have the trace of one group.
  """
  (*others, path) = files(path)
  arguments.check(
    not others,
    "ep.explain",
    f"{path.parent} has {1 + len(others)} traces; name one of them, as {path}.",
  )
  data = path.read_bytes()
  if data.startswith(b"\x1f\x8b"):
    data = gzip.decompress(data)
  content = json.loads(data)
  arguments.check(
    "ep" in content, "ep.explain", f"{path} is not a file of ep.trace."
  )
  return content["ep"]


def merge(texts: list[str]) -> dict[str, Any]:
  """Merges the parts of all processes; ep_ffi's trace.h has their form.

  An exchange gets for each rank what its own process has measured, in the time
  of the first process. Exchanges that a part lacks are left out. The clock of a
  process is moved as little as its exchanges allow, and not at all where it may
  be the first one's: a post is seen after it was sent, both ways.

  "failures" are those of all parts, and "killed" has the ranks, of all domains,
  whose processes ended before their parts did.
  """
  heads: dict[int, dict[str, Any]] = {}
  seen: dict[int, dict[tuple, dict[str, Any]]] = {}
  failures, lost, killed = [], 0, set()
  for text in texts:
    head, *events = map(json.loads, text.rpartition("\n")[0].splitlines())
    runs: collections.Counter = collections.Counter()
    own = seen[head["process"]] = {}
    heads[head["process"]] = head
    if events and "lost" in events[-1]:
      lost += events.pop()["lost"]
    else:
      killed.add(head["process"])
    for event in events:
      if "failed" in event:
        failures.append((head["process"], event))
        continue
      key = event["domain"], event["site"], event["step"]
      own[*key, runs[key]] = event
      runs[key] += 1
  first = min(heads)
  size, owners = heads[first]["ep_size"], heads[first]["processes"]
  clocks = {p: _clock(seen[first], seen[p], first, p, owners) for p in heads}
  exchanges = []
  for key in set().union(*seen.values()):
    ranks = owners[key[0] * size : (key[0] + 1) * size]
    if any(key not in seen.get(p, ()) for p in ranks):
      continue
    mine = [seen[p][key] for p in ranks]
    offsets = [clocks[p]["offset_s"] for p in ranks]
    merged = {k: mine[0][k] for k in ("op", "layer", "program", "domain")}
    merged |= {"step": key[2]}
    for name in "came", *_COUNTS, "tokens":
      merged[name] = [e[name][r] for r, e in enumerate(mine)]
    merged["came"] = np.subtract(merged["came"], offsets).tolist()
    last = max(merged["came"])
    for name in "began", "ended":
      merged[name] = [
        last if e[name] is None else e[name] - offset
        for e, offset in zip(mine, offsets, strict=True)
      ]
    exchanges.append(merged)
  for process, failure in failures:
    failure["at"] -= clocks[process]["offset_s"]
  exchanges.sort(key=lambda e: max(e["came"]))
  return dict(
    ep_size=size,
    clocks=clocks,
    lost=lost,
    failures=[failure for _, failure in failures],
    killed=[r for r, process in enumerate(owners) if process in killed],
    exchanges=exchanges,
  )


def _clock(a, b, first, process, owners) -> dict[str, Any]:
  """Returns by how much the clock of `b` is ahead of the clock of `a`.

  `bound_s` is the width of what the exchanges allow; None if they tell nothing.
  """
  low, high = -np.inf, np.inf
  for key in (a.keys() & b.keys()) if process != first else ():
    came_a, came_b = a[key]["came"], b[key]["came"]
    base = key[0] * len(came_a)
    for r, (x, y) in enumerate(zip(came_a, came_b, strict=True)):
      if owners[base + r] == first:
        high = min(high, y - x)
      elif owners[base + r] == process:
        low = max(low, y - x)
  is_known = bool(np.isfinite(high - low))
  offset = float(np.clip(0, low, high)) if is_known else 0.0
  bound = float(high - low) if is_known else None
  return dict(offset_s=offset, bound_s=0.0 if process == first else bound)


def _slices(merged: dict[str, Any]) -> Iterator[dict[str, Any]]:
  """Yields Chrome's events of a merged trace; times are in microseconds."""
  for number, e in enumerate(merged["exchanges"]):
    last = int(np.argmax(e["came"]))
    name = f"{e['op']} {e['layer']}".strip()
    for rank, came in enumerate(e["came"]):
      track = dict(pid=e["domain"], tid=rank)
      begin, end = e["began"][rank], e["ended"][rank]
      args = {k: e[k][rank] for k in _COUNTS} | {"step": e["step"]}
      for kind, start, stop in (
        (f"waiting for rank {last}: {name}", came, begin),
        (f"moving: {name}", begin, end),
      ):
        times = dict(ts=start * 1e6, dur=max(0, stop - start) * 1e6)
        yield dict(name=kind, ph="X", args=args, **times, **track)
      if rank != last:
        arrow = dict(name="last", cat="last", id=number * len(e["came"]) + rank)
        yield dict(
          ph="s", pid=e["domain"], tid=last, ts=e["began"][last] * 1e6, **arrow
        )
        yield dict(ph="f", bp="e", ts=begin * 1e6, **track, **arrow)
    if e["op"] == "ep_prepare":
      rows = np.array(e["rows"])
      at = dict(ph="C", pid=e["domain"], ts=max(e["ended"]) * 1e6)
      layer = e["layer"]
      counts = {str(r): int(n) for r, n in enumerate(rows)}
      yield dict(name=f"rows {layer}", args=counts, **at)
      spread = {"max/mean": float(rows.max() / max(rows.mean(), 1))}
      yield dict(name=f"imbalance {layer}", args=spread, **at)
      yield dict(name=f"drops {layer}", args={"": sum(e["dropped"])}, **at)
      loads = {str(i): n for i, n in enumerate(itertools.chain(*e["tokens"]))}
      yield dict(name=f"tokens of experts {layer}", args=loads, **at)
