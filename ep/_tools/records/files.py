# SPDX-License-Identifier: Apache-2.0
"""The files of a record: NumPy archives (.npz) in one folder.

Each process writes its own files, "<process>-<number>.npz". The name ends with
".part" until the file is complete, so a file without ".part" is complete even
if its process was killed. A file has these arrays, with an entry n for each
call of a rank:

    format                    FORMAT
    <layer>.topk_idx          int [N, ..., K], the ids of the rank's tokens
    <layer>.topk_weights      float32 [N, ..., K], optional
    <layer>.rank              int32 [N], the rank, below num_ranks
    <layer>.step              int64 [N]
    <layer>.call              int32 [N], index of the call in its step, in the
                              order of the rank; below calls_per_step
    <layer>.site              text [N], the program, and the op's position in it
    <layer>.run               int64 [N], number of earlier runs of the site on
                              the rank
    <layer>.num_ranks         int32, R
    <layer>.calls_per_step    int32

Ranks may run independent calls of a layer in different orders. So a reader
matches the ranks by site and run, and takes the order of rank 0.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
import contextlib
import os
import pathlib
from typing import Any, NamedTuple
import zipfile

import numpy as np

from ep._src.base import arguments

FORMAT = "ep.record 1"
# Dtypes: a column of COLUMNS has a number per call, each of SIZES one number.
COLUMNS: dict[str, Any] = dict(
  rank=np.int32, step=np.int64, call=np.int32, run=np.int64
)
SIZES: dict[str, Any] = dict(num_ranks=np.int32, calls_per_step=np.int32)
_TOKENS = dict(topk_idx=(np.int32, np.int64), topk_weights=(np.float32,))


class Call(NamedTuple):
  """A recorded call of one rank; the module's docstring has its fields."""

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
  def shapes(self) -> dict[str, tuple[int, ...]]:
    """The shapes of `topk_idx` and `topk_weights`, by name."""
    arrays = {name: getattr(self, name) for name in _TOKENS}
    return {name: x.shape for name, x in arrays.items() if x is not None}


class Writer:
  """A writer of the calls of one process. Not thread-safe.

  Raises:
    ValueError: another writer of this process has used the folder, or no file
      can be made in it.
  """

  def __init__(self, folder: pathlib.Path, process: int):
    self._stem = folder / f"{process:05d}"
    self._num_files = 0
    try:
      folder.mkdir(parents=True, exist_ok=True)
      with contextlib.suppress(FileExistsError):
        self._path(".part").touch(exist_ok=False)  # only one writer succeeds
        if not any(folder.glob(f"{self._stem.name}-*.npz")):
          return
        self.close()
    except OSError as e:
      raise ValueError(
        f"ep.record: cannot make a file in {folder}: {e.strerror}; choose a"
        " folder where this process can write."
      ) from e
    raise ValueError(
      f"ep.record: {folder} holds a record already; choose a new folder, or"
      " remove that one."
    )

  def _path(self, suffix: str = "") -> pathlib.Path:
    return pathlib.Path(f"{self._stem}-{self._num_files:06d}.npz{suffix}")

  def close(self) -> None:
    """Removes the empty .part file if no calls were written."""
    if not self._num_files:
      self._path(".part").unlink(missing_ok=True)

  def write(self, calls: Iterable[Call]) -> None:
    """Writes the calls to files; a file has one array shape for each layer."""
    files: list[dict[str, list[Call]]] = []
    for call in calls:
      for layers in files:
        others = layers.setdefault(call.layer, [])
        if not others or others[0].shapes == call.shapes:
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
        np.savez(file, **arrays)  # type: ignore[arg-type]
      os.replace(self._path(".part"), self._path())
      self._num_files += 1


def _columns(calls: list[Call]) -> dict[str, np.ndarray]:
  first = calls[0]

  def stacked(name: str, dtype: Any = None) -> np.ndarray:
    return np.array([getattr(call, name) for call in calls], dtype)

  return {
    **{name: stacked(name, dtype) for name, dtype in COLUMNS.items()},
    **{name: stacked(name) for name in ("site", *first.shapes)},
    **{name: dtype(getattr(first, name)) for name, dtype in SIZES.items()},
  }


