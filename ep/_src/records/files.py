# SPDX-License-Identifier: Apache-2.0
"""The files of a record: NumPy archives (.npz) in one folder.

A process writes files of its own, "<process>-<number>.npz", each with ".part"
after its name until it is complete. So a file that has its name is whole,
whenever its process ends. With an entry n for each call of a rank, it holds

    format                    FORMAT
    <layer>.topk_idx          int [N, ..., K], the ids of the rank's tokens
    <layer>.topk_weights      float32 [N, ..., K], if asked for and known
    <layer>.rank              int32 [N], the rank, below num_ranks
    <layer>.step              int64 [N]
    <layer>.call              int32 [N], which call of the step, as the rank ran
                              them; below calls_per_step
    <layer>.site              text [N], the program, and the op's place in it
    <layer>.run               int64 [N], how often the rank ran it before
    <layer>.num_ranks         int32, R
    <layer>.calls_per_step    int32

Calls of one layer that do not depend on each other may run in another order on
each rank. So ranks are matched by site and run, and rank 0 has the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
import os
import pathlib
from typing import NamedTuple
import zipfile

import numpy as np

FORMAT = "ep.record 1"
# The columns with a number for each call.
COLUMNS = dict(rank=np.int32, step=np.int64, call=np.int32, run=np.int64)


class Call(NamedTuple):
  """A call of one rank, as the head of this file describes it."""

  layer: str
  num_ranks: int
  calls_per_step: int
  rank: int
  step: int
  call: int
  site: str
  run: int
  topk_idx: np.ndarray
  topk_weights: np.ndarray | None = None

  @property
  def arrays(self) -> dict[str, np.ndarray]:
    """The arrays of the call's tokens, by name."""
    both = dict(topk_idx=self.topk_idx, topk_weights=self.topk_weights)
    return {name: array for name, array in both.items() if array is not None}


class Writer:
  """Writes the calls of a process. Not thread-safe.

  Of all writers for a process and a folder, whenever they begin, only one may
  write: the first, until the folder is removed.

  Raises:
    ValueError: the folder has files of the process.
  """

  def __init__(self, folder: pathlib.Path, process: int):
    self._stem = folder / f"{process:05d}"
    self._num_files = 0
    first = self._path(".part")
    try:
      folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
      raise ValueError(
        f"ep.record: cannot make the folder {folder}: {e.strerror}; choose one"
        " where this process can write."
      ) from e
    try:
      first.touch(exist_ok=False)  # no two processes succeed
      if not any(folder.glob(f"{self._stem.name}-*.npz")):
        return
      first.unlink()
    except FileExistsError:
      pass
    raise ValueError(
      f"ep.record: {folder} holds a record already; choose a new folder, or"
      " remove that one."
    )

  def _path(self, suffix: str = "") -> pathlib.Path:
    """Returns the path of the next file."""
    return pathlib.Path(f"{self._stem}-{self._num_files:06d}.npz{suffix}")

  def close(self) -> None:
    """Leaves no trace in the folder if nothing was written."""
    if not self._num_files:
      self._path(".part").unlink(missing_ok=True)

  def write(self, calls: Iterable[Call]) -> None:
    """Writes a file, or more: in each, the calls of a layer are alike."""
    files: list[dict[str, list[Call]]] = []
    for call in calls:
      for layers in files:
        others = layers.setdefault(call.layer, [])
        if not others or _shapes(others[0]) == _shapes(call):
          others.append(call)
          break
      else:
        files.append({call.layer: [call]})
    for layers in files:
      arrays = {"format": np.array(FORMAT)}
      for layer, rows in layers.items():
        columns = _columns(rows)
        arrays |= {f"{layer}.{name}": array for name, array in columns.items()}
      with open(self._path(".part"), "wb") as file:
        np.savez(file, **arrays)
      os.replace(self._path(".part"), self._path())
      self._num_files += 1


def _shapes(call: Call) -> dict[str, tuple[int, ...]]:
  return {name: array.shape for name, array in call.arrays.items()}


def _columns(calls: list[Call]) -> dict[str, np.ndarray]:
  first = calls[0]
  columns = {
    name: np.array([getattr(call, name) for call in calls], dtype)
    for name, dtype in COLUMNS.items()
  }
  for name in first.arrays:
    columns[name] = np.stack([call.arrays[name] for call in calls])
  return columns | dict(
    site=np.array([call.site for call in calls]),
    num_ranks=np.int32(first.num_ranks),
    calls_per_step=np.int32(first.calls_per_step),
  )


def read(
  path: pathlib.Path, wanted: Callable[[str], bool]
) -> dict[str, np.ndarray]:
  """Returns the arrays of a file whose names are `wanted`.

  Raises:
    ValueError: it is truncated, damaged, or no file of a record.
  """
  try:
    with np.load(path) as file:
      if str(file["format"]) == FORMAT:
        return {name: file[name] for name in file.files if wanted(name)}
    problem = f"has another format than {FORMAT!r}"
  except (zipfile.BadZipFile, EOFError) as e:
    problem = f"is truncated or damaged ({e})"
  except Exception:  # a foreign file may fail in any way
    problem = "was not written by ep.record"
  raise ValueError(
    f"ep.replay: {path} {problem}; remove it, and the steps that it holds are"
    " missing."
  )
