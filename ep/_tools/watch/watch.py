# SPDX-License-Identifier: Apache-2.0
"""Watches the steps of this process."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
import contextlib
import math
import os
import socket
import sys
import threading
import time
import traceback
from typing import Any, ClassVar, TypeVar

import jax

from ep._src.base import arguments, compat
from ep._src.group import ending
from ep._tools.watch.report import report
from ep._tools.watch.sharing import Record, Sharing

_EXIT_CODE = 70  # as in ep_ffi
_MAX_BEAT_S, _MAX_POLL_S = 5.0, 0.25
_MAX_CALLS = 12  # of a stack
_OUTPUT_S = 1.0  # limit for output
_Tree = TypeVar("_Tree")


class watch:  # noqa: N801 - used like a function
  """Reports, on each process, why the job stands still.

      with ep.watch(stall_s=300):
        for batch in data:
          with ep.watch.step() as launched:
            state, loss = launched(train_step(state, batch))

  If no step of this process begins or finishes for `stall_s`, the process
  prints one report to stderr: which processes have not begun the step, which
  launched it and did not finish it, since when, on which hosts, and their
  Python stacks. The report says if a process is stopped, dead or out of reach.

  Works with all programs and platforms, also without a group of ep. All
  processes run the same steps in the context, and each process runs its steps
  in one thread. A process has one context at a time. It publishes its state in
  the key-value store of `jax.distributed` every 5 s, or `stall_s / 8` if that
  is shorter. A compilation or checkpoint that is longer than `stall_s` also
  causes a report.

  Args:
    stall_s: seconds without progress until the report.
    exit_after_s: seconds after the stall until the process terminates, with
      exit code 70; `math.inf` for never.

  Raises:
    TypeError, ValueError: an argument is not a positive number of seconds.
    RuntimeError: this process is in such a context already.
  """

  _current: ClassVar[watch | None] = None

  def __init__(self, *, stall_s: float = 300.0, exit_after_s: float = math.inf):
    what = "ep.watch"
    self._stall_s = arguments.seconds(what, "stall_s", stall_s)
    self._exit_after_s = arguments.seconds(what, "exit_after_s", exit_after_s)

  def __enter__(self) -> watch:
    if watch._current:
      raise RuntimeError("ep.watch: this process is watched already.")
    self._steps, self._has_left = _Steps(), False
    self._host = socket.gethostname()
    self._beat_s = min(self._stall_s / 8, _MAX_BEAT_S)
    self._sharing = Sharing(self._record, self._beat_s)
    self._stop = threading.Event()
    self._thread = threading.Thread(
      target=self._look, name="ep.watch", daemon=True
    )
    self._thread.start()
    watch._current = self
    return self

  def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
    watch._current = None
    self._stop.set()
    self._has_left = True
    self._steps.raised = ending.first_line(error) if error else ""
    self._steps.poll()
    self._sharing.close()

  @staticmethod
  def step(
    name: str = "",
  ) -> contextlib.AbstractContextManager[Callable[[_Tree], _Tree]]:
    """Returns a context that counts a step; no effect outside `ep.watch`.

    The context gives a function. Pass it the results of the step's programs,
    once; it returns them. The step has finished when the first or the last of
    these arrays, whichever is smaller, is ready. If the block calls no such
    function, the step has finished at the end of the block. A step inside
    another step finishes with it.

    Args:
      name: a name for the reports, such as "train" or "evaluate".
    """
    if current := watch._current:
      return current._steps.step(name)
    return contextlib.nullcontext(lambda results: results)

  def _record(self) -> Record:
    steps = self._steps
    return Record(
      host=self._host,
      pid=os.getpid(),
      time=time.time(),
      still_s=time.monotonic() - steps.changed,
      begun=steps.begun,
      launched=steps.launched,
      finished=steps.finished,
      name=steps.name,
      raised=steps.raised,
      has_left=self._has_left,
      stack="" if self._has_left else _stack(steps.thread),
    )

  def _look(self) -> None:
    """Runs in a thread: finds that the process stands still."""
    report_at, is_told, sharing = math.inf, False, self._sharing
    while not self._stop.wait(min(_MAX_POLL_S, self._beat_s)):
      self._steps.poll()
      now = time.monotonic()
      still_s = now - self._steps.changed
      if still_s < self._stall_s:
        if is_told:
          self._print(f"ep.watch: process {sharing.me} goes on.")
        report_at, is_told = math.inf, False
        sharing.is_reading = False
      elif not sharing.is_reading:
        sharing.is_reading = True
        # Then a process without a new record is silent.
        report_at = now + sharing.silent_s + 2 * self._beat_s
      elif not is_told and now > report_at:
        records = sharing.records | {sharing.me: self._record()}
        count, fault = compat.distributed_count(), sharing.fault()
        self._print("\n".join(report(sharing.me, count, records, fault)))
        is_told = True
      elif is_told and still_s > self._stall_s + self._exit_after_s:
        self._print(
          f"ep.watch: process {sharing.me} ends: exit_after_s ="
          f" {self._exit_after_s:g} s later it still stands still."
        )
        ending.within_limit(_OUTPUT_S, ending.exit_now, _EXIT_CODE)
        os._exit(_EXIT_CODE)  # without the output that blocks

  def _print(self, text: str) -> None:
    def write() -> None:
      with contextlib.suppress(OSError, ValueError):  # a broken pipe; closed
        print(text, file=sys.stderr, flush=True)

    ending.within_limit(_OUTPUT_S, write)


class _Steps:
  """The numbers of steps of this process.

  One thread runs the steps. `poll` is thread-safe: its lock keeps `_pending`.
  """

  def __init__(self) -> None:
    self.begun = self.launched = self.finished = 0
    self.name = self.raised = ""
    self.changed = time.monotonic()
    self.thread = threading.get_ident()  # the thread of the steps
    self._open = self._ended = 0  # blocks
    # Pairs of the number of a step and an array that the step returned.
    self._new: collections.deque[tuple[int, Any]] = collections.deque()
    self._pending: list[tuple[int, Any]] = []
    self._lock = threading.Lock()

  @contextlib.contextmanager
  def step(self, name: str) -> Iterator[Callable[[_Tree], _Tree]]:
    self.poll()  # releases the arrays of finished steps
    number = self.begun
    self.name, self.raised, self.thread = name, "", threading.get_ident()
    self._open += 1
    self.begun, self.changed = number + 1, time.monotonic()

    def launched(results: _Tree) -> _Tree:
      leaves = jax.tree.leaves(results)
      ends = [x for x in leaves[:1] + leaves[-1:] if isinstance(x, jax.Array)]
      if ends:  # a large one would occupy memory for longer
        self._new.append((number, min(ends, key=lambda x: x.size)))
      self.launched = max(self.launched, number + 1)
      self.changed = time.monotonic()
      return results

    try:
      yield launched
    except BaseException as e:
      self.raised = ending.first_line(e)
      raise
    finally:
      self._open -= 1
      if not self._open:
        self._ended = self.launched = self.begun
      self.changed = time.monotonic()

  def poll(self) -> None:
    """Counts finished steps."""
    with self._lock:
      ended = self._ended  # before `_new`, to which a block appends earlier
      while self._new:
        self._pending.append(self._new.popleft())
      ready = 0
      for i, (_, array) in enumerate(self._pending):
        if not array.is_deleted():
          if not _is_ready(array):
            break
          ready = i + 1
      del self._pending[:ready]
      # A donated array tells nothing, but it delays the number of finished
      # steps until a later array is ready.
      later = [x for x in self._pending[1:] if not x[1].is_deleted()]
      self._pending[1:] = later
      finished = min([ended, *(number for number, _ in self._pending)])
      if finished != self.finished:
        self.finished, self.changed = finished, time.monotonic()


def _is_ready(array: Any) -> bool:
  try:
    return bool(array.is_ready())
  except jax.errors.JaxRuntimeError:  # the program donates it just now
    return False


def _stack(thread: int) -> str:
  """Returns the calls of a thread, the latest first, without most of JAX's."""
  frames = sys._current_frames()
  frame = frames.get(thread) or frames.get(threading.main_thread().ident or 0)
  calls, is_jax = [], False
  for f, line in traceback.walk_stack(frame):
    path, was_jax = f.f_code.co_filename, is_jax
    is_jax = "/jax/_src/" in path
    if not (is_jax and was_jax):
      calls.append(f'File "{path}", line {line} in {f.f_code.co_name}')
  return "\n".join(calls[:_MAX_CALLS])
