# SPDX-License-Identifier: Apache-2.0
"""Reads the routing that `ep.record` wrote to files."""

from __future__ import annotations

import collections
from collections.abc import Iterator
import functools
import os
import pathlib

import jax
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from ep._src.base import arguments
from ep._src.group.group import check_layer, EpLayerConfig
from ep._tools.records import files

_MOST_NAMED = 16  # ranks that an error names at most
_CACHED = 64  # arrays; a flush writes one for each layer and process


def replay(path: str | os.PathLike[str]) -> Replay:
  """Returns the routing that `ep.record` wrote to a folder.

  It needs no devices, and works for any number of processes and ranks.

  Raises:
    ValueError: there is no record, or a file is truncated, damaged or foreign.
  """
  return Replay(pathlib.Path(path).absolute())


class Replay:
  """The routing of recorded steps. Made by `replay`.

  Attributes:
    layers: the names of the layers, sorted.
  """

  layers: tuple[str, ...]

  def __init__(self, folder: pathlib.Path) -> None:
    self._folder = folder
    self._files = sorted(folder.glob("*.npz"))
    arguments.check(
      len(self._files) > 0,
      "ep.replay",
      f"{folder} holds no record; pass the folder that ep.record wrote to, once"
      " it has left its context or flushed.",
    )
    tables = collections.defaultdict(list)
    for number, path in enumerate(self._files):
      for layer, columns in files.read_calls(path).items():
        rows = np.arange(len(columns["rank"]))
        file = np.full_like(rows, number)
        tables[layer].append(columns | dict(file=file, row=rows))
    self._calls = {
      layer: _Calls(f"ep.replay: {folder}: layer {layer!r}", tables[layer])
      for layer in sorted(tables)
    }
    self.layers = tuple(self._calls)
    self._read = functools.lru_cache(_CACHED)(files.read_tokens)

  def __repr__(self) -> str:
    steps = {layer: len(self.steps(layer)) for layer in self.layers}
    return f"<ep.Replay of {self._folder}, with these complete steps: {steps}>"

  def steps(self, layer: str | EpLayerConfig) -> tuple[int, ...]:
    """Returns the complete steps, i.e. with all calls of all ranks.

    The last steps of a killed process may be incomplete.

    Raises:
      ValueError: the layer was not recorded.
    """
    return self._of(layer).steps()

  def routings(self, layer: str | EpLayerConfig) -> Iterator[np.ndarray]:
    """Yields `topk_idx` of each call of all complete steps, in order.

    Raises:
      ValueError: the layer was not recorded.
    """
    calls = self._of(layer)
    for step in calls.steps():
      for call in range(calls.per_step):
        yield self.topk_idx(layer, step, call)

  def topk_idx(
    self, layer: str | EpLayerConfig, step: int, call: int = 0
  ) -> np.ndarray:
    """Returns the expert ids of all tokens, in the order of the global view.

    Args:
      layer: the name of a layer, or a layer of that name.
      step: one of `steps(layer)`.
      call: index of the call in the step, below `calls_per_step` of `record`.

    Returns:
      int32 or int64 [R * n, ..., K], the concatenated arguments [n, ..., K] of
      `ep_prepare` on R ranks.

    Raises:
      ValueError: the call was not recorded, or not by all ranks, or a file has
        been changed.
      TypeError: an argument has another type.
    """
    return self._column("topk_idx", layer, step, call)

  def topk_weights(
    self, layer: str | EpLayerConfig, step: int, call: int = 0
  ) -> np.ndarray:
    """Returns the weights of the choices in `topk_idx`, as float32.

    Takes the same arguments as `topk_idx`. Dropped choices keep their weights.

    Raises:
      ValueError: as in `topk_idx`, or the weights were not recorded.
    """
    return self._column("topk_weights", layer, step, call)

  def forced_idx(
    self, layer: EpLayerConfig, step: int, call: int = 0
  ) -> jax.Array:
    """Returns `topk_idx` as a global array for the ranks of a layer's group.

    `route_topk` and `ep.MoE` take it as `forced_idx`. They then use the ids of
    the record, where -1 is no expert, and the weights of the present logits:

        forced_idx = ep.replay("routing").forced_idx(layer, step)
        y, metrics = layer(params, x, forced_idx=forced_idx)

    The group may have another number of ranks and processes than the recorded
    one. Every process must be able to read the files.

    Args:
      layer: a layer whose name was recorded.
      step: one of `steps(layer)`.
      call: index of the call in the step.

    Returns:
      int32 [R * n, ..., K], sharded along the first axis over the data axes and
      the EP axis of the group's mesh.

    Raises:
      ValueError: as in `topk_idx`; or the record has another top_k, an id that
        is not valid in the group, or a first axis that the group's ranks do not
        divide.
      TypeError: `layer` is not an `EpLayerConfig`.
    """
    check_layer("Replay.forced_idx", layer)
    idx = self.topk_idx(layer, step, call)
    group, op = layer.group, f'Replay.forced_idx(layer "{layer.name}")'
    arguments.check(
      idx.shape[-1] == layer.top_k,
      op,
      f"the record has {idx.shape[-1]} choices of each token, but top_k ="
      f" {layer.top_k}; replay it with the layer's top_k.",
    )
    arguments.check(
      len(idx) % group.num_token_ranks == 0,
      op,
      f"the record has shape {idx.shape}, whose first axis cannot be split over"
      f" {group.num_token_ranks} ranks; take Replay.topk_idx, and pad it with"
      " ids of -1.",
    )
    most = group.num_experts - 1
    arguments.check(
      idx.size == 0 or -1 <= idx.min() <= idx.max() <= most,
      op,
      f"the record has ids in {idx.min(initial=0)}..{idx.max(initial=0)}, but"
      f" valid ids are -1..{most}; replay it in a group of as many experts.",
    )
    idx = idx.astype(np.int32)
    sharding = NamedSharding(group.mesh, PartitionSpec(group.token_axes))
    return jax.make_array_from_callback(idx.shape, sharding, idx.__getitem__)

  def _column(
    self, column: str, layer: str | EpLayerConfig, step: int, call: int
  ) -> np.ndarray:
    name = _name(layer)
    of_ranks = [
      self._read(self._files[file], name, column)[row]
      for file, row in self._of(name).find(step, call)
    ]
    shapes = {array.shape for array in of_ranks}
    arguments.check(
      len(shapes) == 1,
      f"ep.replay: {self._folder}: {name}.{column}",
      f"ranks differ in shape in step {step}: {sorted(shapes)}; record again.",
    )
    return np.concatenate(of_ranks)

  def _of(self, layer: str | EpLayerConfig) -> _Calls:
    name = _name(layer)
    arguments.check(
      name in self._calls,
      "ep.replay",
      f"{self._folder} has no layer {name!r}, but {[*self.layers]}.",
    )
    return self._calls[name]


