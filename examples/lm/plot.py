# SPDX-License-Identifier: Apache-2.0
"""Draws a training run, 1200 pixels wide."""

from collections.abc import Mapping, Sequence
import pathlib
from typing import Any

from matplotlib.figure import Figure
import numpy as np

Records = Sequence[Mapping[str, Any]]


def plot_run(
  path: pathlib.Path, moe: Records, dense: Records, unigram: float, title: str
) -> None:
  """Draws losses, expert loads, and router entropies.

  Args:
    moe: records of consecutive steps.
    dense: records of a dense model, or an empty list.
    unigram: loss of the best prediction without context.
  """
  runs = {"": _arrays(moe)} | ({"dense: ": _arrays(dense)} if dense else {})
  of_moe = runs[""]
  steps, load = of_moe["step"], of_moe["load"]  # [N], [N, layers, E]
  layers, experts = load.shape[1:]
  figure = Figure(figsize=(12, 5 + layers), layout="constrained")
  figure.suptitle(title)
  top, bottom = figure.subfigures(2, 1, height_ratios=(5, layers))
  loss, *difference, imbalance, entropy = top.subplots(1, 2 + len(runs))

  for name, run in runs.items():
    color = _draw(loss, run["step"], run["loss"], f"{name}training")
    there = ~np.isnan(run["held_out"])
    points = run["step"][there], run["held_out"][there]
    loss.plot(*points, "o--", color=color, label=f"{name}held out")
  loss.axhline(unigram, color="gray", linestyle="--", label="unigram entropy")
  loss.set_title("loss, nats per byte")
  loss.legend()

  for axes in difference:
    both, i, j = np.intersect1d(steps, run["step"], return_indices=True)
    more = run["loss"][j] - of_moe["loss"][i]
    _draw(axes, both, more, "training")
    axes.axhline(0, color="gray", linestyle="--")
    # The y limits ignore the large differences in the first sixth of the steps.
    bound = np.abs(more[len(more) // 6 :]).max(initial=1e-3)
    axes.set_ylim(-bound, bound)
    axes.set_title("loss: dense minus MoE")

  for layer in range(layers):
    _draw(imbalance, steps, of_moe["imbalance"][:, layer], str(layer))
    _draw(entropy, steps, of_moe["entropy"][:, layer], str(layer))
  imbalance.set_title("busiest expert's load / mean")
  imbalance.legend(title="layer", ncols=2)
  dropped = of_moe["dropped"].sum()
  imbalance.set_xlabel(f"step ({dropped:,.0f} choices dropped)")
  entropy.set_title("router's entropy, nats")

  maps = bottom.subplots(layers, 1, sharex=True, squeeze=False)[:, 0]
  for layer, axes in enumerate(maps):
    image = axes.imshow(
      (load / load.mean(axis=2, keepdims=True))[:, layer].T,
      aspect="auto",
      interpolation="nearest",
      cmap="coolwarm",
      vmin=0,
      vmax=2,
      extent=(steps[0] - 0.5, steps[-1] + 0.5, experts - 0.5, -0.5),
    )
    axes.set_ylabel(f"layer {layer}")
  maps[0].set_title("load of each expert / mean")
  maps[-1].set_xlabel("step")
  bottom.colorbar(image, ax=maps, extend="max", label="more than 2 is as 2")
  figure.savefig(path, dpi=100)


def _arrays(records):
  """Returns an array `[N, ...]` for each field of N records; NaN for None."""
  return {
    name: np.array([each[name] for each in records], float)
    for name in records[0]
  }


def _draw(axes, steps, values, label):
  """Draws a faint curve, and its moving average over a 30th of the steps."""
  sums = np.concatenate([[0], np.cumsum(values)])
  last = np.arange(len(values)) + 1
  first = np.maximum(last - max(1, len(values) // 30), 0)
  means = (sums[last] - sums[first]) / (last - first)
  (line,) = axes.plot(steps, means, label=label)
  axes.plot(steps, values, color=line.get_color(), linewidth=0.6, alpha=0.3)
  return line.get_color()
