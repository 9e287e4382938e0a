# SPDX-License-Identifier: Apache-2.0
"""Tells a launcher the states of its ranks, by files; identifies namespaces.

The launcher sets EP_LAUNCH_STATE to a path. When a rank reaches a state, the
rank writes the time to the file `<path>.<state>`:

    joining   the rank waits for the other ranks in `ep.launch.initialize`
    joined    all ranks know each other
    ending    the rank has begun to terminate
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import time

VARIABLE = "EP_LAUNCH_STATE"


def tell(state: str) -> None:
  """Tells the launcher, if there is one, that this process reached `state`."""
  if path := os.environ.get(VARIABLE):
    # OSError: the file exists already, or the launcher has terminated.
    with contextlib.suppress(OSError), open(f"{path}.{state}", "x") as file:
      file.write(str(time.monotonic()))


def time_told(path: pathlib.Path, state: str) -> float | None:
  """Returns when the rank with EP_LAUNCH_STATE = `path` reached a state.

  The time is of `time.monotonic`; None if the rank has not reached the state.
  """
  try:
    return float(path.with_name(f"{path.name}.{state}").read_text())
  except (OSError, ValueError):
    return None


@functools.cache
def boot_id() -> str:
  """Returns the id of this machine's boot; raises OSError if not on Linux."""
  return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@functools.cache
def namespace(kind: str = "pid") -> str | None:
  """Returns the id of this process's Linux namespace; None if not on Linux.

  A process id is only valid in its namespace of the kind "pid".
  """
  try:
    return f"{boot_id()}/{os.readlink(f'/proc/self/ns/{kind}')}"
  except OSError:
    return None