def read_calls(path: pathlib.Path) -> dict[str, dict[str, np.ndarray]]:
  """Returns the columns of a file by layer, except expert ids and weights.

  Raises:
    ValueError: the file is truncated, damaged, or not a file of a record.
  """
  layers: dict[str, dict[str, np.ndarray]] = collections.defaultdict(dict)
  others = "format", *_TOKENS
  for name, column in _read(path, lambda name: not name.endswith(others)):
    layer, _, column_name = name.rpartition(".")
    layers[layer][column_name] = column
  for layer, columns in layers.items():
    arguments.check(
      _are_sound(columns),
      f"ep.replay: {path}: layer {layer!r}",
      "its columns differ from the columns of ep.record; remove the file, and"
      " the steps that it holds are missing.",
    )
  return layers


def _are_sound(columns: dict[str, np.ndarray]) -> bool:
  """Returns whether all columns exist with equal lengths and valid numbers."""
  site = columns.get("site", np.array(0))
  types: dict[str, Any] = {
    **{name: (dtype, site.shape) for name, dtype in COLUMNS.items()},
    **{name: (dtype, ()) for name, dtype in SIZES.items()},
    "site": (site.dtype, (site.size,)),
  }
  got = {k: (x.dtype, x.shape) for k, x in columns.items() if k in types}
  if got != types or not site.size or site.dtype.kind != "U":
    return False
  limits = {
    "rank": columns["num_ranks"],
    "step": arguments.INT32_MAX,
    "call": columns["calls_per_step"],
    "run": np.iinfo(np.int64).max,
  }
  return all(
    ((columns[name] >= 0) & (columns[name] < limit)).all()
    for name, limit in limits.items()
  )


def read_tokens(path: pathlib.Path, layer: str, name: str) -> np.ndarray:
  """Returns the column `topk_idx` or `topk_weights` of a layer.

  Raises:
    ValueError: the column is missing, or has an unexpected shape or dtype.
  """
  dtypes, rank, name = _TOKENS[name], f"{layer}.rank", f"{layer}.{name}"
  columns = dict(_read(path, (name, rank).__contains__))
  if name not in columns:
    raise ValueError(
      f"ep.replay: {path} has no {name}; for weights, pass weights=True to"
      " ep.record, and topk_weights to ep_prepare."
    )
  column, num_calls = columns[name], columns[rank].size
  arguments.check(
    column.dtype in dtypes and column.ndim > 2 and len(column) == num_calls,
    f"ep.replay: {path}",
    f"{name} is {column.dtype} {list(column.shape)}, which ep.record does not"
    f" write for {num_calls} calls; remove the file, and the steps that it"
    " holds are missing.",
  )
  return column


def _read(
  path: pathlib.Path, is_wanted: Callable[[str], bool]
) -> list[tuple[str, np.ndarray]]:
  """Returns (name, array) for each array whose name `is_wanted` accepts."""
  problem = "was not written by ep.record"
  try:
    with np.load(path) as file:
      # np.savez compresses nothing. A compressed file may expand to any size.
      if not any(member.compress_type for member in file.zip.infolist()):
        if str(file["format"]) == FORMAT:
          # NumPy returns a damaged member as bytes.
          return [(n, np.asarray(file[n])) for n in file.files if is_wanted(n)]
        problem = f"has another format than {FORMAT!r}"
  except OSError as e:
    raise ValueError(
      f"ep.replay: cannot read {path}: {e.strerror}; make it readable, or"
      " remove it, and the steps that it holds are missing."
    ) from e
  except MemoryError:
    problem = "needs more memory than there is, or is damaged"
  except (zipfile.BadZipFile, EOFError) as e:
    problem = f"is truncated or damaged ({e})"
  except Exception:  # a hostile file can raise any error
    pass
  raise ValueError(
    f"ep.replay: {path} {problem}; remove it, and the steps that it holds are"
    " missing."
  )
