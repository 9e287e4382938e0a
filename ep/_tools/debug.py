# SPDX-License-Identifier: Apache-2.0
"""Draws the routing of a step, as text or as a picture."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import warnings

import jax
import numpy as np

from ep._src.base import arguments
from ep._src.group.group import EpLayerConfig
from ep._tools.records import expert_loads

_COLUMNS, _LINES, _BAR = 64, 32, 56  # text picture, in characters
_SHADES = " .:-=+*#%@"


@dataclasses.dataclass(frozen=True)
class RoutingSizes:
  """The sizes that `plot_routing` needs, for a layer without a group.

  Attributes:
    num_experts: E.
    ep_size: P.
    num_ranks: R, a multiple of P; None means P, i.e. one EP domain.
    alignment: each expert's segment of rows is padded to a multiple of this.
    capacity: C, rows that a rank can receive; None draws no limit.
    name: the title of the picture.
  """

  num_experts: int
  ep_size: int
  num_ranks: int = None  # type: ignore[assignment]  # __post_init__ sets it
  alignment: int = 1
  capacity: int | None = None
  name: str = "routing"

  def __post_init__(self) -> None:
    if self.num_ranks is None:
      object.__setattr__(self, "num_ranks", self.ep_size)
    for name in "num_experts", "ep_size", "num_ranks", "alignment":
      value = arguments.integer("RoutingSizes", name, getattr(self, name))
      arguments.check(
        value > 0,
        "RoutingSizes",
        f"{name} = {value}, but it must be positive.",
      )
    arguments.check(
      self.num_ranks % self.ep_size == 0,
      "RoutingSizes",
      f"num_ranks = {self.num_ranks}, but it must be a multiple of ep_size ="
      f" {self.ep_size}.",
    )


def plot_routing(
  layer_or_sizes: EpLayerConfig | RoutingSizes,
  topk_idx: jax.Array | np.ndarray,
  path: str | os.PathLike[str] | None = None,
) -> str:
  """Draws how often each rank chooses each expert, and the load of each rank.

      print(ep.debug.plot_routing(layer, topk_idx))            # as text
      ep.debug.plot_routing(layer, topk_idx, "routing.png")    # as a picture

  A heat map shows the number of choices by expert and source rank. Below it, a
  bar for each rank shows the rows that it should receive, padding included,
  and its capacity. The function needs no exchange and no devices: with
  `RoutingSizes` instead of the layer, it draws a saved routing anywhere.

  Args:
    layer_or_sizes: an `EpLayerConfig`, or the same sizes without a group.
    topk_idx: integers [R * n, ..., K] in the global view, not traced: expert
      ids in -1..E-1 for the tokens of R ranks. EP domains (P consecutive
      ranks) are drawn below each other.
    path: a PNG to write with matplotlib. Without matplotlib, the function warns
      and writes the text to `path` with the suffix ".txt".

  Returns:
    The picture as text, at most 80 columns wide. With more than 64 experts or
    32 ranks, neighbours share a column or a line, which shows the sum of their
    choices and the largest of their loads.

  Raises:
    TypeError: `topk_idx` is being traced.
    ValueError: its shape or an id does not fit, or `topk_idx` is not fully
      addressable by this process.
  """
  num_tokens = math.prod(np.shape(topk_idx)[:-1])
  sizes = _sizes(layer_or_sizes, num_tokens)
  choices = expert_loads.choices(
    "plot_routing", topk_idx, sizes.num_experts, sizes.num_ranks
  )
  tokens = expert_loads.received(choices, sizes.ep_size)
  rows = expert_loads.padded(tokens, sizes.alignment).sum(axis=1)
  text = _as_text(sizes, choices, rows)
  if path is not None:
    try:
      _write_png(sizes, choices, rows, path)
    except ModuleNotFoundError as e:
      path = pathlib.Path(path).with_suffix(".txt")
      path.write_text(text + "\n")
      warnings.warn(
        f"plot_routing: {e}; wrote {path} instead. Install matplotlib for a"
        " PNG.",
        stacklevel=2,
      )
  return text


def _sizes(
  layer_or_sizes: EpLayerConfig | RoutingSizes, num_tokens: int
) -> RoutingSizes:
  if isinstance(layer_or_sizes, RoutingSizes):
    return layer_or_sizes
  if not isinstance(layer_or_sizes, EpLayerConfig):
    raise TypeError(
      f"plot_routing: layer_or_sizes is a {type(layer_or_sizes).__name__}, but"
      " an EpLayerConfig or ep.debug.RoutingSizes is expected."
    )
  layer, ranks = layer_or_sizes, layer_or_sizes.group.num_token_ranks
  return RoutingSizes(
    layer.group.num_experts,
    layer.ep_size,
    ranks,
    layer.alignment,
    layer.capacity_for(num_tokens // ranks),
    layer.name,
  )


def _as_text(
  sizes: RoutingSizes, choices: np.ndarray, wanted: np.ndarray
) -> str:
  experts = range(0, sizes.num_experts, -(-sizes.num_experts // _COLUMNS))
  ranks = range(0, sizes.num_ranks, -(-sizes.num_ranks // _LINES))
  heat = np.add.reduceat(np.add.reduceat(choices, experts, 1), ranks, 0)
  most = max(heat.max(), 1)
  shades = -(-heat * (len(_SHADES) - 1) // most)  # only zeros are blank
  lines = [
    f"{sizes.name}: choices of experts 0 to {sizes.num_experts - 1} (across)"
    " by source rank (down)"
  ]
  for rank, row in zip(ranks, shades, strict=True):
    lines.append(f"{rank:>6} |{''.join(_SHADES[s] for s in row)}|")
  key = f"{_SHADES[0]!r} is none, {_SHADES[-1]!r} is {most}"
  for what, bins in {"column": experts, "line": ranks}.items():
    if bins.step > 1:
      key += f"; a {what} is {bins.step} of them"
  lines.append(f"{'':8}{key}")
  lines.append(
    f"rows wanted by each rank, mean {wanted.mean():.1f}"
    + ("" if sizes.capacity is None else f", capacity {sizes.capacity}")
  )
  full = int(max(wanted.max(), sizes.capacity or 0, 1))
  for rank, rows in zip(ranks, np.maximum.reduceat(wanted, ranks), strict=True):
    bar = "#" * -(-int(rows) * _BAR // full)
    over = sizes.capacity is not None and rows > sizes.capacity
    lines.append(f"{rank:>6} |{bar:<{_BAR}}| {rows}{'!' if over else ''}")
  return "\n".join(lines)


def _write_png(
  sizes: RoutingSizes,
  choices: np.ndarray,
  wanted: np.ndarray,
  path: str | os.PathLike[str],
) -> None:
  from matplotlib.figure import Figure  # an optional dependency

  figure = Figure(figsize=(10, 8), layout="constrained")
  heat, bars = figure.subplots(2, height_ratios=(2, 1))
  image = heat.imshow(choices, aspect="auto", interpolation="nearest")
  figure.colorbar(image, ax=heat, label="choices")
  heat.set(title=sizes.name, xlabel="expert", ylabel="source rank")
  bars.bar(np.arange(sizes.num_ranks), wanted)
  bars.axhline(wanted.mean(), linestyle="--", color="gray", label="mean")
  if sizes.capacity is not None:
    bars.axhline(sizes.capacity, color="red", label="capacity")
  bars.set(xlabel="rank", ylabel="rows wanted, padding included")
  bars.legend()
  figure.savefig(path, format="png")
