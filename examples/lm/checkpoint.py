# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: a run that was killed goes on as if it had not been."""

from collections.abc import Callable, Mapping
import hashlib
import json
import pathlib
import shutil
from typing import Any

from etils import epath
import orbax.checkpoint as ocp

from lm.processes import agree, first_does, Stop
from lm.train import State

_KEEP = 2
_STATE, _DESCRIPTION, _SUMS = "state", "description.json", "SHA256SUMS"
_UNFINISHED = ".unfinished"
_CURES = {
  "written": "make room, and start the same command again. It continues after"
  " the checkpoint before.",
  "read": "remove the folder of this checkpoint to continue after the one"
  " before, or give another folder.",
}


class Checkpoints:
  """The checkpoints of one run, in a folder that all processes share.

  A checkpoint is the folder `<steps done>`. It is written under another name
  and renamed when it is complete, so a process may be killed at any time. It
  can be restored on any mesh: each process writes its shards, and reads those
  that it needs. The sums of its files show whether one was damaged since:
  damaged JSON makes orbax-checkpoint raise errors of any kind, and damaged
  numbers would train on.

  orbax-checkpoint writes the arrays. What surrounds that is done here, since in
  `ocp.CheckpointManager` a process whose disk is full leaves the others waiting
  for it.

  Args:
    folder: created if missing.
    description: what the run must have in common with the run that continues
      it, as plain values by name.

  Raises:
    Stop: the folder cannot be written.
  """

  def __init__(self, folder: pathlib.Path, description: Mapping[str, Any]):
    self._folder = folder.absolute()
    self._description = dict(description)
    self._handler = ocp.StandardCheckpointHandler()
    first_does(self._clean_folder)

  def save(self, state: State) -> pathlib.Path:
    """Writes a checkpoint and returns its folder.

    Raises:
      Stop: it cannot be written.
    """
    whole = self._folder / str(int(state.step))
    unfinished = whole.with_suffix(_UNFINISHED)
    arrays = epath.Path(unfinished / _STATE)

    def make_folder():
      arrays.mkdir(parents=True)

    def save_arrays():
      self._handler.save(arrays, args=ocp.args.StandardSave(state))

    def finish():
      self._handler.finalize(arrays)
      (unfinished / _DESCRIPTION).write_text(json.dumps(self._description))
      (unfinished / _SUMS).write_text("\n".join(sorted(_sums(unfinished))))
      unfinished.rename(whole)
      for step in self._steps()[:-_KEEP]:
        shutil.rmtree(self._folder / str(step))

    first_does(lambda: _explain("written", whole, make_folder))
    agree(lambda: _explain("written", whole, save_arrays))
    first_does(lambda: _explain("written", whole, finish))
    return whole

  def restore(self, like: State) -> State | None:
    """Returns the latest state, or None if there is no checkpoint.

    Args:
      like: says how the arrays of the result are sharded; see `train.abstract`.

    Raises:
      Stop: the checkpoint is of a run with another description, or it cannot
        be read.
    """
    steps = self._steps()
    if not steps:
      return None
    checkpoint = self._folder / str(steps[-1])

    def check_files():
      text = (checkpoint / _SUMS).read_text(errors="replace")
      if wrong := _sums(checkpoint) ^ set(text.split("\n")):
        first = min(line.partition("  ")[2] for line in wrong)
        raise ValueError(f"{first!r} is missing or not as {_SUMS} has it")

    def read_description():
      return json.loads((checkpoint / _DESCRIPTION).read_text())

    def read_arrays():
      return self._handler.restore(
        epath.Path(checkpoint / _STATE), args=ocp.args.StandardRestore(like)
      )

    first_does(lambda: _explain("read", checkpoint, check_files))
    saved = agree(lambda: _explain("read", checkpoint, read_description))
    self._compare(steps[-1], saved)
    return agree(lambda: _explain("read", checkpoint, read_arrays))

  def _steps(self) -> list[int]:
    names = (path.name for path in self._folder.iterdir())
    return sorted(int(name) for name in names if name.isdecimal())

  def _compare(self, step, saved):
    ours = self._description
    differing = [
      f"{name} = {saved.get(name)}, here {ours.get(name)}"
      for name in {**saved, **ours}
      if saved.get(name) != ours.get(name)
    ]
    if differing:
      raise Stop(
        f"{self._folder}: the checkpoint of step {step} is of another run, with"
        f" {'; '.join(differing)}. Give the flags of that run, or another"
        " folder."
      )

  def _clean_folder(self):
    self._folder.mkdir(parents=True, exist_ok=True)
    for path in self._folder.glob("*" + _UNFINISHED):
      shutil.rmtree(path)


def _sums(folder: pathlib.Path) -> set[str]:
  """Returns a line for each file, which `sha256sum --check` reads."""
  lines = set()
  for path in folder.rglob("*"):
    if path.is_file() and path.name != _SUMS:
      with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
      lines.add(f"{digest}  {path.relative_to(folder)}")
  return lines


def _explain(
  verb: str, checkpoint: pathlib.Path, action: Callable[[], Any]
) -> Any:
  """Returns `action()`; an error becomes an `OSError` with a cure."""
  try:
    return action()
  except (OSError, ValueError) as error:
    reason = str(error).partition(" [")[0]  # TensorStore appends details.
    raise OSError(
      f"{checkpoint}: the checkpoint cannot be {verb} ({reason});"
      f" {_CURES[verb]}"
    ) from error
