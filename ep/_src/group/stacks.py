# SPDX-License-Identifier: Apache-2.0
"""Lets `python -m ep stuck` see the Python stacks of this process.

faulthandler writes the stacks when the process gets a signal. Unlike a thread
of Python, it also does so while another thread holds Python's lock in native
code. The signal is a real-time signal, which neither Python nor JAX uses, and
a program that uses it before it bootstraps a group keeps it.

The stacks go to an anonymous file. Its name, ep_stacks_<signal>_<pid>, is what
a reader finds among the descriptors of the process. A forked child has the
descriptor, too, and no groups. The default action of the signal would end a
process, so a reader must see in /proc/<pid>/status that it is caught.
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
  """Writes stacks from now on, if this system can and the signal is free."""
  if not hasattr(os, "memfd_create"):
    return  # not Linux
  number = signal.SIGRTMAX - 7
  if _is_used(number):
    return
  try:
    file = os.memfd_create(f"ep_stacks_{number}_{os.getpid()}")
  except OSError:
    return  # A group that needs a descriptor will say that there is none.
  os.fchmod(file, 0o600)
  # A reader empties the file, and then the next stacks are at its begin.
  fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)
  faulthandler.register(number, file, all_threads=True)


def _is_used(number: int) -> bool:
  """Returns whether this process catches or ignores a signal.

  `signal.getsignal` does not know of handlers in native code.
  """
  status = pathlib.Path("/proc/self/status").read_text()
  masks = re.findall(r"^Sig(?:Cgt|Ign):\s*(\w+)", status, re.MULTILINE)
  return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)
