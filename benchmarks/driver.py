# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterable
import inspect
import sys
from typing import Any

from absl import app, flags, logging

from ep import launch

ROUNDS = flags.DEFINE_integer("rounds", 20, "runs that are timed", 1)


def make_main(
  measure: Callable[[], int | None],
  worlds: Callable[[], Iterable[dict[str, Any]]],
) -> Callable:
  """Returns a `main` that calls `measure` on all ranks of each process layout.

  `measure` returns the exit code. A nonzero code terminates the program.
  `worlds` yields the keyword arguments of `ep.launch.launch` per layout.
  """

  def main(argv):
    if len(argv) > 1:
      raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    if launch.inside_launcher():
      launch.initialize()
      return measure()
    program = [inspect.getfile(measure), *sys.argv[1:]]
    codes = (launch.launch(program, **world) for world in worlds())
    return next(filter(None, codes), 0)

  return main
