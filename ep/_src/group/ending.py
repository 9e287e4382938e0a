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

from ep._src.base import processes
from ep._src.group import liveness

_LAST_WORDS_S = 5.0  # limit for requests of a process that fails


def take_over() -> None:
  """Installs hooks that run when this process, one of several ranks, exits.

  An uncaught exception terminates the process immediately. The process tells
  its launcher before other ranks can notice, so that the launcher knows which
  rank ended first. It tells the other ranks that it leaves, and prints which
  ranks have caused the exception by their absence. `exit_code` returns the last
  code passed to `sys.exit`.
  """
  rank, report, leave = os.getpid(), sys.excepthook, sys.exit

  def tell_ranks(how: str) -> None:
    # Without the coordination service, the process cannot tell anyone.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      liveness.announce(left=how)

  def tell_all() -> None:
    if os.getpid() == rank:  # not a forked child
      processes.tell("ending")
      tell_ranks("has exited")

  def last_words(error: BaseException) -> None:
    tell_ranks(f"has failed ({first_line(error)})")
    if sentence := liveness.blame(str(error)):
      print(sentence, file=sys.stderr)

  def report_and_exit(kind: Any, error: Any, trace: Any) -> None:
    if os.getpid() == rank:
      processes.tell("ending")
    report(kind, error, trace)
    if os.getpid() == rank:
      within_limit(_LAST_WORDS_S, last_words, error)
    exit_now(1)

  def keep_and_exit(status: Any = None, /) -> NoReturn:
    if threading.current_thread() is threading.main_thread():
      keep_and_exit.status = status  # type: ignore[attr-defined]
    leave(status)

  atexit.register(tell_all)
  sys.excepthook, sys.exit = report_and_exit, keep_and_exit


def exit_code() -> int:
  """Returns the last code passed to `sys.exit` if it means failure, else 1."""
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
