# SPDX-License-Identifier: Apache-2.0
"""What this process holds of the system, for tests that it does not grow."""

from __future__ import annotations

import ctypes
import gc
import os
import pathlib
from typing import NamedTuple


class Footprint(NamedTuple):
  """At one time, or a difference.

  Attributes:
    memory: resident, in KiB.
    heap: what malloc has given out, in KiB. It may keep what it got back, and
      then there is room for much before more memory is resident.
    descriptors: open files and sockets.
    threads: of this process.
  """

  memory: int
  heap: int
  descriptors: int
  threads: int

  @classmethod
  def now(cls) -> Footprint:
    gc.collect()
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return cls(
      memory=pages * os.sysconf("SC_PAGE_SIZE") // 1024,
      heap=_heap_bytes() // 1024,
      descriptors=len(os.listdir("/proc/self/fd")),
      threads=len(os.listdir("/proc/self/task")),
    )

  def check_now(self, most: Footprint) -> str:
    """Fails if by now there is more than that much more.

    Returns what there was and is, to be printed.
    """
    fields = list(zip(self._fields, self, Footprint.now(), most, strict=True))
    told = ", ".join(f"{name} {was} -> {now}" for name, was, now, _ in fields)
    for name, was, now, more in fields:
      assert now <= was + more, f"{name} grew: {told}"
    return told


class _Mallinfo2(ctypes.Structure):
  _fields_ = [
    (name, ctypes.c_size_t)
    for name in (
      "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks"
      " keepcost"
    ).split()
  ]


def _heap_bytes() -> int:
  """0 where there is no glibc 2.33."""
  mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
  if mallinfo is None:
    return 0
  mallinfo.restype = _Mallinfo2
  info = mallinfo()
  return info.uordblks + info.hblkhd
