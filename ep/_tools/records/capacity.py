# SPDX-License-Identifier: Apache-2.0
"""Counts the drops of recorded routings for different receive capacities."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
import dataclasses
import math
import os
from typing import Any

import jax
import numpy as np

from ep._src.base import arguments
from ep._src.group.group import check_layer, EpLayerConfig
from ep._src.ops import drop_policy
from ep._tools.records import expert_loads
from ep._tools.records.replay import Replay, replay

# Capacities in every table, as multiples of the rows of a balanced step.
_FACTORS = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0)


@dataclasses.dataclass(frozen=True, eq=False)
class CapacitySuggestion:
  """Capacities and their drops; a result of `suggest_capacity`. Prints a table.

  All arrays are numpy's. A step is one routing.

  Attributes:
    layer: the layer.
    drop_probability: the argument of `suggest_capacity`.
    capacity: the suggested C in rows, for `recv_capacity_per_rank`.
    candidates: int64 [N], ascending capacities in rows, including `capacity`.
    balanced: T * K, the rows of each rank in a balanced step. T is the group's
      `max_tokens_per_rank` or, if that is None, the most tokens of a rank in a
      step.
    bytes: int64 [N], bytes of the received rows and weights of a rank; None if
      the group has no `hidden_dim`.
    dropped_choices: float64 [N], fraction of all choices that are dropped.
    dropped_steps: float64 [N], fraction of steps with a dropped choice.
    demand: int64 [S, R], rows that each rank wants in a step, padding included.
  """

  layer: EpLayerConfig
  drop_probability: float
  capacity: int
  candidates: np.ndarray
  balanced: int
  bytes: np.ndarray | None
  dropped_choices: np.ndarray
  dropped_steps: np.ndarray
  demand: np.ndarray

  def __repr__(self) -> str:
    columns: list[tuple[int, str, Any]] = [
      (9, "capacity", self.candidates),
      (7, "factor", [f"{c / self.balanced:.2f}" for c in self.candidates]),
      (12, "bytes", self.bytes),
      (16, "choices dropped", [f"{x:.4%}" for x in self.dropped_choices]),
      (16, "steps with drops", [f"{x:.2%}" for x in self.dropped_steps]),
    ]
    cells = [
      [f"{value:>{width}}" for value in (head, *values)]
      for width, head, values in columns
      if values is not None
    ]
    lines = [" ".join(row) for row in zip(*cells, strict=True)]
    suggested = 1 + self.candidates.tolist().index(self.capacity)
    lines[suggested] += "  <- suggested"
    title = (
      f'layer "{self.layer.name}": {len(self.demand)} steps, in which a rank'
      f" wants {self.demand.mean():.1f} rows, and {self.demand.max()} at most"
    )
    return "\n".join([title, *lines])

  def plot(self, path: str | os.PathLike[str]) -> None:
    """Writes a PNG with the drops by capacity, and the rows that ranks want.

    Raises:
      ModuleNotFoundError: matplotlib is not installed.
    """
    try:
      from matplotlib.figure import Figure
    except ModuleNotFoundError as e:
      raise ModuleNotFoundError(
        "CapacitySuggestion.plot: matplotlib is not installed; install it, or"
        " print the suggestion, which is a table."
      ) from e
    figure = Figure(figsize=(8, 6), layout="constrained")
    drops, wanted = figure.subplots(2, sharex=True)
    drops.plot(self.candidates, self.dropped_choices, "o-", label="choices")
    drops.plot(self.candidates, self.dropped_steps, "s-", label="steps")
    drops.set(ylabel="fraction with drops", title=self.layer.name)
    wanted.hist(self.demand.ravel(), bins=50)
    wanted.set(xlabel="rows of a rank", ylabel="ranks and steps")
    for axes in drops, wanted:
      axes.axvline(self.capacity, color="red", label=f"C = {self.capacity}")
    drops.legend()
    figure.savefig(path, format="png")


def suggest_capacity(
  layer: EpLayerConfig,
  routings: str | os.PathLike[str] | Replay | Iterable[jax.Array | np.ndarray],
  *,
  drop_probability: float = 0.0,
) -> CapacitySuggestion:
  """Finds the receive capacity that recorded steps need.

      suggestion = ep.suggest_capacity(layer, "routing", drop_probability=1e-3)
      print(suggestion)                                    # a table
      layer = layer.replace(
        recv_capacity_per_rank=suggestion.capacity, overflow="drop"
      )

  For each capacity it counts the choices that `overflow="drop"` would have
  dropped, with the ranks, experts, alignment and `drop_by` of the layer (None
  means "fair"). It counts in NumPy, on this process alone. The layer may have
  another EP size than the record.

  The numbers are exact, with one exception: `drop_by="weight"` with an
  alignment is counted as "slot", because the function does not read weights. On
  each rank these two policies differ by less than `alignment` rows for each of
  its experts. Without an alignment, all policies drop equally many choices.

  Args:
    layer: an `EpLayerConfig`. Its own capacity is ignored.
    routings: a folder of `ep.record`, or its `ep.replay`: all complete steps of
      the layer's name count. Or arrays [R * n, ..., K] in the global view, not
      traced, one for each step.
    drop_probability: the largest fraction of choices that may be dropped, in
      [0, 1). With 0, the capacity fits every given step, and
      `overflow="error"` would not have failed.

  Returns:
    A `CapacitySuggestion`. Its `capacity` is the smallest multiple of the
    alignment that the layer accepts and that drops no larger fraction.

  Raises:
    ValueError: there is no step, or a shape, an id or a number does not fit.
    TypeError: an argument has another type, or an array is being traced.
  """
  op = "suggest_capacity"
  check_layer(op, layer)
  limit = arguments.number(op, "drop_probability", drop_probability)
  arguments.check(
    0 <= limit < 1,
    op,
    f"drop_probability = {limit}, but it must be at least 0 and less than 1.",
  )
  if isinstance(routings, str | os.PathLike):
    routings = replay(routings)
  if isinstance(routings, Replay):
    routings = routings.routings(layer)
  group, unit = layer.group, layer.alignment
  steps: list[np.ndarray] = []
  most_tokens = 1
  for topk_idx in map(np.asarray, routings):
    arguments.check(
      topk_idx.ndim > 0 and topk_idx.shape[-1] == layer.top_k,
      op,
      f"topk_idx has shape {topk_idx.shape}, but the layer"
      f' "{layer.name}" has {layer.top_k} columns;'
      " pass the routing of a layer with its top_k.",
    )
    choices = expert_loads.choices(
      f"{op}: step {len(steps)}",
      topk_idx,
      group.num_experts,
      group.num_token_ranks,
    )
    steps.append(expert_loads.received(choices, layer.ep_size))
    all_tokens = math.prod(topk_idx.shape[:-1])
    most_tokens = max(most_tokens, all_tokens // group.num_token_ranks)
  arguments.check(
    len(steps) > 0, op, "there is no step; record one that is complete."
  )
  tokens = np.stack(steps)  # [S, R, L]
  demand = expert_loads.padded(tokens, unit).sum(axis=2)
  num_tokens = group.max_tokens_per_rank or most_tokens
  balanced = num_tokens * layer.top_k
  least = min(
    layer.num_local_experts * unit, layer.config.worst_case(num_tokens)
  )
  total = max(tokens.sum(), 1)

  def dropped(capacity: int) -> np.ndarray:  # [S, R]
    of_ranks = tokens.reshape(-1, layer.num_local_experts)
    return drop_policy.dropped(layer.config, of_ranks, capacity).reshape(
      demand.shape
    )

  def is_enough(blocks: int) -> bool:
    return bool(dropped(blocks * unit).sum() <= limit * total)

  # A larger capacity never drops more, so bisection finds the smallest enough.
  most = max(int(demand.max()), least)
  blocks = range(least // unit, most // unit)
  found = unit * (blocks.start + bisect.bisect(blocks, False, key=is_enough))
  rounded = [-(-int(f * balanced) // unit) * unit for f in _FACTORS]
  chosen = {c for c in rounded if least <= c <= most} | {found, most}
  drops = np.stack([dropped(c) for c in sorted(chosen)])  # [N, S, R]
  candidates = np.array(sorted(chosen), np.int64)
  num_bytes = None
  if group.hidden_dim is not None:
    row_bytes = group.hidden_dim * group.max_token_dtype.itemsize + 4
    num_bytes = candidates * row_bytes
  return CapacitySuggestion(
    layer=layer,
    drop_probability=limit,
    capacity=found,
    candidates=candidates,
    balanced=balanced,
    bytes=num_bytes,
    dropped_choices=drops.sum(axis=(1, 2)) / total,
    dropped_steps=drops.any(axis=2).mean(axis=1),
    demand=demand,
  )
