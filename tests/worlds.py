# SPDX-License-Identifier: Apache-2.0
"""Starts ranks that may exit in any way, even by a signal.

A test starts ranks with a program, which may be the test's file. Each rank
calls `main` of the program with a folder for notes. A rank writes a note after
its checks passed, so the test does not depend on the ranks' exit codes.
"""

import os
import pathlib
import time

import jax

import conftest  # noqa: F401  (It makes this process a rank.)
from ep import launch
import programs

RANKS = 4


def run_world(program, notes, *args, processes=RANKS, devices=1, env=None):
  """Runs `program` in every process, and returns the last notes by rank."""
  temporary = notes / "tmp"
  temporary.mkdir()
  launch.launch(
    [program, notes, *args],
    num_processes=processes,
    devices_per_process=devices,
    timeout_s=200,
    grace_s=40,
    env=programs.environment(TMPDIR=str(temporary), **(env or {})),
    log_dir=notes / "logs",
  )
  assert not list(temporary.iterdir())
  return {
    int(note.name.removeprefix("rank_")): note.read_text()
    for note in notes.glob("rank_*")
  }


class Rank:
  """This process's rank, in a program that `run_world` starts."""

  def __init__(self, notes):
    self.index = jax.process_index()
    self.notes = pathlib.Path(notes)

  def note(self, name, text=""):
    """Writes a note atomically."""
    draft = self.notes / f".{name}.{self.index}"
    draft.write_text(text)
    draft.rename(self.notes / name)

  def wait_until(self, holds):
    deadline = time.monotonic() + 30
    while not holds():
      assert time.monotonic() < deadline, "waited in vain"
      time.sleep(0.02)

  def wait_for(self, notes, count=1):
    """Waits until `count` notes match the pattern."""
    self.wait_until(lambda: len(list(self.notes.glob(notes))) >= count)

  def leave(self, ranks):
    """Exits this process when `ranks` ranks are done.

    Skips JAX's shutdown, which would wait for dead ranks.
    """
    self.note(f"done_{self.index}")
    self.wait_for("done_*", ranks)
    os._exit(0)
