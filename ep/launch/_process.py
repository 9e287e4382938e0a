# SPDX-License-Identifier: Apache-2.0
"""Starts one process of the launcher, and reads its log and its states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

from ep._src.native import processes

# Starts a rank that the kernel kills if the launcher dies.
_BECOME = """
import ctypes, os, signal, sys
launcher, *argv = sys.argv[1:]
if sys.platform == "linux":
  ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(launcher):  # the launcher is still alive
  os.execv(sys.executable, [sys.executable, *argv])
"""
POLL_S = 0.05  # between two looks at a process
TAIL_LINES = 40
_TAIL_BYTES = 1 << 20  # of a log, in which the cause of a failure is sought
_LINE = 1000  # characters of a line that are printed

# _FRAME matches the lines of a traceback above the exception, _FATAL the last
# log line of C++ code that aborts.
_FRAME = re.compile(r'  File ".*", line \d+(, in |$)')
_FATAL = re.compile(r"F\d{4} \d\d:\d\d:\d\d")
_PF_EXITING = 4  # a flag of /proc/<pid>/stat; see the kernel's sched.h


def _is_exiting(pid: int) -> bool:
  """Returns whether the kernel is ending a process, if the system tells it.

  The kernel closes the sockets of a process afterwards, so other ranks can
  notice the end before a parent can wait for the process.
  """
  with contextlib.suppress(OSError, IndexError):
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    return bool(int(stat.rpartition(")")[2].split()[6]) & _PF_EXITING)
  return False


class Process:
  """A process, its log, and the states that it writes (processes.py)."""

  def __init__(
    self,
    name: str,
    argv: Sequence[str],
    log: pathlib.Path,
    env: Mapping[str, str],
    state: pathlib.Path,
  ):
    self.name = name.replace("_", " ")
    self.log = log
    self.code: int | None = None  # exit code; None: running, -n: signal n
    self.ended_at = 0.0  # earliest known time of its end
    self._state = state
    self._ran_at = time.monotonic()  # latest known time at which it ran
    with log.open("wb") as stdout:
      self._process = subprocess.Popen(
        [sys.executable, "-ISc", _BECOME, str(os.getpid()), *argv],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        env={**env, processes.VARIABLE: str(state)},
        start_new_session=True,  # it gets signals only from this launcher
      )

  def running(self) -> bool:
    """Returns whether the process runs.

    At its end, sets `code` and `ended_at`, and kills its process group.
    """
    now = time.monotonic()
    if self.code is None and self._process.poll() is None:
      if not _is_exiting(self._process.pid):
        self._ran_at = now
    elif self.code is None:
      self.code = self._process.returncode
      # A rank that was killed or called os._exit told nothing. It gets an
      # earlier time than ranks that fail because it died.
      told = processes.time_told(self._state, "ending")
      self.ended_at = told or self._ran_at
      with contextlib.suppress(OSError):  # the group has no process left
        os.killpg(self._process.pid, signal.SIGKILL)
    return self.code is None

  def send_signal(self, signum: int) -> None:
    self._process.send_signal(signum)

  def kill(self) -> None:
    """Kills the process and its process group, if the process runs."""
    self._process.kill()
    self._process.wait()
    self.running()

  def told(self, state: str) -> bool:
    """Returns whether the process has written a state."""
    return processes.time_told(self._state, state) is not None

  @property
  def was_alone(self) -> bool:
    """Whether the process exited with 0 before it joined the other ranks."""
    return self.code == 0 and not self.told("joined")

  @property
  def end(self) -> str:
    """A description of how the process ended."""
    if self.was_alone:
      return (
        "ended with exit code 0 before it joined the other ranks, which wait"
        " for it; all ranks must call ep.launch.initialize()"
      )
    if self.code is None or self.code >= 0:
      return f"failed with exit code {self.code}"
    why = "; out of memory?" if self.code == -signal.SIGKILL else ""
    return f"was killed by signal {-self.code}{why}"

  def last_lines(self, count: int) -> list[str]:
    with self.log.open("rb") as file:
      file.seek(max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
      text = file.read().decode(errors="replace")
    return [line[:_LINE] for line in text.splitlines()[-count:]]

  @property
  def cause(self) -> str:
    """The line of the log that explains the failure of the process, or ""."""
    lines = self.last_lines(_TAIL_BYTES)
    if fatal := [line for line in lines if _FATAL.match(line)]:
      return fatal[-1]
    tail = lines[-TAIL_LINES:]
    frames = [at for at, line in enumerate(tail) if _FRAME.match(line)]
    # Take the first line: some libraries (JAX) append advice to an exception.
    after = tail[1 + frames[-1] :] if frames else []
    exceptions = [line for line in after if not line.startswith(" ")]
    return (exceptions[:1] or tail[-1:] or [""])[0]
