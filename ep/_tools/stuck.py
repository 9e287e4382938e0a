# SPDX-License-Identifier: Apache-2.0
"""Says which ranks of a hanging job wait for which: python -m ep stuck.

    python -m ep stuck         # all runs of this user on this host
    python -m ep stuck 4242    # one process

For each group of the backend "host" it prints:

* the ranks that wait: in which op, layer and step, for how long, for which rank
* the last op of every other rank
* the Python stacks of a process with a rank that has been in no op for a second

The native engine of each group publishes its state at least once per second, in
an anonymous file, so the report of states needs no answer from the processes.
For stacks, a signal asks a process to write its stacks to another such file.
For groups of other backends, the command prints only the stacks.

Any process of this user can publish such a file, so the command does not trust
their contents. This file imports neither JAX nor the rest of the package, so on
a busy machine one can also run it as a program.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import re
import signal
import struct
import sys
import time
import typing
from typing import Any, BinaryIO, TypeVar

_HEADER = struct.Struct("=8sQQQQ")  # see shared_text.h
_MAX_BYTES = 1 << 26  # limit for a state, or for stacks
_IDLE_S = 1.0  # asks for the stacks of a rank after this time without an op
_ANSWER_S = 0.6  # limit of the wait for stacks
_QUIET_S = 0.05  # takes stacks as complete after this time without new bytes
_OLD_S = 3.0  # reports the age of an older state
_Class = TypeVar("_Class")


@dataclasses.dataclass(frozen=True)
class Wait:
  """An op in which ranks wait. All times are of time.monotonic()."""

  op: str
  waiting: str  # the ranks that wait
  missing: str
  since: float


@dataclasses.dataclass(frozen=True)
class Other:
  """A rank of the process that does not wait."""

  rank: str
  last: str  # its last op, or ""
  since: float


@dataclasses.dataclass(frozen=True)
class Record:
  """The state of a group, as one process published it."""

  pid: int  # the process's id in its PID namespace
  time: float
  group: str
  job: str  # equal on all processes of a run; "" for a single process
  process: int
  waits: tuple[Wait, ...]
  others: tuple[Other, ...]
  left_out: int

  @classmethod
  def parse(cls, text: bytes) -> Record:
    """Parses a record; raises `ValueError` if the text is no record."""
    try:
      fields = json.loads(text)
    except RecursionError as e:
      raise ValueError("it is nested too deeply") from e
    return _read(
      cls,
      fields,
      waits=tuple(_read(Wait, x) for x in _value(fields, "waits", list)),
      others=tuple(_read(Other, x) for x in _value(fields, "others", list)),
    )


@dataclasses.dataclass(frozen=True)
class Process:
  """A process that has groups of ep."""

  pid: int
  records: tuple[Record, ...]
  faults: tuple[str, ...]  # errors of unreadable records
  stacks: tuple[str, int] | None  # path of the file for stacks, and the signal


def _read(cls: type[_Class], fields: Any, **known: Any) -> _Class:
  """Makes a dataclass from `known` values and from JSON values in `fields`."""
  for name, kind in typing.get_type_hints(cls).items():
    if name not in known:
      known[name] = _value(fields, name, kind)
  return cls(**known)


def _value(fields: Any, name: str, kind: type) -> Any:
  """Returns a field of a JSON object; raises `ValueError` if not a `kind`."""
  value = fields.get(name) if isinstance(fields, dict) else None
  if type(value) is not kind:
    raise ValueError(f'it has no field "{name}" that is a {kind.__name__}')
  if isinstance(value, float) and not 0 <= value < 1e12:
    raise ValueError(f'"{name}" is {value}, which is no time')
  return printable(value) if isinstance(value, str) else value


def printable(text: str) -> str:
  """Replaces control characters, which could control the user's terminal."""
  return "".join(c if c.isprintable() else "?" for c in text)


# ---- Published states


def find(pids: Iterable[int]) -> list[Process]:
  """Returns the processes that have groups of ep."""
  found = []
  for pid in pids:
    with contextlib.suppress(OSError):  # not readable, or not alive
      if (process := _read_process(pid)) is not None:
        found.append(process)
  return found


def own_pids() -> Iterator[int]:
  for entry in os.scandir("/proc"):
    with contextlib.suppress(OSError):
      if entry.name.isdecimal() and entry.stat().st_uid == os.geteuid():
        yield int(entry.name)


