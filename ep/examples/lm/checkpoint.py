# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: a run that was killed goes on as if it had not been."""

from collections.abc import Mapping
import pathlib
import shutil
import tempfile
from typing import Any

import jax
import orbax.checkpoint as ocp

from ep.examples.lm.processes import agree, first_does, Stop
from ep.examples.lm.train import State

_KEEP = 2


class Checkpoints:
  """The checkpoints of one run, in a folder that all processes share.

  A checkpoint is written beside the others and renamed when it is complete, so
  a process may be killed at any time. It can be restored on any mesh: each
  process writes its shards, and reads those that it needs.

  Args:
    folder: created if missing.
    description: what the run must have in common with the run that continues
      it, as plain values by name.

  Raises:
    Stop: the folder cannot be written.
  """

  def __init__(self, folder: pathlib.Path, description: Mapping[str, Any]):
    self._folder = folder
    self._description = dict(description)
    first_does(self._check_folder)
    self._manager = ocp.CheckpointManager(
      folder.absolute(),
      options=ocp.CheckpointManagerOptions(
        max_to_keep=_KEEP,
        enable_async_checkpointing=False,
        cleanup_tmp_directories=True,
      ),
    )

  def save(self, state: State) -> None:
    """Writes a checkpoint; raises Stop if the disk has no room for it."""
    agree(lambda: self._check_room(state))
    self._manager.save(
      int(state.step),
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(state),
        description=ocp.args.JsonSave(self._description),
      ),
    )

  def restore(self, like: State) -> State:
    """Returns the latest state, or `like` if there is no checkpoint.

    Args:
      like: a state, whose arrays say how those of the result are sharded.

    Raises:
      Stop: the checkpoint is of a run with another description.
    """
    step = self._manager.latest_step()
    if step is None:
      return like
    description = ocp.args.Composite(description=ocp.args.JsonRestore())
    saved = self._manager.restore(step, args=description).description
    self._compare(step, saved)
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    return self._manager.restore(
      step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
    ).state

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

  def _check_folder(self):
    self._folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=self._folder).close()

  def _check_room(self, state):
    # Each process's part is merged into one file before it is removed.
    needed = 2 * sum(x.nbytes for x in jax.tree.leaves(state))
    free = shutil.disk_usage(self._folder).free
    if free < needed:
      raise OSError(
        f"{self._folder}: a checkpoint takes {needed / 1e6:.1f} MB, but the"
        f" disk has {free / 1e6:.1f} MB left; make room, and start the same"
        " command again."
      )
