# SPDX-License-Identifier: Apache-2.0
"""Terminates this process, and tells the others why."""

from __future__ import annotations

import atexit
from collections.abc import Callable
import contextlib
import os
import sys
import threading
from typing import Any, NoReturn

import jax

from ep._src.group import liveness
from ep._src.native import processes

_LAST_WORDS_S = 5.0  # limit for requests of a process that fails


def announce(*, exit_at_once: bool) -> None:
  """Makes this process, one of several ranks, tell how it ends.

  When the process exits, it tells its launcher and the other ranks. After an
  uncaught exception, it prints which ranks caused the exception by their
  absence.

  Args:
    exit_at_once: whether an uncaught exception terminates the process without
      Python's orderly exit, and `exit_code` returns the last code passed to
      `sys.exit`.
  """
  rank, report, leave = os.getpid(), sys.excepthook, sys.exit

  def tell(error: BaseException | None) -> None:
    how = "exited" if error is None else f"failed ({first_line(error)})"
    # Without the coordination service, the process cannot tell anyone.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      liveness.announce(left=f"has {how}")
    if error is not None and (sentence := liveness.blame(str(error))):
      print(sentence, file=sys.stderr)

  def tell_at_exit() -> None:
    if os.getpid() == rank:  # not a forked child
      processes.tell("ending")
      tell(getattr(sys, "last_value", None))  # of an uncaught exception

  def report_and_exit(kind: Any, error: Any, trace: Any) -> None:
    if os.getpid() == rank:
      # The launcher learns which rank ends first before other ranks notice.
      processes.tell("ending")
    report(kind, error, trace)
    if os.getpid() == rank:
      within_limit(_LAST_WORDS_S, tell, error)
    exit_now(1)

  def keep_and_exit(status: Any = None, /) -> NoReturn:
    if threading.current_thread() is threading.main_thread():
      keep_and_exit.status = status  # type: ignore[attr-defined]
    leave(status)

  atexit.register(tell_at_exit)
  if exit_at_once:
    sys.excepthook, sys.exit = report_and_exit, keep_and_exit


def exit_code() -> int:
  """Returns the code that `announce` has kept if it means failure, else 1."""
  status = getattr(sys.exit, "status", None)
  return status if isinstance(status, int) and status else 1


def exit_now(code: int) -> NoReturn:
  """Terminates this process without running further exit handlers."""
  for stream in sys.stdout, sys.stderr:
    # There is no stream, its reader has gone, or the program has closed it.
    with contextlib.suppress(AttributeError, OSError, ValueError):
      stream.flush()
  os._exit(code)


def within_limit(limit_s: float, act: Callable[..., Any], *args: Any) -> None:
  """Calls a function that may block; returns after `limit_s` nevertheless."""
  thread = threading.Thread(target=act, args=args, daemon=True)
  thread.start()
  thread.join(limit_s)


def first_line(error: BaseException) -> str:
  """Returns the beginning of a description of `error`."""
  return f"{type(error).__name__}: {error}".partition("\n")[0][:200]
