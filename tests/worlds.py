# SPDX-License-Identifier: Apache-2.0
"""Starts worlds whose ranks may end in any way.

A test starts a world with a program, which may be its own file. Each rank calls
`main` of the program with a folder for notes. A rank leaves a note there when
it has seen what it should see, so the test does not depend on how the ranks
end.
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
  """Runs `program` as every process, and returns their last notes by number."""
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
  """The rank of such a world that this process is."""

  def __init__(self, notes):
    self.index = jax.process_index()
    self.notes = pathlib.Path(notes)

  def note(self, name, text=""):
    """Leaves a note, in one atomic step."""
    draft = self.notes / f".{name}.{self.index}"
    draft.write_text(text)
    draft.rename(self.notes / name)

  def wait_until(self, holds):
    deadline = time.monotonic() + 30
    while not holds():
      assert time.monotonic() < deadline, "waited in vain"
      time.sleep(0.02)

  def wait_for(self, notes, count=1):
    """Waits until so many notes match the pattern."""
    self.wait_until(lambda: len(list(self.notes.glob(notes))) >= count)

  def leave(self, ranks):
    """Ends this process when so many ranks are done.

    JAX's own shutdown would wait for ranks that have died.
    """
    self.note(f"done_{self.index}")
    self.wait_for("done_*", ranks)
    os._exit(0)
