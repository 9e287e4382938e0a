# SPDX-License-Identifier: Apache-2.0
"""Runs a rank and then ends all processes that it started.

    keeper.py PID ARGUMENTS...

PID is the launcher's, and ARGUMENTS are passed to Python. A process that a rank
starts may move to a session of its own, and a launcher that dies by SIGKILL can
end nothing. So each rank has a keeper as its parent. The kernel sends a SIGHUP
to the keeper when the launcher dies, and makes it the parent of every
descendant of the rank whose own parent has died. A keeper that kills its
children until it has none has thus ended all of the rank's descendants.

Signals are passed on to the rank, except that SIGHUP kills it. The exit code is
the rank's, 128 + n if it died of signal n.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import ctypes
import os
import pathlib
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGABRT}
_AWAITED = {signal.SIGHUP, signal.SIGCHLD, *_PASSED_ON}


def main(launcher: int, argv: Sequence[str]) -> int:
  # From here on signals are taken one by one, so that none is missed.
  mask = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
  # A parent that ignores the signal passes that on.
  signal.signal(signal.SIGCHLD, signal.SIG_DFL)
  _prctl(_PR_SET_CHILD_SUBREAPER, 1)
  _prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
  if os.getppid() != launcher:
    return 1  # the launcher has died already
  me = os.getpid()
  rank = os.fork()
  if rank == 0:
    _become(me, mask, argv)
  code = None
  while code is None:
    signum = signal.sigwait(_AWAITED)
    if signum == signal.SIGHUP:
      os.kill(rank, signal.SIGKILL)
    elif signum in _PASSED_ON:
      os.kill(rank, signum)
    code = _reap(rank)
  while any([_kill(pid) for pid in _children()]):
    os.wait()
  return 128 - code if code < 0 else code


def _become(
  keeper: int, mask: set[signal.Signals], argv: Sequence[str]
) -> None:
  """Turns a process that `keeper` forked into the rank."""
  _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
  if os.getppid() != keeper:
    sys.exit(1)
  os.setsid()  # signals to the rank's process group do not reach the keeper
  signal.pthread_sigmask(signal.SIG_SETMASK, mask)
  os.execv(sys.executable, [sys.executable, *argv])


def _prctl(option: int, value: int) -> None:
  if sys.platform == "linux":
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _reap(rank: int) -> int | None:
  """Reaps the children that have ended; returns the rank's code, or None."""
  code = None
  with contextlib.suppress(ChildProcessError):
    while (ended := os.waitpid(-1, os.WNOHANG))[0]:
      if ended[0] == rank:
        code = os.waitstatus_to_exitcode(ended[1])
  return code


def _children() -> Iterator[int]:
  for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
    with contextlib.suppress(OSError):
      fields = stat.read_text(errors="replace").rpartition(")")[2].split()
      if int(fields[1]) == os.getpid():
        yield int(stat.parent.name)


def _kill(pid: int) -> bool:
  """Kills a process; returns False if it runs as another user."""
  try:
    os.kill(pid, signal.SIGKILL)
  except PermissionError:
    return False
  return True


if __name__ == "__main__":
  sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
