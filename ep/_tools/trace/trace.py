# SPDX-License-Identifier: Apache-2.0
"""Traces the arrival times, row counts and bytes of each exchange."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
import contextlib
import glob
import gzip
import io
import json
import os
import pathlib
from typing import Any

import jax
import numpy as np

from ep._src.base import arguments, compat, meshes
from ep._src.group import agreement, liveness
from ep._src.group.group import EpGroup
from ep._tools.trace import chrome

# The ops of a process, by domain, site and step.
_Events = dict[tuple[int, str, int], list[dict[str, Any]]]
_MOST_EXPANSION = 100  # bytes of a trace by compressed byte; 10 to 30 are usual
_COUNTS = "rows", "dropped", "bytes", "tokens"


@contextlib.contextmanager
def trace(group: EpGroup, path: str | os.PathLike[str]) -> Iterator[None]:
  """Writes a trace of all exchanges and all ranks, for ui.perfetto.dev.

      with ep.trace(group, "steps.json.gz"):
        for batch in data:
          state = step(state, batch)
        jax.block_until_ready(state)
      print(ep.explain("steps.json.gz"))

  Each rank has a track with slices "waiting" and "moving". Arrows lead from the
  last rank to the ranks that waited for it. If the offset between the clocks of
  two ranks is known badly, their slices say so. Wait for the results of the
  last step, as above: the file has only exchanges that end inside the context.

  Collective over the processes of the group. Each process writes a file beside
  the path, and the first process merges these files. After an error in the
  context, the files of the processes remain; `ep.explain` of their folder
  merges them, and names the rank that caused the error. A process keeps 262144
  exchanges, and only counts later exchanges.

  To trace a program without editing it, set EP_TRACE to a folder. Every group
  is then traced for its whole life, and ep.explain merges the files. Each group
  has its own trace, "NAME.json.gz"; the second group with a name, for instance
  after `ep_resize`, has "NAME@2.json.gz". Another run in the folder overwrites
  the files. With "xla", programs then call Python before and after each op,
  which takes time, and XLA may fuse the ops around it differently. They record
  rows and bytes, and an iteration of a loop counts as a step.

  Args:
    group: a group with devices. A group that replaces it by `ep_resize` is not
      traced. Programs do not change. With "nccl", times are of the GPUs'
      clocks, and `group.check()` and the end of the context wait for the
      device. With "xla", JAX's profiler runs inside the context, so trace a few
      steps. A rank arrives when its span of XLA's collective begins. A profile
      has no rows and bytes (-1), and has the ops of all groups on these
      devices. Steps count back from the last one, which is -1.
    path: the file to write; compressed if its name ends with ".gz".

  Raises:
    ValueError, OSError: the group has no trace, or the file cannot be written.
      Other processes raise a RuntimeError.
    RuntimeError: the group was finalized or is traced already, another group
      of the job is traced to the path, JAX's profiler runs already ("xla"), or
      a process did not enter the context.
  """
  group.connection.check_open("ep.trace")
  arguments.check(
    group.connection.has_trace,
    "ep.trace",
    f'the group "{group.name}" has no trace, because its mesh has no devices.',
  )
  path = pathlib.Path(path).absolute()
  is_first = jax.process_index() == meshes.processes(group.mesh)[0]
  stack, claim = contextlib.ExitStack(), contextlib.ExitStack()

  def start() -> None:
    arguments.check(not path.is_dir(), "ep.trace", f"{path} is a folder.")
    if is_first:
      claim.enter_context(_claimed(path))
    group.connection.start_trace(str(path))
    stack.callback(group.connection.stop_trace)

  def merge_on_first() -> None:
    if is_first:
      merge_files(path)

  with claim:
    with stack:
      _do_on_all(group, start)
      yield
      _do_on_all(group, stack.close)
    _do_on_all(group, merge_on_first)


@contextlib.contextmanager
def _claimed(path: pathlib.Path) -> Iterator[None]:
  """Reserves a path for the trace of one group of the job.

  The connections of this process check their own paths.

  Raises:
    RuntimeError: a group of a live process is traced to the path.
  """
  client = compat.distributed_client()
  if client is None:
    yield
    return
  key, me = f"ep/trace{path}", jax.process_index()
  try:
    client.key_value_set(key, str(me))
  except jax.errors.JaxRuntimeError as e:
    if "ALREADY_EXISTS" not in str(e):
      raise
    owner = int(client.key_value_try_get(key))
    if owner == me or not liveness.dead(client, [owner]):
      raise RuntimeError(
        f"ep.trace: another group, of process {owner}, is traced to {path}"
        " already; choose another path."
      ) from e
    client.key_value_set(key, str(me), allow_overwrite=True)
  try:
    yield
  finally:
    client.key_value_delete(key)


def _do_on_all(group: EpGroup, what: Callable[[], None]) -> None:
  """Calls a function on each process; if one process fails, all raise."""

  def propose() -> Any:
    what()
    return group.config

  agreement.agree("ep.trace", group.config, propose)


def files(path: str | os.PathLike[str]) -> list[pathlib.Path]:
  """Returns the paths of the traces at `path`, a file or a folder.

  Raises:
    ValueError: a folder has no trace.
  """
  path = pathlib.Path(path)
  if not path.is_dir():
    return [path]
  unmerged = {
    p.with_name(p.name.rpartition(".")[0]) for p in _process_files(path, "*")
  }
  found = sorted(unmerged.union(path.glob("*.json.gz")))
  arguments.check(
    found != [],
    "ep.explain",
    f"{path} has no trace. If it was EP_TRACE: the program's groups must have"
    " had devices, and have ended. If ep.trace wrote a file there whose name"
    " does not end with .json.gz, name the file.",
  )
  return found


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
  """Reads a trace; returns the result of `merge`.

  First merges the files of the processes, in a folder or if `path` is missing.
  A folder must have the trace of one group.

  Raises:
    OSError: the file cannot be read.
    ValueError: it is not a trace, the folder has several, or the file of a
      process is missing.
  """
  (*others, file) = files(path)
  arguments.check(
    not others,
    "ep.explain",
    f"{path} has {1 + len(others)} traces; name one of them, as {file}.",
  )
  # Do not merge if the file exists: another process may have begun to write
  # the next trace to the same path.
  if file != pathlib.Path(path) or not file.exists():
    merge_files(file)
  data = file.read_bytes()
  try:
    if data.startswith(b"\x1f\x8b"):
      file_of_data = gzip.GzipFile(fileobj=io.BytesIO(data))
      data = file_of_data.read(_MOST_EXPANSION * len(data))
    merged: dict[str, Any] = json.loads(data)["ep"]
  except Exception as e:  # a damaged file can raise any error
    raise damaged(file, e) from e
  return merged


def damaged(path: str | os.PathLike[str], error: Exception) -> ValueError:
  """Converts an error that a damaged file caused to a `ValueError`."""
  return ValueError(
    f"ep.explain: {path} is not a file of ep.trace, or is damaged: {error!r}"
  )


def _process_files(folder: pathlib.Path, name: str) -> list[pathlib.Path]:
  """Returns the per-process files of traces whose name matches a pattern."""
  return sorted(folder.glob(f"{name}.part[0-9]*"))


def merge_files(path: pathlib.Path) -> None:
  """Writes a trace from the files of all processes, if such files exist.

  An incomplete file is merged only if another file has a failure.

  Raises:
    ValueError: the file of a process is missing, incomplete or damaged, or the
      trace cannot be written.
  """
  found = _process_files(path.parent, glob.escape(path.name))
  if not found:
    return
  texts = {
    p.name.rpartition(".part")[2]: p.read_text("utf-8", "replace")
    for p in found
  }
  try:
    heads = [json.loads(t.partition("\n")[0]) for t in texts.values() if t]
    processes = [*map(str, sorted({*heads[0]["processes"]}))]
  except Exception:  # the head of a file is missing or damaged
    processes = [*texts]
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
  except Exception as e:  # a damaged file can raise any error
    raise damaged(f"{path}.part*", e) from e
  data = json.dumps(content).encode()
  try:
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
  except OSError as e:
    raise ValueError(
      f"ep.trace: cannot write {path}: {e.strerror}; cure this, and run python"
      f" -m ep explain {path.parent}, which merges the files of the processes."
    ) from e
  for file in found:
    file.unlink()


def merge(texts: list[str]) -> dict[str, Any]:
  """Merges the texts of all processes; ep_ffi's trace.h describes their format.

  For each rank, an exchange has the measurements of the rank's own process, on
  the clock of the first process, or of its domain's first process if nothing
  relates their clocks. An op of a launch is left out if the processes
  have recorded it unequally often, because the trace began or ended during the
  launch. A process sees an arrival on another process after it happened, which
  bounds the offset of the two clocks. The result is the offset closest to 0.

  "processes" has the process of each rank of all domains, and "clocks" how
  exactly the clock of each process is known.

  "failures" has the failures of all processes. "killed" has the ranks of all
  domains whose processes wrote no last line, because they were killed.
  """
  heads: dict[int, dict[str, Any]] = {}
  seen: dict[int, _Events] = {}
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
  clocks = _clocks(seen, first, domains)
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
    processes=owners,
    clocks=clocks,
    lost=lost,
    failures=[failure for _, failure in failures],
    killed=[r for r, process in enumerate(owners) if process in killed],
    exchanges=exchanges,
  )


def _clocks(
  seen: dict[int, _Events], first: int, domains: np.ndarray
) -> dict[int, dict[str, Any]]:
  """Returns how far the clock of each process is ahead; see `_clock`.

  Exchanges compare a clock with the first known clock of the domain.
  """
  clocks: dict[int, dict[str, Any]] = {first: dict(offset_s=0.0, bound_s=0.0)}
  for owners in domains.tolist():
    known = next((p for p in owners if p in clocks), owners[0])
    clocks.setdefault(known, dict(offset_s=0.0, bound_s=None))
    for process in owners:
      if process not in clocks:
        clocks[process] = _clock(
          seen[known], seen[process], known, process, domains
        )
        clocks[process]["offset_s"] += clocks[known]["offset_s"]
  return clocks


def _clock(
  a: _Events, b: _Events, first: int, process: int, domains: np.ndarray
) -> dict[str, Any]:
  """Returns how far the clock of `b` is ahead of the clock of `a`.

  `bound_s` is the width of the bounds of the offset; None without bounds.
  """
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
  # The lower bound can exceed the upper one if clocks run at unequal rates.
  begin, end = sorted((max(low), min(high)))
  offset = float(np.clip(0, begin, end))
  return dict(offset_s=offset, bound_s=float(end - begin))
