# SPDX-License-Identifier: Apache-2.0
"""Worlds whose ranks may end in any way.

A test starts one with its own file as the program: `main` is what one rank
does, and gets a folder for notes. A rank that sees what it should leaves a note
there, so that the world may end as untidily as it likes.
"""

import os
import pathlib
import time

from ep import launch

RANKS = 4


def run_world(program, notes, *args, processes=RANKS, env=None):
  """Runs `program` as every rank; what they said at the end, by rank."""
  temporary = notes / "tmp"
  temporary.mkdir()
  launch.launch(
    [program, notes, *args],
    num_processes=processes,
    timeout_s=60,
    grace_s=40,
    env={"TMPDIR": str(temporary), **(env or {})},
    log_dir=notes / "logs",
  )
  assert not list(temporary.iterdir())
  return {
    int(note.name.removeprefix("rank_")): note.read_text()
    for note in notes.glob("rank_*")
  }


class Rank:
  """What this process does in such a world."""

  def __init__(self, notes):
    import jax

    import conftest  # noqa: F401  makes this process a rank

    self.index = jax.process_index()
    self.notes = pathlib.Path(notes)

  def note(self, name, text=""):
    """Leaves a note, all at once."""
    draft = self.notes / f".{name}.{self.index}"
    draft.write_text(text)
    draft.rename(self.notes / name)

  def wait_until(self, holds):
    deadline = time.monotonic() + 30
    while not holds():
      assert time.monotonic() < deadline, "waited in vain"
      time.sleep(0.02)

  def wait_for(self, notes, count=1):
    """Waits for so many notes of a pattern."""
    self.wait_until(lambda: len(list(self.notes.glob(notes))) >= count)

  def leave(self, ranks):
    """Ends when so many do; JAX's own orderly end would miss the dead."""
    self.note(f"done_{self.index}")
    self.wait_for("done_*", ranks)
    os._exit(0)
