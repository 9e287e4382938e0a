# SPDX-License-Identifier: Apache-2.0
"""Measures the peak memory of this process, one run at a time (Linux)."""

from __future__ import annotations

import ctypes
import gc
import pathlib

_STATUS = pathlib.Path("/proc/self/status")
_CLEAR_REFS = pathlib.Path("/proc/self/clear_refs")


class Meter:
  """Measures the resident memory that a contender adds.

  Counts outputs and temporaries, but not inputs and programs. Counts shared
  memory that was allocated after the meter was made, in every run and in each
  process that touched it, because a communicator keeps that memory.
  """

  def __init__(self):
    self._shared = _kib("RssShmem")

  def start(self) -> None:
    """Starts a new peak."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # Prevents the reuse of freed memory.
    try:
      _CLEAR_REFS.write_text("5")  # resets the peak, see proc(5)
    except OSError:
      self._before = None
      return
    self._before = _kib("VmRSS") - (_kib("RssShmem") - self._shared)

  def peak_bytes(self) -> float:
    """Returns the peak since `start`, or NaN if the kernel cannot reset it."""
    if self._before is None:
      return float("nan")
    return 1024.0 * max(0, _kib("VmHWM") - self._before)


def _kib(field: str) -> int:
  for line in _STATUS.read_text().splitlines():
    name, value = line.split(":", 1)
    if name == field:
      return int(value.split()[0])
  raise ValueError(f"no {field} in {_STATUS}")
