# SPDX-License-Identifier: Apache-2.0
"""Limits the number of ranks on a machine by its memory and processors."""

from __future__ import annotations

import contextlib
import os
import pathlib

# A rank that has imported JAX has about 100 MB of private memory. At the start,
# each rank uses a processor for a second or two, while other ranks wait for it.
_RANK_BYTES = 128 << 20
_RANKS_PER_PROCESSOR = 64
_DEVICE_BYTES = 1 << 20  # the thread of a CPU device, and a few arrays

# Files with the memory limit of a container.
_MEMORY_LIMITS = (
  "/sys/fs/cgroup/memory.max",
  "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


def check(num_processes: int, devices_per_process: int) -> None:
  """Raises `ValueError` if this machine cannot hold these processes."""
  memory, processors = _memory(), os.cpu_count() or 1
  each = _RANK_BYTES + devices_per_process * _DEVICE_BYTES
  most = min(memory // each, processors * _RANKS_PER_PROCESSOR)
  if num_processes > most:
    raise ValueError(
      f"ep.launch: num_processes = {num_processes} with devices_per_process ="
      f" {devices_per_process}, but this machine can hold {most} such"
      f" processes: it has {memory >> 20} MiB of memory and {processors}"
      f" processors, for {each >> 20} MiB of each process and"
      f" {_RANKS_PER_PROCESSOR} processes on each processor; start fewer, or"
      " pass --oversubscribe (oversubscribe=True) to try it."
    )


def _memory() -> int:
  """Returns the memory of this machine or its container, in bytes."""
  found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
  for path in _MEMORY_LIMITS:
    with contextlib.suppress(OSError, ValueError):  # "max" means no limit
      found.append(int(pathlib.Path(path).read_text()))
  return min(found)
