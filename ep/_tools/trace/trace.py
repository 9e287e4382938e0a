# SPDX-License-Identifier: Apache-2.0
"""trace: writes when each rank came to each exchange, and what it moved."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
import contextlib
import glob
import gzip
import json
import os
import pathlib
from typing import Any
import zlib

import jax
import numpy as np

from ep._src.base import arguments, contexts, meshes
from ep._src.group import agreement
from ep._src.group.group import EpGroup
from ep._tools.trace import chrome

_COUNTS = "rows", "dropped", "bytes", "tokens"
# A use of a damaged file raises one of these, or `ValueError`.
DAMAGES = (
  ArithmeticError,
  AttributeError,
  EOFError,
  LookupError,
  RecursionError,
  TypeError,
  gzip.BadGzipFile,
  zlib.error,
)


@contextlib.contextmanager
def trace(group: EpGroup, path: str | os.PathLike[str]) -> Iterator[None]:
  """Writes one file for all ranks, which ui.perfetto.dev opens.

      with ep.trace(group, "steps.json.gz"):
        for batch in data:
          state = step(state, batch)
        jax.block_until_ready(state)
      print(ep.explain("steps.json.gz"))

  Each rank has a track with slices "waiting" and "moving"; an arrow runs from
  the rank that came last to those that waited. Wait for the results of the last
  step, as above: what has not ended when the context is left is not in the
  file.

  Collective over the processes of the group. Each writes a part beside the
  path, and the first one merges them. After an error in the context the parts
  stay as they are; `ep.explain` of their folder merges them, and says which
  rank the error began with. A process keeps 262144 exchanges; the file says how
  many came after that.

  To trace a program without editing it, set EP_TRACE to a folder: every group
  is traced from its begin to its end, and ep.explain merges the parts there.
  Each group has its own file, "NAME.json.gz". The second group with a name, as
  `ep_resize` makes it, has "NAME@2.json.gz". Another run in the folder
  overwrites the files.

  Args:
    group: a group with devices; the group that replaces it in an `ep_resize` is
      not traced. With "host" and "nccl" programs do not change;
      with "nccl" times are of the GPUs' clocks, and `group.check()`, or the end
      of the context, waits for the device. With "xla" programs that run in the
      context are traced anew: they call Python before and after each op, which
      takes time, and XLA may fuse what is around an op otherwise. There an
      iteration of a loop counts as a step.
    path: the file; it is compressed if its name ends with ".gz".

  Raises:
    ValueError, OSError: the group has no trace, or the file cannot be written;
      on other processes a RuntimeError.
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
  processes = meshes.processes(group.mesh)
  stack = contextlib.ExitStack()

  def start():
    arguments.check(not path.is_dir(), "ep.trace", f"{path} is a folder.")
    group.connection.start_trace(str(path))
    stack.callback(group.connection.stop_trace)

  def merge_on_first():
    if jax.process_index() == processes[0]:
      merge_parts(path)

  with stack, contexts.in_trace(True):
    _do_on_all(group, start)
    yield
    _do_on_all(group, stack.close)
  _do_on_all(group, merge_on_first)


def _do_on_all(group: EpGroup, what: Callable[[], None]) -> None:
  """Does something on each process; raises on all what it raises on one."""

  def propose():
    what()
    return group.config

  agreement.agree("ep.trace", group.config, propose)


