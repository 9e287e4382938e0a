"""What this process holds of the system, for tests that it does not grow."""

from __future__ import annotations

import gc
import os
import pathlib
from typing import NamedTuple


class Footprint(NamedTuple):
  """At one time.

  Attributes:
    memory: resident, in KiB.
    descriptors: open files and sockets.
    threads: of this process.
  """

  memory: int
  descriptors: int
  threads: int

  @classmethod
  def now(cls) -> Footprint:
    gc.collect()
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return cls(
      memory=pages * os.sysconf("SC_PAGE_SIZE") // 1024,
      descriptors=len(os.listdir("/proc/self/fd")),
      threads=len(os.listdir("/proc/self/task")),
    )

  def check_now(self, *, memory: int, threads: int) -> str:
    """Fails if there is more by now than so much more, or any descriptor.

    Returns what there was and is, to be printed.
    """
    now = Footprint.now()
    told = ", ".join(
      f"{field} {a} -> {b}"
      for field, a, b in zip(self._fields, self, now, strict=True)
    )
    assert now.memory <= self.memory + memory, told
    assert now.descriptors <= self.descriptors, told
    assert now.threads <= self.threads + threads, told
    return told
