# SPDX-License-Identifier: Apache-2.0
"""Memory of a launcher in which its ranks keep snapshots of their state.

Each rank of an attempt gets one anonymous file (memfd) from its launcher, and
the files of the ranks before a restart, if they hold what the job may need. If
there are several hosts, each one also has a file for each rank of the host
before it, the last host being before the first. The layout of a file is:

    entry 0 | entry 1 | generation 0 | generation 1

A generation is an index, in JSON, and the bytes of arrays. An entry gives the
step, the place, the sizes and the checksum of the index. A rank erases the
entry before it writes a generation, and writes the entry last, so half a
snapshot has no entry.

A rank may begin a snapshot when all ranks have finished the one before. When
all ranks know that they need no file of an attempt any more, they empty it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import errno
import json
import mmap
import os
import pathlib
import re
import struct
from typing import Any, NamedTuple
import zlib

VARIABLE = "EP_LAUNCH_SNAPSHOTS"
_NAME = "ep_snapshot"  # of the files

_ENTRY = struct.Struct("=8sqqqqII")  # see Generation; the last is a checksum
_MAGIC = b"ep_snap1"
_PAGE = mmap.PAGESIZE


@dataclasses.dataclass(frozen=True)
class Generation:
  """A complete snapshot of one rank, in the file of that rank."""

  step: int
  begin: int  # position of the index in the file
  index_size: int
  size: int  # of the index and the arrays
  index_checksum: int

  def pack(self) -> bytes:
    fields = _ENTRY.pack(_MAGIC, *dataclasses.astuple(self), 0)[:-4]
    return fields + struct.pack("=I", zlib.crc32(fields))


class File:
  """The file of one rank; all errors are OSError or ValueError."""

  def __init__(self, fd: int):
    self.fd = fd

  def generations(self) -> list[Generation]:
    """Returns the complete generations, the newest first."""
    found = []
    for at in range(2):
      entry = os.pread(self.fd, _ENTRY.size, at * _ENTRY.size)
      if len(entry) == _ENTRY.size and entry.startswith(_MAGIC):
        generation = Generation(*_ENTRY.unpack(entry)[1:-1])
        if entry == generation.pack():
          found.append(generation)
    return sorted(found, key=lambda each: -each.step)

  def index(self, generation: Generation) -> Any:
    """Returns the index of a generation; ValueError if it is damaged."""
    text = self.read(generation.begin, generation.index_size)
    if zlib.crc32(text) != generation.index_checksum:
      raise ValueError("the index of a snapshot is damaged")
    return json.loads(text)

  def read(self, position: int, size: int) -> bytearray:
    """Returns bytes at a position; ValueError if they are not there."""
    data = bytearray(size)
    done = 0
    while done < size:
      step = os.preadv(self.fd, [memoryview(data)[done:]], position + done)
      if not step:
        raise ValueError("a snapshot is shorter than its index says")
      done += step
    return data

  def write(self, step: int, index: Any, arrays: Sequence[memoryview]) -> None:
    """Writes a generation over the older one.

    Args:
      index: JSON, at most twice as large as the first one.
      arrays: the same sizes each time.
    """
    text = json.dumps(index).encode()
    payload = sum(array.nbytes for array in arrays)
    have = self.generations()
    at = 0
    if os.fstat(self.fd).st_size == 0:
      pages = 1 + (2 * len(text) + payload) // _PAGE
      self._reserve(_PAGE + 2 * pages * _PAGE)
    capacity = (os.fstat(self.fd).st_size - _PAGE) // 2
    if len(text) + payload > capacity:
      raise ValueError(
        f"the state has {payload} bytes, more than the first one; snapshots of"
        " a run are all of the same state"
      )
    if have:
      at = int(have[0].begin == _PAGE)  # keep the newest
    os.pwrite(self.fd, bytes(_ENTRY.size), at * _ENTRY.size)
    begin = position = _PAGE + at * capacity
    for part in (memoryview(text), *arrays):
      position += _pwrite_all(self.fd, part.cast("B"), position)
    checksum = zlib.crc32(text)
    done = Generation(step, begin, len(text), position - begin, checksum)
    os.pwrite(self.fd, done.pack(), at * _ENTRY.size)

  def empty(self) -> None:
    os.ftruncate(self.fd, 0)

  def _reserve(self, size: int) -> None:
    """Allocates memory; Linux would kill a process if there is not enough."""
    if size > (available := _available()):
      raise OSError(
        errno.ENOMEM,
        f"ep.Snapshots: two generations of a rank's state need {size >> 20} MiB"
        f" of memory, but {available >> 20} MiB are available",
      )
    os.posix_fallocate(self.fd, 0, size)


def _available() -> int:
  """Returns the memory of this host that programs may allocate, in bytes."""
  text = pathlib.Path("/proc/meminfo").read_text()
  match = re.search(r"^MemAvailable: *(\d+) kB$", text, re.MULTILINE)
  return int(match[1]) << 10 if match else 1 << 63


def _pwrite_all(fd: int, data: memoryview, position: int) -> int:
  done = 0
  while done < data.nbytes:
    done += os.pwrite(fd, data[done:], position + done)
  return done


class Memory:
  """The files of a launcher, which live until it ends. Needs Linux."""

  def __init__(self) -> None:
    self._attempts: dict[int, dict[int, File]] = {}  # by restart and rank

  def begin(
    self, restart: int, ranks: int, own: range, copied: range
  ) -> list[Passed]:
    """Makes files for an attempt; returns what each rank of this host gets.

    Args:
      restart: the number of restarts so far.
      ranks: the number of ranks.
      own: the ranks of this host.
      copied: the ranks of another host, of which this host keeps copies.
    """
    for earlier, files in [*self._attempts.items()]:
      if not any(file.generations() for file in files.values()):
        self._close(earlier)
    old = [
      (earlier, [(rank, file.fd) for rank, file in files.items()])
      for earlier, files in self._attempts.items()
    ]
    new = {r: os.memfd_create(_NAME) for r in (*own, *copied)}
    for fd in new.values():
      os.fchmod(fd, 0o600)
    self._attempts[restart] = {r: File(fd) for r, fd in new.items()}
    passed = []
    for place, rank in enumerate(own):
      copies = [(r, new[r]) for r in copied[place :: len(own)]]
      fields = {
        "ranks": ranks,
        "own": new[rank],
        "copies": copies,
        "old": old,
        "place": place,
        "places": len(own),
      }
      fds = [
        new[rank],
        *(fd for _, files in (*old, (0, copies)) for _, fd in files),
      ]
      passed.append(Passed({VARIABLE: json.dumps(fields)}, fds))
    return passed

  def step(self) -> int | None:
    """Returns the newest step in all files of an attempt, or None."""
    for files in reversed(self._attempts.values()):
      steps = [{g.step for g in file.generations()} for file in files.values()]
      if common := set.intersection(*steps):
        return max(common)
    return None

  def close(self) -> None:
    for restart in [*self._attempts]:
      self._close(restart)

  def _close(self, restart: int) -> None:
    for file in self._attempts.pop(restart).values():
      os.close(file.fd)


class Passed(NamedTuple):
  """The variables and descriptors that a rank gets from its launcher."""

  env: Mapping[str, str]
  fds: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Inherited:
  """The files that a rank has inherited."""

  ranks: int  # of all hosts
  own: File
  copies: Mapping[int, File]  # for ranks of another host
  old: Mapping[int, Mapping[int, File]]  # by restart and rank
  place: int  # index of the rank on this host
  places: int  # number of ranks of this host


def inherited() -> Inherited | None:
  """Returns what this rank's launcher passed on, or None."""
  if not (text := os.environ.get(VARIABLE)):
    return None
  fields = json.loads(text)
  try:
    name = os.readlink(f"/proc/self/fd/{fields['own']}")
  except OSError:
    name = ""
  if name != f"/memfd:{_NAME} (deleted)":
    return None  # a program that a rank has started inherits only the variable

  def files(pairs: Sequence[tuple[int, int]]) -> Mapping[int, File]:
    return {rank: File(fd) for rank, fd in pairs}

  old = {restart: files(pairs) for restart, pairs in fields["old"]}
  own, copies = File(fields["own"]), files(fields["copies"])
  return Inherited(**fields | {"own": own, "copies": copies, "old": old})
