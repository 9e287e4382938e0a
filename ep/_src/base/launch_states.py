# SPDX-License-Identifier: Apache-2.0
"""How far a rank has come: the rank says it, and its launcher reads it.

The launcher names a path in a variable. The rank writes a file for each state,
whose path has the state's name at the end. The file holds the first time at
which the rank said so:

    joining   the rank waits for the other ranks in `ep.launch.initialize`
    joined    all ranks know each other
    ending    the rank has begun to end
"""

from __future__ import annotations

import contextlib
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
