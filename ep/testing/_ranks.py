# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of the rules that need several processes.

A function cannot be sent to another process, so a rank imports the object under
test from `Subject.location`. Each process writes its results to a file, a note
(_rank.py), so a rule does not depend on exit codes.
"""

from __future__ import annotations

import contextlib
import io
import json
import pathlib
import tempfile
import time
from typing import Any

import jax

from ep import launch
from ep.testing._declarations import Subject

PROCESSES, DEVICES = 2, 2
_START_S = 120.0  # limit for imports and compilation
_LINES = 15  # shown of the log of a process without a note
_POLL_S = 0.02


def run(subject: Subject, task: str, seed: int) -> dict[int, Any]:
  """Runs a task of _rank.py in every process; returns the results by process.

  The last process of "killed_rank" writes no note.

  Raises:
    AssertionError: another process wrote no note in time, or failed.
  """
  assert subject.location is not None
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    logs = folder / "logs"
    with contextlib.redirect_stdout(io.StringIO()):
      launch.launch(
        ["-m", "ep.testing._rank", subject.location, task, name, str(seed)],
        num_processes=PROCESSES,
        devices_per_process=DEVICES,
        timeout_s=_START_S + subject.limit_s,
        grace_s=subject.limit_s,
        log_dir=logs,
      )
    for process, note in _notes(folder, task).items():
      if not note.exists():
        log = (logs / f"rank_{process}.log").read_text(errors="replace")
        raise AssertionError(
          f"{task}: process {process} neither finished nor failed within"
          f" {subject.limit_s:g} s; its log ends in:\n"
          + "\n".join(log.splitlines()[-_LINES:])
        )
    found = {
      process: json.loads(note.read_text())
      for process, note in _notes(folder, task).items()
    }
  for note in found.values():
    if note["failure"]:
      raise AssertionError(note["failure"])
  return found


def leave_note(folder: pathlib.Path, task: str, note: dict[str, Any]) -> None:
  """Writes the results of this process to its file, atomically."""
  path = _notes(folder, task)[jax.process_index()]
  draft = path.with_suffix(".draft")
  draft.write_text(json.dumps(note))
  draft.rename(path)


def wait_for_notes(folder: pathlib.Path, task: str, limit_s: float) -> None:
  """Waits for the results of all: an early exit could make others fail."""
  deadline = time.monotonic() + limit_s
  while time.monotonic() < deadline:
    if all(note.exists() for note in _notes(folder, task).values()):
      return
    time.sleep(_POLL_S)


def _notes(folder: pathlib.Path, task: str) -> dict[int, pathlib.Path]:
  survivors = PROCESSES - (task == "killed_rank")
  return {process: folder / f"note_{process}" for process in range(survivors)}
