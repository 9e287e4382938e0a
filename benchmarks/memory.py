# SPDX-License-Identifier: Apache-2.0
"""Measures how much memory a run adds to this process at its peak (Linux)."""

from __future__ import annotations

import ctypes
import gc
import pathlib

_STATUS = pathlib.Path("/proc/self/status")
_CLEAR_REFS = pathlib.Path("/proc/self/clear_refs")


class Meter:
  """A meter of the resident memory that a contender adds.

  The meter counts outputs and temporaries, but not inputs and programs. Shared
  memory from after `__init__` counts in every run, and in each process that
  touched it, because a communicator keeps its shared memory.
  """

  def __init__(self):
    self._shared = _kib("RssShmem")

  def start(self) -> None:
    """Resets the peak."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # or freed memory would be reused
    try:
      _CLEAR_REFS.write_text("5")  # resets VmHWM, see proc(5)
    except OSError:
      self._before = None
      return
    self._before = _kib("VmRSS") - (_kib("RssShmem") - self._shared)

  def peak_bytes(self) -> float:
    """Returns the peak since `start`, or NaN if peaks cannot be reset."""
    if self._before is None:
      return float("nan")
    return 1024.0 * max(0, _kib("VmHWM") - self._before)


def _kib(field: str) -> int:
  for line in _STATUS.read_text().splitlines():
    name, value = line.split(":", 1)
    if name == field:
      return int(value.split()[0])
  raise ValueError(f"no {field} in {_STATUS}")