class _Calls:
  """An index of the calls of one layer, sorted by call and rank.

  Its memory grows with the number of calls, not with the numbers of steps.
  """

  def __init__(self, what: str, tables: list[dict[str, np.ndarray]]):
    self._what = what
    sizes = {tuple(int(table[n]) for n in files.SIZES) for table in tables}
    arguments.check(
      len(sizes) == 1,
      what,
      f"files differ in (num_ranks, calls_per_step): {sorted(sizes)}; they are"
      " of several records. Record to a new folder.",
    )
    ((self._num_ranks, self.per_step),) = sizes
    file, row, rank, step, call, run, site = (
      np.concatenate([table[name] for table in tables])
      for name in ("file", "row", *files.COLUMNS, "site")
    )
    # On every rank, a (site, run) pair has the call number that rank 0 gave it.
    _, site = np.unique(site, return_inverse=True)
    _, key = np.unique([site, run], axis=1, return_inverse=True)
    key = key.reshape(-1)  # NumPy 2.0 returns another shape
    numbers = np.full(len(key), -1)
    first = rank == 0
    numbers[key[first]] = (step * self.per_step + call)[first]
    number = numbers[key]
    order = np.lexsort((rank, number))
    order = order[number[order] >= 0]
    self._number, self._rank = number[order], rank[order]
    self._places = np.stack([file, row], axis=1)[order]
    is_again = (np.diff(self._number) == 0) & (np.diff(self._rank) == 0)
    arguments.check(
      not is_again.any(),
      what,
      "files have a call of a rank twice; they are of several records. Record"
      " to a new folder.",
    )

  def steps(self) -> tuple[int, ...]:
    steps, counts = np.unique(self._number // self.per_step, return_counts=True)
    return tuple(steps[counts == self.per_step * self._num_ranks].tolist())

  def find(self, step: int, call: int) -> np.ndarray:
    """Returns the file and the row of a call for each rank: [R, 2]."""
    step = arguments.integer(self._what, "step", step)
    call = arguments.integer(self._what, "call", call)
    arguments.check(
      0 <= call < self.per_step,
      self._what,
      f"call = {call}, but a step has calls 0..{self.per_step - 1}.",
    )
    steps = self._number.max(initial=-1) // self.per_step + 1
    arguments.check(
      0 <= step < steps,
      self._what,
      f"step = {step}, but {steps} steps were recorded, from 0 on.",
    )
    number = step * self.per_step + call
    here = slice(*np.searchsorted(self._number, [number, number + 1]))
    there = self._rank[here]
    ranks = np.arange(min(self._num_ranks, len(there) + _MOST_NAMED))
    missing = np.setdiff1d(ranks, there)[:_MOST_NAMED].tolist()
    arguments.check(
      not missing,
      self._what,
      f"step {step} is not there of ranks {missing}; Replay.steps has those"
      " that are complete.",
    )
    return self._places[here]


def _name(layer: str | EpLayerConfig) -> str:
  if isinstance(layer, str):
    return layer
  check_layer("ep.replay", layer)
  return layer.name
