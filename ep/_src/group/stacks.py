# SPDX-License-Identifier: Apache-2.0
"""Lets `python -m ep stuck` read the Python stacks of this process.

faulthandler writes the stacks when the process gets a signal. Unlike a Python
thread, it does so even if a thread in native code holds Python's lock. The
signal is a real-time signal, which neither Python nor JAX uses. If the program
uses the signal before it bootstraps a group, ep does not.

The stacks go to an anonymous file. A reader finds the file by its name,
ep_stacks_<signal>_<pid>, among the descriptors of the process. A forked child
inherits the descriptor. The default action of the signal terminates a process,
so a reader must check in /proc/<pid>/status that the process catches it.
"""

from __future__ import annotations

import faulthandler
import fcntl
import functools
import os
import pathlib
import re
import signal


@functools.cache
def offer() -> None:
  """Makes an unused signal write Python's stacks; does so only on Linux."""
  if not hasattr(os, "memfd_create"):
    return  # not Linux
  number = signal.SIGRTMAX - 7
  if _is_used(number):
    return
  try:
    file = os.memfd_create(f"ep_stacks_{number}_{os.getpid()}")
  except OSError:
    return  # too many open files; a group that needs a file raises an error
  os.fchmod(file, 0o600)
  # With O_APPEND, stacks begin at offset 0 after a reader has emptied the file.
  fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
  faulthandler.register(number, file, all_threads=True)


def _is_used(number: int) -> bool:
  """Returns whether this process catches or ignores a signal.

  `signal.getsignal` does not see handlers of native code.
  """
  status = pathlib.Path("/proc/self/status").read_text()
  masks = re.findall(r"^Sig(?:Cgt|Ign):\s*(\w+)", status, re.MULTILINE)
  return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)
