# SPDX-License-Identifier: Apache-2.0
"""Forks children of a rank, which may do anything but call JAX."""

import os
import weakref

from ep._src.group import bootstrap


def run_child(act):
  """Forks a child that calls `act`, and checks that it ends well."""
  pid = os.fork()
  if pid == 0:
    code = 1
    try:
      act()
      code = 0
    finally:
      os._exit(code)
  assert os.waitpid(pid, 0) == (pid, 0)


def run_exit_handlers():
  """Does what Python does at exit, except for JAX's own handlers.

  JAX's handlers use the parent's connection to the coordination service, and
  would end the parent, too.
  """
  bootstrap._close_all()
  weakref.finalize._exitfunc()
