# SPDX-License-Identifier: Apache-2.0
"""Processes: which share a namespace, and how far each rank has come.

A rank says how far it has come, and its launcher reads it. The launcher names a path in a variable. The rank writes a file for each state,
whose path has the state's name at the end. The file holds the first time at
which the rank said so:

    joining   the rank waits for the other ranks in `ep.launch.initialize`
    joined    all ranks know each other
    ending    the rank has begun to end
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import time

VARIABLE = "EP_LAUNCH_STATE"


def tell(state: str) -> None:
  """Tells the launcher that started this process, if one did."""
  if path := os.environ.get(VARIABLE):
    # The file is there already, or that launcher has ended.
    with contextlib.suppress(OSError), open(f"{path}.{state}", "x") as file:
      file.write(str(time.monotonic()))


def told(path: pathlib.Path, state: str) -> bool:
  """Returns whether the rank with this path has said a state."""
  return _file(path, state).exists()


def time_told(path: pathlib.Path, state: str) -> float | None:
  """Returns when the rank said a state, by `time.monotonic`; None if not."""
  try:
    return float(_file(path, state).read_text())
  except (OSError, ValueError):
    return None


def _file(path: pathlib.Path, state: str) -> pathlib.Path:
  return path.with_name(f"{path.name}.{state}")


@functools.cache
def boot_id() -> str:
  """Returns the id of this boot of the machine. Only Linux has one.

  Raises:
    OSError: this is another system.
  """
  return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@functools.cache
def namespace(kind: str = "pid") -> str | None:
  """Returns what identifies a namespace of this process, or None.

  Within one of the kind "pid", a process id has a meaning.
  """
  try:
    return f"{boot_id()}/{os.readlink(f'/proc/self/ns/{kind}')}"
  except OSError:
    return None
