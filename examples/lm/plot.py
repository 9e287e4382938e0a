# SPDX-License-Identifier: Apache-2.0
"""A picture of a run: loss, load of experts, routers' entropy, drops.

python examples/lm/plot.py METRICS.jsonl PICTURE.png
"""

from collections.abc import Mapping, Sequence
import json
import pathlib
import sys
from typing import Any

from matplotlib.figure import Figure
import numpy as np


def check(path: pathlib.Path) -> None:
  """Raises ValueError if no picture can have this name."""
  kinds = Figure().canvas.get_supported_filetypes()
  if path.suffix[1:].lower() not in kinds:
    raise ValueError(
      f"{path}: a picture's name must end with one of .{', .'.join(kinds)}."
    )


def plot(
  records: Sequence[Mapping[str, Any]],
  path: str | pathlib.Path,
  unigram: float | None = None,
) -> None:
  """Draws the records of `metrics.record`, and the unigram entropy in nats."""
  steps = np.array([each["step"] for each in records])
  load = np.array([each["load"] for each in records], float)  # [N, layers, E]
  layers = load.shape[1]
  figure = Figure(figsize=(9, 4 + 0.9 * layers), layout="constrained")
  top, bottom = figure.subfigures(2, 1, height_ratios=(4, 0.9 * layers))
  (loss, imbalance), (entropy, dropped) = top.subplots(2, 2, sharex=True)

  loss.plot(steps, [each["loss"] for each in records], linewidth=0.8)
  if unigram is not None:
    loss.axhline(unigram, color="gray", linestyle="--", linewidth=0.8)
    loss.annotate("unigram entropy", (steps[-1], unigram), ha="right", va="top")
  loss.set_title("loss, nats per byte")
  for axes, name, title in [
    (imbalance, "imbalance", "busiest expert's load / mean"),
    (entropy, "entropy", "router's entropy, nats"),
    (dropped, "dropped", "choices dropped"),
  ]:
    values = np.array([each[name] for each in records])
    axes.plot(steps, values, linewidth=0.8, label=range(layers))
    axes.set_title(title)
  imbalance.legend(title="layer", ncols=2)
  dropped.set_ylim(0, max(1, *dropped.get_ylim()))

  even = load.mean(axis=2, keepdims=True)
  maps = bottom.subplots(layers, 1, sharex=True, squeeze=False)[:, 0]
  for layer, axes in enumerate(maps):
    image = axes.imshow(
      (load / even)[:, layer].T,
      aspect="auto",
      interpolation="nearest",
      cmap="coolwarm",
      vmin=0,
      vmax=2,
      extent=(steps[0] - 0.5, steps[-1] + 0.5, load.shape[2] - 0.5, -0.5),
    )
    axes.set_ylabel(f"layer {layer}")
  maps[0].set_title("load of each expert / mean")
  maps[-1].set_xlabel("step")
  bottom.colorbar(image, ax=maps)
  figure.savefig(path, dpi=72)


if __name__ == "__main__":
  source, target = sys.argv[1:]
  lines = pathlib.Path(source).read_text().splitlines()
  plot([json.loads(line) for line in lines], target)
