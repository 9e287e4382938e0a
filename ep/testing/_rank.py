# SPDX-License-Identifier: Apache-2.0
"""Runs a task in a rank of _ranks.py; arguments: LOCATION TASK FOLDER SEED."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import importlib
import operator
import os
import pathlib
import signal
import sys
import traceback
from typing import Any

import jax

from ep import launch
from ep.testing import _ranks
from ep.testing._declarations import Subject
from ep.testing._rules import error_of, RULES
from ep.testing._variants import Bench, Draw, USUAL, Variant

Note = dict[str, Any]  # results of a process, which _ranks.py reads


def processes(subject: Subject, seed: int) -> Note:
  """Checks each rule that starts no processes, with one routing."""
  bench, worst = Bench(subject), 0.0
  for rule in RULES.values():
    if rule.starts_ranks or rule.left_out(subject):
      continue
    variants = list(rule.variants(subject, seed))
    chosen = [x for x in variants if x.routing == USUAL.routing] or variants
    for variant in chosen[:1]:
      worst = max(worst, rule.check(bench, variant))
  return dict(worst=worst)


def disagreement(subject: Subject, seed: int) -> Note:
  """Runs a step in which one process has another hidden size.

  Two builds of equal sizes come first. Otherwise a transport whose second build
  always fails would seem to report the disagreement.
  """
  variant = _usual(subject, seed)
  for _ in range(2):
    _step(Bench(subject), variant)
  other = dataclasses.replace(variant, hidden=variant.hidden * (1 + _is_odd()))
  return dict(error=error_of(lambda: _step(Bench(subject), other)))


def killed_rank(subject: Subject, seed: int) -> Note:
  """Runs two steps, kills one process, and runs another step."""
  bench, variant = Bench(subject), _usual(subject, seed)
  for _ in range(2):
    _step(bench, variant)
  if _is_odd():
    signal.raise_signal(signal.SIGKILL)
  return dict(error=error_of(lambda: _step(bench, variant)))


def _usual(subject: Subject, seed: int) -> Variant:
  return Draw(subject, seed).every_kind()[0]


def _is_odd() -> bool:
  """Returns whether this is the process that dies or disagrees."""
  return jax.process_index() == _ranks.PROCESSES - 1


def _step(bench: Bench[Any], variant: Variant) -> None:
  """Runs the object under test, without any other collective."""
  trial, oracle, rng = bench.begin(variant)
  inputs = oracle.inputs(rng, "normal")
  jax.block_until_ready(trial.start(oracle, inputs))


_TASKS: dict[str, Callable[[Subject, int], Note]] = {
  "processes": processes,
  "disagreement": disagreement,
  "killed_rank": killed_rank,
}


def main(location: str, task: str, folder: str, seed: str) -> None:
  launch.initialize()
  module, _, name = location.partition(":")
  note: Note = dict(failure="")
  wait_s = 0.0
  try:
    subject = operator.attrgetter(name)(importlib.import_module(module))
    wait_s = subject.limit_s
    note |= _TASKS[task](subject, int(seed))
  except AssertionError as error:
    note = dict(failure=str(error))
  except Exception as error:  # an unexpected error of the object under test
    traceback.print_exc()
    note = dict(failure=f"{type(error).__name__}: {error}")
  notes = pathlib.Path(folder)
  _ranks.leave_note(notes, task, note)
  _ranks.wait_for_notes(notes, task, wait_s)
  os._exit(0)  # an orderly exit would wait for the dead process


if __name__ == "__main__":
  main(*sys.argv[1:])