def _read_process(pid: int) -> Process | None:
  records, faults, stacks = [], [], None
  # The process's id in its PID namespace, to skip files that contain another
  # id: a forked child inherits the files of its parent.
  inside = int((_status(pid, "NSpid") or str(pid)).split()[-1])
  for entry in os.scandir(f"/proc/{pid}/fd"):
    if _is_memory(entry.path, "ep_status"):
      try:
        record = Record.parse(_read_text(entry.path))
      except OSError:
        continue  # the group was closed
      except ValueError as e:
        faults.append(printable(str(e)))
        continue
      if record.pid == inside:
        records.append(record)
    elif match := _is_memory(entry.path, rf"ep_stacks_(\d\d)_{inside}"):
      stacks = entry.path, int(match[1])
  if not records and not faults and stacks is None:
    return None
  return Process(pid, tuple(records), tuple(faults), stacks)


def _is_memory(path: str, name: str) -> re.Match[str] | None:
  """Matches the name of the anonymous file at a path of /proc."""
  try:
    return re.fullmatch(rf"/memfd:{name} \(deleted\)", os.readlink(path))
  except OSError:
    return None  # the file was closed


def _read_text(path: str) -> bytes:
  """Returns the last published text; raises `ValueError` if there is none."""
  # The process may have reused the descriptor's number, for a pipe that blocks.
  file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
  try:
    for _ in range(100):
      # The kernel copies one read in any order, but no read overtakes another:
      # each read ends with a memory barrier, as it releases its page.
      start = os.pread(file, 16, 0)
      header = os.pread(file, _HEADER.size, 0)
      if len(header) < _HEADER.size or not header.startswith(b"ep_text1"):
        raise ValueError("it does not begin as a record of this version does")
      _, number, max_bytes, *sizes = _HEADER.unpack(header)
      if number == 0:
        raise ValueError("the group has only just begun")
      size = sizes[number % 2]
      if not size <= max_bytes <= _MAX_BYTES:
        raise ValueError(f"it has {size} bytes in a buffer of {max_bytes}")
      at = _HEADER.size + number % 2 * max_bytes
      text = os.pread(file, size, at)
      if start == header[:16] == os.pread(file, 16, 0):  # no new text meanwhile
        return text
    raise ValueError("it changes too fast")
  finally:
    os.close(file)


# ---- The system's view of a process


def _status(pid: int, name: str) -> str:
  """Returns a field of /proc/<pid>/status."""
  text = pathlib.Path(f"/proc/{pid}/status").read_text()
  match = re.search(rf"^{name}:\s*(.*)$", text, re.MULTILINE)
  return match[1] if match else ""


def _is_stopped(pid: int) -> bool:
  return _status(pid, "State")[:1] in ("T", "t")


def _command(pid: int) -> str:
  words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
  line = printable(b" ".join(words).decode(errors="replace").strip())
  return line if len(line) <= 100 else line[:97] + "..."


# ---- Stacks


class _Request:
  """A request for the stacks of a process."""

  def __init__(self, process: Process):
    self._file: BinaryIO | None = None
    self._refusal = self._ask(process)

  def _ask(self, process: Process) -> str:
    """Sends the signal; returns "", or why the process cannot answer."""
    if _is_stopped(process.pid):
      return (
        "it is stopped, by SIGSTOP or a debugger, and cannot show its stacks;"
        f" kill -CONT {process.pid} lets it go on"
      )
    if process.stacks is None:
      return (
        "it does not show its stacks, because it had another use for the"
        f" signal; try py-spy dump --pid {process.pid}"
      )
    path, number = process.stacks
    # Unlike a process id, a pidfd never refers to a later process.
    handle = os.pidfd_open(process.pid)
    try:
      if not int(_status(process.pid, "SigCgt"), 16) >> (number - 1) & 1:
        return f"it does not catch the signal {number} any more"
      file = os.fdopen(os.open(path, os.O_RDWR | os.O_CLOEXEC), "r+b", 0)
      # The process may have reused the descriptor's number for another file.
      if not _is_memory(f"/proc/self/fd/{file.fileno()}", r"ep_stacks_\d+_\d+"):
        return "it has closed the file for its stacks"
      try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        return "another ep stuck reads its stacks now; try again"
      file.truncate(0)
      signal.pidfd_send_signal(handle, number)
      self._file = file
    finally:
      os.close(handle)
    return ""

  def size(self) -> int:
    """Returns the size of the stacks so far; 1 if no signal was sent."""
    return os.fstat(self._file.fileno()).st_size if self._file else 1

  def answer(self) -> str:
    """Returns the stacks, or why there are none. May be called once."""
    if not self._file:
      return self._refusal
    with self._file as file:
      text = os.pread(file.fileno(), _MAX_BYTES, 0).decode(errors="replace")
      file.truncate(0)
    if not text:
      return f"it has not shown its stacks within {_ANSWER_S:g} s"
    lines = [f"    {printable(line)}" for line in text.splitlines()]
    return "\n".join(["its Python stacks, the latest call first:", *lines])


