# SPDX-License-Identifier: Apache-2.0
"""Measures resources of this process, to detect leaks."""

from __future__ import annotations

import ctypes
import gc
import os
import pathlib
from typing import NamedTuple


class Footprint(NamedTuple):
  """The resources of this process at one time, or limits of their growth.

  Attributes:
    memory: resident memory, in KiB.
    heap: memory allocated by malloc, in KiB. It shows a leak sooner than
      `memory`, because malloc may keep freed memory for later.
    descriptors: open files and sockets.
    threads: threads of this process.
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
    """Fails if a resource has grown by more than `most`; returns a report."""
    fields = list(zip(self._fields, self, Footprint.now(), most, strict=True))
    text = ", ".join(f"{name} {was} -> {now}" for name, was, now, _ in fields)
    for name, was, now, more in fields:
      assert now <= was + more, f"{name} grew: {text}"
    return text


class _Mallinfo2(ctypes.Structure):
  _fields_ = [
    (name, ctypes.c_size_t)
    for name in (
      "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks"
      " keepcost"
    ).split()
  ]


def _heap_bytes() -> int:
  """Returns the bytes allocated by malloc, or 0 before glibc 2.33."""
  mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
  if mallinfo is None:
    return 0
  mallinfo.restype = _Mallinfo2
  info = mallinfo()
  return int(info.uordblks + info.hblkhd)
