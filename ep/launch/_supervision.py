# SPDX-License-Identifier: Apache-2.0
"""Runs a launcher's processes, terminates them together, reports failures.

The docstring of `ep.launch.launch` specifies the behaviour.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time
from typing import NamedTuple, TextIO

from ep._src.base import processes
from ep.launch import _hosts as hosts

# Starts a rank that the kernel kills if the launcher dies.
_BECOME = """
import ctypes, os, signal, sys
launcher, *argv = sys.argv[1:]
if sys.platform == "linux":
  ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(launcher):  # the launcher is still alive
  os.execv(sys.executable, [sys.executable, *argv])
"""
_POLL_S = 0.05
_KILL_AFTER_S = 3.0  # time for a rank to dump its stacks, until it is killed
_TAIL_LINES = 40
_TAIL_BYTES = 1 << 20  # of a log, in which the cause of a failure is sought
_LINE = 1000  # characters of a line that are printed
_CHUNK = 1 << 20  # bytes of a log that are copied at a time
_LAST_COPY_S = 5.0  # time to copy the rest of a log, at the end
_TIMED_OUT = 124  # the exit code of timeout(1)

# _FRAME matches the lines of a traceback above the exception, _FATAL the last
# log line of C++ code that aborts.
_FRAME = re.compile(r'  File ".*", line \d+(, in |$)')
_FATAL = re.compile(r"F\d{4} \d\d:\d\d:\d\d")


class Process:
  """One process, its log, and the states that it writes (processes.py)."""

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
    self.where = f"; its log is {log}"
    self.code: int | None = None  # exit code; None: running, -n: signal n
    self.ended_at = 0.0  # earliest known time of its end
    self._state = state
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
    if self.code is None and self._process.poll() is not None:
      self.code = self._process.returncode
      # A killed rank gets an earlier time than ranks that fail because it died.
      latest = time.monotonic() - (_POLL_S if self.code < 0 else 0)
      self.ended_at = processes.time_told(self._state, "ending") or latest
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

  def last_lines(self, count: int) -> list[str]:
    with self.log.open("rb") as file:
      file.seek(max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
      text = file.read().decode(errors="replace")
    return [line[:_LINE] for line in text.splitlines()[-count:]]

  def told(self, state: str) -> bool:
    """Returns whether the process has written a state."""
    return processes.told(self._state, state)

  @property
  def was_alone(self) -> bool:
    """Whether the process exited with 0 before it joined the other ranks."""
    return self.code == 0 and not self.told("joined")

  @property
  def cause(self) -> str:
    """The line of the log that explains the failure of the process, or ""."""
    lines = self.last_lines(_TAIL_BYTES)
    if fatal := [line for line in lines if _FATAL.match(line)]:
      return fatal[-1]
    tail = lines[-_TAIL_LINES:]
    frames = [at for at, line in enumerate(tail) if _FRAME.match(line)]
    # Take the first line: some libraries (JAX) append advice to an exception.
    after = tail[1 + frames[-1] :] if frames else []
    exceptions = [line for line in after if not line.startswith(" ")]
    return (exceptions[:1] or tail[-1:] or [""])[0]

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


class Outcome(NamedTuple):
  """How the ranks of this host ended."""

  code: int  # the exit code of `launch`
  failure: str = ""  # the first failure; "" after a signal or a timeout
  failed_at: float = 0.0
  lost: tuple[int, ...] = ()  # indices of the ranks that may have caused it
  is_sure: bool = False  # whether they have


def watch(
  ranks: Sequence[Process],
  others: Sequence[Process],
  peers: Sequence[hosts.Host],
  signals: Sequence[int],
  timeout_at: float,
  grace_s: float,
  joined: Callable[[], None],
) -> Outcome:
  """Waits for ranks, kills them as `launch` documents, and reports failures.

  Also waits for the `peers`, and sends each one the result when everything else
  has ended. If one of the `others` (the coordination service) ends, that is a
  failure, whatever its exit code. Calls `joined` when all ranks have joined.
  """
  watched: list[Process | hosts.Host] = [*ranks, *others, *peers]
  ended: list[Process | hosts.Host] = []
  failed: list[Process | hosts.Host] = []
  outside = {*ranks}  # ranks that have not joined
  with _Follower(ranks[0].log):

    def wait(limit: float, condition: Callable[[], object] = bool) -> None:
      """Waits until no rank runs, `limit` has passed, or `condition` holds."""
      while True:
        ended.extend(p for p in watched if p not in ended and not p.running())
        failed.extend(p for p in ended if p not in failed and has_failed(p))
        failed.sort(key=lambda p: p.ended_at)
        arrived = {rank for rank in outside if rank.told("joined")}
        outside.difference_update(arrived)
        if arrived and not outside:
          joined()
        is_over = signals or failed
        rest = {*ranks, *(() if is_over else peers)} - {*ended}
        for peer in () if is_over else peers:
          if rest <= {peer}:
            peer.tell(0, _alone(ranks))
        if not rest or time.monotonic() > limit or condition():
          break
        time.sleep(_POLL_S)

    def has_failed(process: Process | hosts.Host) -> bool:
      others_wait = any(
        rank.told("joining") and not rank.told("joined")
        for rank in ranks
        if rank not in ended
      )
      is_missed = process.was_alone and others_wait
      return bool(process.code) or process in others or is_missed

    def is_ending() -> bool:
      return any(r.told("ending") for r in ranks if r not in ended)

    wait(timeout_at, lambda: signals or failed)
    grace_at = min(timeout_at, _in(grace_s))
    if failed:  # a rank that is still ending may have failed first
      wait(grace_at, lambda: signals or not is_ending())
    for peer in peers:
      if peer not in failed or not peer.code:  # this peer reported no failure
        peer.tell(*_end(signals, failed))
    if failed and not signals:
      wait(grace_at, lambda: signals)
    if signals:
      for rank in ranks:
        rank.send_signal(signals[0])
      wait(_in(grace_s))
    causes = [*failed]
    late = [p for p in watched if p not in (*ended, *others)]
    stuck = [rank for rank in ranks if rank in late]
    for rank in stuck:
      rank.send_signal(signal.SIGABRT)  # faulthandler dumps the rank's stacks
    wait(_in(_KILL_AFTER_S))

  if signals:
    return end_by(signals)
  if causes:
    first, *rest = causes
    _report(first, first.end, shown=first is ranks[0])
    for process in rest:
      _say_of(process, ": ".join(filter(None, [process.end, process.cause])))
    for rank in stuck:
      _say_of(rank, "was still running after another's failure")
    lost, is_sure = _lost(ranks, causes, stuck)
    named = [f"{rank.name} {rank.end}" for rank in lost if is_sure]
    failure = ", ".join(named) or f"{first.name} {first.end}"
    indices = tuple(map(ranks.index, lost))
    code = _exit_code(first)
    return Outcome(code, failure, first.ended_at, indices, is_sure)
  for process in late:
    _report(
      process, "was still running at the timeout", shown=process is ranks[0]
    )
  return Outcome(_TIMED_OUT if late else 0)


def end_by(signals: Sequence[int]) -> Outcome:
  """Reports a signal that ended the job, and returns the outcome."""
  say(f"ep.launch: ended by {signal.Signals(signals[0]).name}\n")
  return Outcome(128 + signals[0])


def _lost(
  ranks: Sequence[Process],
  failed: Sequence[Process | hosts.Host],
  stuck: Sequence[Process],
) -> tuple[Sequence[Process], bool]:
  """Returns ranks of this host that caused a failure, and whether it is sure.

  A rank that was killed is a cause. A rank that failed may only report another
  one: if most ranks fail, the ranks that run on may be the cause.
  """
  aborted = -signal.SIGABRT  # libraries abort a process whose peer is gone
  killed = [r for r in ranks if r in failed and (r.code or 0) < 0]
  if killed := [rank for rank in killed if rank.code != aborted]:
    return killed, True
  if stuck:
    return (stuck if len(stuck) < len(failed) else ()), False
  return [rank for rank in ranks if rank is failed[0]], False


def _alone(ranks: Sequence[Process]) -> str:
  """Returns a message to other hosts if a rank exited before joining, or ""."""
  return next((f"says: {r.name} {r.end}" for r in ranks if r.was_alone), "")


def _end(
  signals: Sequence[int], failed: Sequence[Process | hosts.Host]
) -> tuple[int, str]:
  """Returns the exit code of this launcher, and a message to other hosts."""
  if signals:
    name = signal.Signals(signals[0]).name
    return 128 + signals[0], f"was ended by {name}"
  if failed:
    return _exit_code(failed[0]), f"says: {failed[0].name} {failed[0].end}"
  return _TIMED_OUT, "was still running at the timeout"


def _exit_code(first: Process | hosts.Host) -> int:
  code = first.code or 1  # also if the coordinator exited with 0
  return 128 - code if code < 0 else code


def _in(seconds: float) -> float:
  return time.monotonic() + seconds


def _report(process: Process | hosts.Host, what: str, shown: bool) -> None:
  """Prints how a process ended, and the last lines of its log unless shown."""
  _say_of(process, what)
  if not shown:
    lines = process.last_lines(_TAIL_LINES)
    say("".join(f"  | {line}\n" for line in lines))


def _say_of(process: Process | hosts.Host, what: str) -> None:
  say(f"ep.launch: {process.name} {what}{process.where}\n")


def say(text: str) -> None:
  """Writes to stdout, or to stderr if stdout is closed."""
  for stream in (sys.stdout, sys.stderr):
    if write(stream, text):
      break


def write(stream: TextIO | None, text: str) -> bool:
  """Writes and flushes; returns False if that fails, as with a closed pipe.

  Escapes characters that the stream's encoding lacks.
  """
  if stream is None:
    return False
  try:
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()
  except (AttributeError, OSError, ValueError):  # no file; broken pipe; closed
    return False
  return True


class _Follower:
  """A thread that copies new bytes of a file to stdout, like `tail -f`.

  Only this thread waits if a reader of stdout has stopped reading.
  """

  def __init__(self, path: pathlib.Path):
    self._path = path
    self._is_over = threading.Event()
    self._thread = threading.Thread(target=self._run, daemon=True)

  def __enter__(self) -> None:
    self._thread.start()

  def __exit__(self, *exc_info: object) -> None:
    self._is_over.set()
    self._thread.join(_LAST_COPY_S)

  def _run(self) -> None:
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    is_last = False
    with self._path.open("rb") as file:
      while not is_last:
        is_last = self._is_over.wait(_POLL_S)
        size = os.fstat(file.fileno()).st_size  # a process may still write
        while file.tell() < size and (data := file.read(_CHUNK)):
          write(sys.stdout, decode(data))
