# SPDX-License-Identifier: Apache-2.0
"""Stores the checkpoints and the metrics of a training run in a folder."""

from collections.abc import Mapping
import json
import logging
import os
import pathlib
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from lm.step import State


class Stop(Exception):
  """An error after which no process can continue the run."""


class RunFolder:
  """The checkpoints and metrics of a run, in a folder on a shared file system.

  A kill of a process at any time leaves a usable folder. A checkpoint fits any
  mesh: each process writes its own shards, and reads the shards it needs.

  Args:
    folder: created if missing.
    description: settings by name. A run continues another run only if both have
      the same description.
  """

  def __init__(self, folder: pathlib.Path, description: Mapping[str, Any]):
    # After an error, orbax-checkpoint abandons other reads and writes. asyncio
    # would log an error for each abandoned read or write.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    folder = folder.absolute()
    self._metrics = folder / "metrics.jsonl"
    self._description = dict(description)
    self._manager = ocp.CheckpointManager(
      folder / "checkpoints",
      options=ocp.CheckpointManagerOptions(
        max_to_keep=2,
        cleanup_tmp_directories=True,
        enable_async_checkpointing=False,
      ),
    )

  def restore(
    self, start: State, snapshot: State | None = None
  ) -> tuple[State, list[dict[str, Any]]]:
    """Returns the latest saved state; on process 0, also the step records.

    Args:
      start: the state to return if there is no checkpoint. A checkpoint is
        restored with the shardings of `start`.
      snapshot: a state of this run in memory, if any.

    Raises:
      OSError: the checkpoint cannot be read.
      Stop: the checkpoint has another description, or a line of metrics is
        damaged.
    """
    state = start if snapshot is None else snapshot
    newest = -1 if snapshot is None else int(snapshot.step)
    step = self._manager.latest_step()
    if step is not None and step > newest:
      state = self._read_checkpoint(step, start)
    if jax.process_index():
      return state, []
    return state, self._read_metrics(int(state.step))

  def _read_checkpoint(self, step, start):
    folder = self._manager.directory / str(step)

    def cannot_be_read(reason):
      return OSError(
        f"{folder}: the checkpoint cannot be read ({reason}); remove this"
        " folder to continue after the checkpoint before, or give another one."
      )

    def read(item):
      try:
        args = ocp.args.Composite(**item)
        (value,) = self._manager.restore(step, args=args).values()
      except Exception as error:  # damaged files raise errors of any kind
        raise cannot_be_read(_first_line(error)) from error
      return value

    # Read the description first: another run's state can have other shapes.
    saved = read({"run": ocp.args.JsonRestore()})
    checksum = saved.pop("checksum", None)
    ours = self._description
    if differing := [
      f"{name} = {saved.get(name)}, here {ours.get(name)}"
      for name in {**saved, **ours}
      if saved.get(name) != ours.get(name)
    ]:
      raise Stop(
        f"{folder}: the checkpoint is of another run, with"
        f" {'; '.join(differing)}. Give the flags of that run, or another"
        " folder."
      )
    like = jax.tree.map(ocp.utils.to_shape_dtype_struct, start)
    # On other ranks, arrays of experts may have other numbers of empty slots,
    # which are zeros after the experts. orbax-checkpoint cuts or appends them.
    restore = ocp.args.StandardRestore(like, strict=False)
    state = read({"state": restore})
    if checksum != _checksum(state):
      raise cannot_be_read("its numbers have changed since they were saved")
    return state

  def _read_metrics(self, done):
    """Returns the records up to step `done`; deletes later lines from disk."""
    path = self._metrics
    path.touch()
    lines = path.read_bytes().splitlines(keepends=True)
    try:
      # A kill can leave an incomplete last line.
      records = [json.loads(line) for line in lines if line.endswith(b"\n")]
      records = [each for each in records if each["step"] <= done]
    except (ValueError, TypeError, LookupError) as error:
      raise Stop(
        f"{path}: a line is no record of a step ({error}); move the file away,"
        " and start the same command again."
      ) from error
    os.truncate(path, sum(map(len, lines[: len(records)])))
    return records

  def append(self, record: Mapping[str, Any]) -> None:
    """Appends a record to the metrics file; only process 0 writes."""
    if jax.process_index() == 0:
      with self._metrics.open("a") as file:
        file.write(json.dumps(record) + "\n")

  def save(self, state: State) -> None:
    """Writes a checkpoint; raises OSError if it cannot be written."""
    step = int(state.step)
    run = self._description | {"checksum": _checksum(state)}
    try:
      self._manager.save(
        step,
        args=ocp.args.Composite(
          run=ocp.args.JsonSave(run), state=ocp.args.StandardSave(state)
        ),
      )
    except Exception as error:
      raise OSError(
        f"{self._manager.directory / str(step)}: the checkpoint cannot be"
        f" written ({_first_line(error)}); make room, and start the same"
        " command again. It continues after the checkpoint before."
      ) from error


@jax.jit
def _sum_of_bits(state):
  return sum(
    jnp.sum(lax.bitcast_convert_type(x, jnp.uint32), dtype=jnp.uint32)
    for x in jax.tree.leaves(state)
  )


def _checksum(state: State) -> int:
  """Returns a checksum that does not depend on the mesh.

  orbax-checkpoint detects a damaged file only if it cannot decompress the file.
  """
  return int(_sum_of_bits(state))


def _first_line(error):
  return f"{type(error).__name__}: {error}".splitlines()[0]
