# SPDX-License-Identifier: Apache-2.0
"""Says which ranks wait, for whom, and what the others do: python -m ep stuck.

    python -m ep stuck         # all runs of this user on this host
    python -m ep stuck 4242    # the part of one process

For each group of the backend "host" it prints which ranks wait in which op of
which layer and step, for how long and for whom; of every other rank the last
op; and the Python stacks of the process of a rank that has been in no op for a
second. The processes need not answer for it, but for the stacks: engines of
groups publish what they do at least once per second, and a process that can run
writes its stacks when it is asked to.

Of processes whose groups have another backend it prints the stacks alone.

What it reads may be of any process of this user, so nothing in it is trusted.
This file needs neither JAX nor the rest of the package.
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
import time
import typing
from typing import Any, BinaryIO, TypeVar

_HEADER = struct.Struct("=8sQQQQ")  # shared_text.h explains it
_MAX_BYTES = 1 << 26  # of a text
_IDLE_S = 1.0  # A rank that has been in no op for so long is asked why.
_ANSWER_S = 0.6  # for stacks
_QUIET_S = 0.05  # Stacks to which nothing came for so long are complete.
_OLD_S = 3.0  # Processes that run publish more often.
_Class = TypeVar("_Class")


@dataclasses.dataclass(frozen=True)
class Wait:
  """An op in which ranks wait."""

  op: str
  waiting: str  # the ranks
  missing: str
  since: float  # of time.monotonic(), here as elsewhere


@dataclasses.dataclass(frozen=True)
class Other:
  """A rank of the process that does not wait."""

  rank: str
  last: str  # its last op; "" if it has run none
  since: float


@dataclasses.dataclass(frozen=True)
class Record:
  """What a process knew of one of its groups at a time."""

  pid: int  # as the process itself sees it
  time: float
  group: str
  job: str  # equal on all processes of a run, if it has several
  process: int
  waits: tuple[Wait, ...]
  others: tuple[Other, ...]
  left_out: int

  @classmethod
  def parse(cls, text: bytes) -> Record:
    """Reads a record; raises `ValueError` if it is none."""
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
  """A process that has groups."""

  pid: int
  records: tuple[Record, ...]
  faults: tuple[str, ...]  # why other records cannot be read
  stacks: tuple[str, int] | None  # the path of the file, and the signal


def _read(cls: type[_Class], fields: Any, **known: Any) -> _Class:
  """Returns an object of a dataclass, whose other values `fields` has."""
  for name, kind in typing.get_type_hints(cls).items():
    if name not in known:
      known[name] = _value(fields, name, kind)
  return cls(**known)


def _value(fields: Any, name: str, kind: type) -> Any:
  """Returns a value of this type; raises `ValueError` if there is none."""
  value = fields.get(name) if isinstance(fields, dict) else None
  if type(value) is not kind:
    raise ValueError(f'it has no field "{name}" that is a {kind.__name__}')
  if isinstance(value, float) and not 0 <= value < 1e12:
    raise ValueError(f'"{name}" is {value}, which is no time')
  return _printable(value) if isinstance(value, str) else value


def _printable(text: str) -> str:
  """Returns a text that does not control a terminal."""
  return "".join(c if c.isprintable() else "?" for c in text)


# ---- What processes have published


def find(pids: Iterable[int]) -> list[Process]:
  """Returns those of the processes that have groups."""
  found = []
  for pid in pids:
    with contextlib.suppress(OSError):  # it ends, or is not to be seen
      if (process := _read_process(pid)) is not None:
        found.append(process)
  return found


def own_pids() -> Iterator[int]:
  """Yields the processes of this user."""
  for entry in os.scandir("/proc"):
    with contextlib.suppress(OSError):
      if entry.name.isdecimal() and entry.stat().st_uid == os.geteuid():
        yield int(entry.name)


def _read_process(pid: int) -> Process | None:
  records, faults, stacks = [], [], None
  inside = _pid_inside(pid)  # A forked child has what is of its parent.
  for entry in os.scandir(f"/proc/{pid}/fd"):
    if _is_memory(entry.path, "ep_status"):
      try:
        record = Record.parse(_read_text(entry.path))
      except OSError:
        continue  # the group has ended meanwhile
      except ValueError as e:
        faults.append(_printable(str(e)))
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
    return None  # it is closed meanwhile


def _read_text(path: str) -> bytes:
  """Returns the last text at a path; raises `ValueError` if there is none."""
  file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
  try:
    for _ in range(100):
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
      if os.pread(file, 16, 0) == header[:16]:  # was not changed meanwhile
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


def _pid_inside(pid: int) -> int:
  """Returns the number of a process in its own namespace."""
  return int((_status(pid, "NSpid") or str(pid)).split()[-1])


def _is_stopped(pid: int) -> bool:
  return _status(pid, "State")[:1] in ("T", "t")


def _command(pid: int) -> str:
  words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
  line = _printable(b" ".join(words).decode(errors="replace").strip())
  return line if len(line) <= 100 else line[:97] + "..."


# ---- Stacks


class _Request:
  """A request for the stacks of a process."""

  def __init__(self, process: Process):
    self._file: BinaryIO | None = None
    self._refusal = self._ask(process)

  def _ask(self, process: Process) -> str:
    """Sends the request; returns why it cannot be sent, or ""."""
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
    handle = os.pidfd_open(process.pid)  # of this process, whatever follows it
    try:
      if not int(_status(process.pid, "SigCgt"), 16) >> (number - 1) & 1:
        return f"it does not catch the signal {number} any more"
      file = os.fdopen(os.open(path, os.O_RDWR | os.O_CLOEXEC), "r+b", 0)
      # The process may have closed its file and opened another meanwhile.
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
    """Returns the bytes that have come; 1 if there will be none."""
    return os.fstat(self._file.fileno()).st_size if self._file else 1

  def answer(self) -> str:
    """Returns the stacks, or why there are none. To be called once."""
    if not self._file:
      return self._refusal
    with self._file as file:
      text = os.pread(file.fileno(), _MAX_BYTES, 0).decode(errors="replace")
      file.truncate(0)
    if not text:
      return f"it has not shown its stacks within {_ANSWER_S:g} s"
    lines = [f"    {_printable(line)}" for line in text.splitlines()]
    return "\n".join(["its Python stacks, the latest call first:", *lines])


def _request(process: Process) -> _Request | None:
  """Asks for stacks if they may say why others wait."""
  try:
    if _is_idle(process) or _is_stopped(process.pid):
      return _Request(process)
  except (OSError, ValueError):
    pass  # it has ended
  return None


def _is_idle(process: Process) -> bool:
  now = time.monotonic()
  return not process.records or any(
    now - other.since > _IDLE_S
    for record in process.records
    for other in record.others
  )


def _wait_for(requests: Iterable[_Request]) -> None:
  """Waits until all answers are complete, but not too long."""
  deadline = time.monotonic() + _ANSWER_S
  sizes: list[int] = []
  while time.monotonic() < deadline:
    before, sizes = sizes, [request.size() for request in requests]
    if all(sizes) and sizes == before:
      return
    time.sleep(_QUIET_S)


# ---- The report


def _groups(processes: list[Process]) -> list[list[tuple[int, Record]]]:
  """Returns the records of each group, with the processes that have them."""
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
  waits: dict[tuple[str, str, str], float] = {}  # Each process knows of most.
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
  """Yields the lines of the report about some processes."""
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
  """Returns a text that has decimal digits only."""
  if not text.isdecimal():
    raise argparse.ArgumentTypeError(f"{text!r} is no process id")
  return text


def main(args: list[str]) -> int | str:
  """Prints the report; returns the exit code, or what is wrong."""
  parser = argparse.ArgumentParser(
    prog="python -m ep stuck",
    description="Says which ranks wait, for whom, and what the others do.",
  )
  parser.add_argument(
    "pid",
    nargs="?",
    type=_number,
    help="of a process; by default all runs of this user on this host",
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
