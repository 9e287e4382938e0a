# SPDX-License-Identifier: Apache-2.0
"""Writes the report of a job that stands still."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterator, Mapping
import itertools

from ep._tools.watch.sharing import Record

_MAX_NAMES = 8  # of hosts, or process ids


def report(
  me: int, count: int, records: Mapping[int, Record], fault: str
) -> Iterator[str]:
  """Yields the lines of the report of process `me` of `count`.

  Args:
    me: this process.
    count: the number of processes of the job.
    records: the known states of processes, `me` included.
    fault: why the job's store cannot be used, or "".
  """
  # The last record of a silent process is old, but `me` is not silent.
  step = min(r.finished for r in records.values() if not r.silent_s)
  yield (
    f"ep.watch: process {me} of {count} stands still for"
    f" {records[me].still_s:.0f} s. Step {step} is the first that some process"
    " has not finished:"
  )
  groups: dict[tuple[int, str, str], list[int]] = collections.defaultdict(list)
  for process, record in records.items():
    order, what = _progress(record, step)
    if record.silent_s:
      order, what = -1, _silence(record)
    groups[order, what, record.stack].append(process)
  for (_, what, stack), found in sorted(groups.items()):
    still_s = max(records[p].silent_s or records[p].still_s for p in found)
    where = _where([records[p] for p in found])
    calls = " Python:" if stack else ""
    yield f"  {_names(found)} ({where}): {what}, for {still_s:.0f} s.{calls}"
    yield from (f"    {_printable(line)}" for line in stack.splitlines())
  if fault:
    yield (
      f"  The job's key-value store {fault}. The coordinator of jax.distributed"
      " or the network is down, so states of other processes may be old or"
      " missing."
    )
  if unknown := [p for p in range(count) if p not in records]:
    yield f"  {_names(unknown)}: unknown; no record of ep.watch."


def _progress(record: Record, step: int) -> tuple[int, str]:
  """Returns a position in the report, and a state relative to `step`."""
  raised, last = _printable(record.raised), f"step {record.begun - 1}"
  last += f' ("{_printable(record.name)}")' if record.name else ""
  if record.has_left:
    why = f" by {raised}" if raised else ""
    return 1, f"left ep.watch{why}, after {record.begun} steps"
  if raised:
    return 0, f"raised {raised} in {last}, and began none since"
  if record.begun <= step:
    after = f"; finished {last}" if record.begun else ""
    return 2, f"has not begun step {step}{after}"
  if record.launched <= step:
    return 3, f"began {last}, and is in its block"
  if record.finished <= step:
    return 4, f"launched {last}, but step {step} has not finished"
  return 5, f"has finished step {step}, and began {last}"


def _silence(record: Record) -> str:
  if record.state == "dead":
    why = "is dead"
  elif record.state == "stopped":
    why = f"is stopped, by SIGSTOP or a debugger (kill -CONT {record.pid})"
  else:
    why = (
      "is silent: its host or network is gone, it is stopped, or native code"
      " holds Python's lock"
    )
  return f"{why}. Its last record: {_progress(record, record.finished)[1]}"


def _names(found: Collection[int]) -> str:
  """Returns "process 3", or ranges as "processes 0-2, 5"."""
  ranges = []
  ordered = enumerate(sorted(found))
  for _, run in itertools.groupby(ordered, lambda x: x[1] - x[0]):
    (_, first), *others = run
    ranges.append(f"{first}-{others[-1][1]}" if others else f"{first}")
  return ("process " if len(found) == 1 else "processes ") + ", ".join(ranges)


def _where(records: list[Record]) -> str:
  hosts = sorted({_printable(record.host) for record in records})
  return f"{_first(hosts)}, pid {_first([str(r.pid) for r in records])}"


def _first(names: list[str]) -> str:
  others = ", ..." if len(names) > _MAX_NAMES else ""
  return ", ".join(names[:_MAX_NAMES]) + others


def _printable(text: str) -> str:
  """Replaces control characters, which could control the user's terminal."""
  return "".join(c if c.isprintable() else "?" for c in text)