def _request(process: Process) -> _Request | None:
  """Asks an idle or stopped process for its stacks."""
  now = time.monotonic()
  is_idle = not process.records or any(
    now - other.since > _IDLE_S
    for record in process.records
    for other in record.others
  )
  try:
    if is_idle or _is_stopped(process.pid):
      return _Request(process)
  except (OSError, ValueError):
    pass  # the process has ended
  return None


def _wait_for(requests: Iterable[_Request]) -> None:
  """Waits until all answers are complete, at most `_ANSWER_S`."""
  deadline = time.monotonic() + _ANSWER_S
  sizes: list[int] = []
  while time.monotonic() < deadline:
    before, sizes = sizes, [request.size() for request in requests]
    if all(sizes) and sizes == before:
      return
    time.sleep(_QUIET_S)


# ---- The report


def _groups(processes: list[Process]) -> list[list[tuple[int, Record]]]:
  """Returns, for each group, its records and their process ids."""
  groups: dict[tuple[str, str], list[tuple[int, Record]]] = {}
  for process in processes:
    for record in process.records:
      job = record.job or str(process.pid)
      groups.setdefault((job, record.group), []).append((process.pid, record))
  return list(groups.values())


def _lines_of_group(records: list[tuple[int, Record]]) -> Iterator[str]:
  pids = ", ".join(str(pid) for pid, _ in records)
  ids = f"process {pids}" if len(records) == 1 else f"processes {pids}"
  yield f'group "{records[0][1].group}", {ids}:'
  now = time.monotonic()
  new = [record for _, record in records if now - record.time <= _OLD_S]
  yield from _lines_of_records(new)
  for pid, record in records:
    if (age := now - record.time) > _OLD_S:
      yield f"  This is what process {pid} knew {age:.1f} s ago:"
      yield from _lines_of_records([record])
    if record.left_out:
      yield f"  Process {pid} left out {record.left_out} lines."


def _lines_of_records(records: list[Record]) -> Iterator[str]:
  # Several processes may report the same wait: print the longest time.
  waits: dict[tuple[str, str, str], float] = {}
  for record in records:
    for wait in record.waits:
      key = wait.op, wait.waiting, wait.missing
      seconds = max(record.time - wait.since, 0.0)
      waits[key] = max(seconds, waits.get(key, 0.0))
  for (op, waiting, missing), seconds in waits.items():
    yield f"  {op}: {waiting} waited {seconds:.1f} s for {missing}"
  for record in records:
    for other in record.others:
      did = f"last in {other.last}" if other.last else "in no op yet"
      seconds = max(time.monotonic() - other.since, 0.0)
      yield f"  {other.rank}: waits for no rank; {did}, {seconds:.1f} s ago"


def report(processes: list[Process]) -> Iterator[str]:
  requests = {p.pid: r for p in processes if (r := _request(p))}
  for records in _groups(processes):
    yield from _lines_of_group(records)
  _wait_for(requests.values())
  for process in processes:
    lines = [
      f"it has a record that cannot be read: {f}" for f in process.faults
    ]
    if not process.records and not process.faults:
      lines.append(
        'it has no open group of the backend "host". In ops of "xla" XLA moves'
        ' the rows, and those of "nccl" wait on the GPU, so that only its'
        " stacks are known"
      )
    if request := requests.get(process.pid):
      lines.append(request.answer())
    with contextlib.suppress(OSError):
      command = _command(process.pid)
      for line in lines:
        yield f"process {process.pid} ({command}): {line}"


def _number(text: str) -> str:
  if not text.isdecimal():
    raise argparse.ArgumentTypeError(f"{text!r} is no process id")
  return text


def main(args: list[str]) -> int | str:
  """Prints the report; returns the exit code, or an error text."""
  parser = argparse.ArgumentParser(
    prog="python -m ep stuck",
    description="Says which ranks of a hanging job wait for which.",
  )
  parser.add_argument(
    "pid",
    nargs="?",
    type=_number,
    help="process id; by default all runs of this user on this host",
  )
  pid = parser.parse_args(args).pid
  if not hasattr(os, "pidfd_open") or not os.path.exists("/proc/self/fd"):
    return "ep stuck: this system has no /proc and pidfd; it needs Linux."
  if pid is None:
    processes = find(own_pids())
    if not processes:
      print("No process of this user on this host has a group of ep.")
  else:
    try:
      is_own = os.stat(f"/proc/{pid}").st_uid == os.geteuid()
    except OSError:
      return f"ep stuck: there is no process {pid} on this host."
    if not is_own:
      return f"ep stuck: process {pid} is another user's; ask as that user."
    processes = find([int(pid)])
    if not processes:
      print(f"Process {pid} has no group of ep.")
  for line in report(processes):
    print(line)
  return 0


if __name__ == "__main__":  # without JAX, whose import takes a second
  sys.exit(main(sys.argv[1:]))