def files(path: str | os.PathLike[str]) -> list[pathlib.Path]:
  """Returns the traces at `path`: a file, or those in a folder.

  Raises:
    ValueError: there is no trace.
  """
  path = pathlib.Path(path)
  if not path.is_dir():
    return [path]
  parts = {p.with_name(p.name.rpartition(".")[0]) for p in _parts(path, "*")}
  found = sorted(parts.union(path.glob("*.json.gz")))
  arguments.check(
    found != [],
    "ep.explain",
    f"{path} has no trace. If it was EP_TRACE: the program's groups must have"
    " had devices, and have ended.",
  )
  return found


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns what `merge` returned, from a file that `trace` wrote.

  It merges the parts that the processes of an ended group have left in a
  folder, or without a file. A folder must have the trace of one group.

  Raises:
    OSError: the file cannot be read.
    ValueError: it is no trace, there are several, or a part is missing.
  """
  (*others, file) = files(path)
  arguments.check(
    not others,
    "ep.explain",
    f"{path} has {1 + len(others)} traces; name one of them, as {file}.",
  )
  # A process may begin the next trace of a file while another one reads it.
  if file != pathlib.Path(path) or not file.exists():
    merge_parts(file)
  data = file.read_bytes()
  try:
    if data.startswith(b"\x1f\x8b"):
      data = gzip.decompress(data)
    merged: dict[str, Any] = json.loads(data)["ep"]
  except (*DAMAGES, ValueError) as e:
    raise damaged(file, e) from e
  return merged


def damaged(path: str | os.PathLike[str], error: Exception) -> ValueError:
  """Returns the error for a file whose use has raised another one."""
  return ValueError(
    f"ep.explain: {path} is not a file of ep.trace, or is damaged: {error!r}"
  )


def _parts(folder: pathlib.Path, name: str) -> list[pathlib.Path]:
  """Returns the parts of traces, whose names match a pattern, in a folder."""
  return sorted(folder.glob(f"{name}.part[0-9]*"))


def merge_parts(path: pathlib.Path) -> None:
  """Writes the file of a trace from the parts of all processes, if any.

  A part that has no end is merged only if another one tells of a failure.

  Raises:
    ValueError: a part is missing, or is none.
  """
  found = _parts(path.parent, glob.escape(path.name))
  if not found:
    return
  texts = {p.name.rpartition(".part")[2]: p.read_text() for p in found}
  try:
    heads = [json.loads(t.partition("\n")[0]) for t in texts.values() if t]
    processes = [*map(str, sorted({*heads[0]["processes"]}))]
  except (*DAMAGES, ValueError):
    processes = [*texts]  # which have no begin
  is_failure = any('"failed":' in text for text in texts.values())
  for process in processes:
    text = texts.get(process, "")
    arguments.check(
      '"lost":' in text or (text != "" and is_failure),
      "ep.trace",
      f"{path}.part{process} is missing or has no end: its process still runs,"
      " or was killed.",
    )
  try:
    merged = merge([texts[process] for process in processes])
    content = {"traceEvents": chrome.events(merged), "ep": merged}
  except (*DAMAGES, ValueError) as e:
    raise damaged(found[0], e) from e
  data = json.dumps(content).encode()
  path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
  for part in found:
    part.unlink()


def merge(texts: list[str]) -> dict[str, Any]:
  """Merges the parts of all processes; ep_ffi's trace.h has their form.

  An exchange gets for each rank what its own process has measured, in the time
  of the first process. An op of a launch is left out if parts do not have it
  equally often: the trace began or ended within the launch. The clock of a
  process is moved as little as its exchanges allow, and not at all where it may
  be the first one's: a post is seen after it was sent, both ways.

  "failures" are those of all parts, and "killed" has the ranks, of all domains,
  whose processes ended before their parts did.
  """
  heads: dict[int, dict[str, Any]] = {}
  seen: dict[int, dict[tuple, list[dict[str, Any]]]] = {}
  failures, lost, killed = [], 0, set()
  for text in texts:
    head, *events = map(json.loads, text.rpartition("\n")[0].splitlines())
    own = seen[head["process"]] = collections.defaultdict(list)
    heads[head["process"]] = head
    if events and "lost" in events[-1]:
      lost += events.pop()["lost"]
    else:
      killed.add(head["process"])
    for event in events:
      if "failed" in event:
        failures.append((head["process"], event))
      else:
        own[event["domain"], event["site"], event["step"]].append(event)
  first = min(heads)
  size, owners = heads[first]["ep_size"], heads[first]["processes"]
  domains = np.reshape(owners, (-1, size))
  clocks = {p: _clock(seen[first], seen[p], first, p, domains) for p in heads}
  exchanges = []
  for key in set().union(*seen.values()):
    domain, _, step = key
    launches = [seen.get(p, {}).get(key, []) for p in domains[domain]]
    if len({*map(len, launches)}) > 1:
      continue
    offsets = [clocks[p]["offset_s"] for p in domains[domain]]
    for mine in zip(*launches, strict=True):
      merged = {k: mine[0][k] for k in ("op", "layer", "program", "domain")}
      merged |= {"step": step}
      for name in "came", *_COUNTS:
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


def _clock(a, b, first, process, domains) -> dict[str, Any]:
  """Returns by how much the clock of `b` is ahead of the clock of `a`.

  `bound_s` is the width of what the exchanges allow; None if they tell nothing.
  """
  if process == first:
    return dict(offset_s=0.0, bound_s=0.0)
  low: list[float] = []
  high: list[float] = []
  for key in a.keys() & b.keys():
    if len(a[key]) == len(b[key]):
      owners = domains[key[0]]
      for x, y in zip(a[key], b[key], strict=True):
        ahead = np.subtract(y["came"], x["came"])
        low.extend(ahead[owners == process])
        high.extend(ahead[owners == first])
  if not low or not high:
    return dict(offset_s=0.0, bound_s=None)
  # They cross if the clocks do not run equally fast.
  begin, end = sorted((max(low), min(high)))
  offset = float(np.clip(0, begin, end))
  return dict(offset_s=offset, bound_s=float(end - begin))
