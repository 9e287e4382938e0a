# SPDX-License-Identifier: Apache-2.0
"""Watches ranks, terminates them together, and reports failures.

The docstring of `ep.launch.launch` specifies the behaviour.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
import math
import os
import pathlib
import signal
import sys
import threading
import time
from typing import TextIO

from ep.launch._process import POLL_S, Process, TAIL_LINES

_KILL_AFTER_S = 3.0  # time for a rank to dump its stacks, until it is killed
_CHUNK = 1 << 20  # bytes of a log that are copied at a time
_LAST_COPY_S = 5.0  # time to copy the rest of a log, at the end
_TIMED_OUT = 124  # the exit code of timeout(1)


def watch(
  ranks: Sequence[Process],
  coordinator: Process | None,
  signals: Sequence[int],
  timeout_at: float,
  grace_s: float,
) -> int:
  """Waits for ranks, and reports failures; returns the exit code of `launch`.

  Ends ranks as `launch` documents; a rank that ignores SIGABRT still runs
  afterwards. If the coordinator ends, that is a failure, whatever its code.
  """
  watched = [*ranks, coordinator] if coordinator else [*ranks]
  ended: list[Process] = []
  failed: list[Process] = []
  with _Follower(ranks[0].log):

    def wait(limit: float, condition: Callable[[], object] = bool) -> None:
      """Waits until no rank runs, `limit` has passed, or `condition` holds."""
      while True:
        ended.extend(p for p in watched if p not in ended and not p.running())
        failed.extend(p for p in ended if p not in failed and has_failed(p))
        failed.sort(key=lambda p: p.ended_at)
        if not still_running() or time.monotonic() > limit or condition():
          break
        time.sleep(POLL_S)

    def still_running() -> list[Process]:
      return [rank for rank in ranks if rank not in ended]

    def has_failed(process: Process) -> bool:
      others_wait = any(
        rank.told("joining") and not rank.told("joined")
        for rank in still_running()
      )
      is_missed = process.was_alone and others_wait
      return bool(process.code) or process is coordinator or is_missed

    def is_ending() -> bool:
      return any(rank.told("ending") for rank in still_running())

    wait(timeout_at, lambda: signals or failed)
    grace_at = min(timeout_at, time.monotonic() + grace_s)
    if failed:  # a rank that is still ending may have failed first
      wait(grace_at, lambda: signals or not is_ending())
    if failed and not signals:
      wait(grace_at, lambda: signals)
    if signals:
      for rank in ranks:
        rank.send_signal(signals[0])
      wait(time.monotonic() + grace_s)
    causes, stuck = [*failed], still_running()
    for rank in stuck:
      rank.send_signal(signal.SIGABRT)  # faulthandler dumps the rank's stacks
    wait(time.monotonic() + _KILL_AFTER_S)

  if signals:
    _say(f"ep.launch: ended by {signal.Signals(signals[0]).name}\n")
    return 128 + signals[0]
  code = _report(ranks, causes, stuck)
  is_split = len(ranks) > 1 and 0 < _name_lone(ranks) < len(ranks)
  return code or int(is_split)


def _report(
  ranks: Sequence[Process], failed: Sequence[Process], stuck: Sequence[Process]
) -> int:
  """Prints how the job ended; returns the exit code of `launch`.

  `failed` begins with the process that failed first. `stuck` are the ranks that
  did not end by themselves.
  """
  if not (failed or stuck):
    return 0
  _name_left(ranks, failed[0].ended_at if failed else math.inf)
  if not failed:
    for rank in stuck:
      what = "was still running at the timeout"
      _say_of(rank, what, with_log=rank is not ranks[0])
    return _TIMED_OUT
  first, *rest = failed
  _say_of(first, first.end, with_log=first is not ranks[0])
  for process in rest:
    _say_of(process, ": ".join(filter(None, [process.end, process.cause])))
  for rank in stuck:
    _say_of(rank, "was still running after another's failure")
  code = first.code or 1  # also if the coordinator exited with 0
  return 128 - code if code < 0 else code


def _name_left(ranks: Sequence[Process], before: float) -> None:
  """Names ranks that succeeded before a failure; XLA's errors do not."""
  left = [r for r in ranks if r.code == 0 and r.ended_at < before]
  if left:
    names = ", ".join(rank.name for rank in left)
    _say(
      f"ep.launch: {names} ended with exit code 0 before the others, which may"
      f" have waited for {'it' if len(left) == 1 else 'them'}\n"
    )


def _name_lone(ranks: Sequence[Process]) -> int:
  """Names ranks that did not join the others, and returns their number."""
  alone = [r for r in ranks if not (r.told("joining") or r.told("joined"))]
  if alone:
    names = ", ".join(rank.name.removeprefix("rank ") for rank in alone)
    _write(
      sys.stderr,
      f"ep.launch: of {len(ranks)} ranks, these have not joined the others:"
      f" {names}. Such a rank sees its own devices only, and takes itself for"
      " the whole job. Call ep.launch.initialize() before anything else touches"
      " JAX.\n",
    )
  return len(alone)


def _say_of(process: Process, what: str, with_log: bool = False) -> None:
  """Prints how a process ended, and the last lines of its log if asked."""
  _say(f"ep.launch: {process.name} {what}; its log is {process.log}\n")
  if with_log:
    lines = process.last_lines(TAIL_LINES)
    _say("".join(f"  | {line}\n" for line in lines))


def _say(text: str) -> None:
  """Writes to stdout, or to stderr if stdout is closed."""
  for stream in (sys.stdout, sys.stderr):
    if _write(stream, text):
      break


def _write(stream: TextIO | None, text: str) -> bool:
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
        is_last = self._is_over.wait(POLL_S)
        size = os.fstat(file.fileno()).st_size  # a process may still write
        while file.tell() < size and (data := file.read(_CHUNK)):
          _write(sys.stdout, decode(data))
