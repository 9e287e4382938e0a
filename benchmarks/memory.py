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

  Outputs and temporaries count, inputs and programs do not. Shared memory that
  appeared since the meter was made counts in each of the contender's runs, once
  in every process that has touched it, because a communicator keeps it.
  """

  def __init__(self):
    self._shared = _kib("RssShmem")

  def start(self) -> None:
    """Starts a new peak."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else freed memory would be used again
    try:
      _CLEAR_REFS.write_text("5")  # resets the peak, see proc(5)
    except OSError:
      self._before = None
      return
    self._before = _kib("VmRSS") - (_kib("RssShmem") - self._shared)

  def peak_bytes(self) -> float:
    """Returns the peak since `start`; NaN if the kernel does not give it."""
    if self._before is None:
      return float("nan")
    return 1024.0 * max(0, _kib("VmHWM") - self._before)


def _kib(field: str) -> int:
  for line in _STATUS.read_text().splitlines():
    name, value = line.split(":", 1)
    if name == field:
      return int(value.split()[0])
  raise ValueError(f"no {field} in {_STATUS}")
