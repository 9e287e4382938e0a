# SPDX-License-Identifier: Apache-2.0
"""A picture of a run: loss, load of experts, routers' entropy.

python examples/lm/plot.py METRICS.jsonl PICTURE.png [METRICS_OF_DENSE.jsonl]
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
  dense: Sequence[Mapping[str, Any]] = (),
  title: str | None = None,
) -> None:
  """Draws the records of `metrics.record`, 1200 pixels wide.

  Args:
    records: of consecutive steps.
    path: of the picture.
    unigram: the unigram entropy of the text, in nats.
    dense: the records of a dense model of the same active size.
    title: what the run is.
  """
  steps = np.array([each["step"] for each in records])
  load = np.array([each["load"] for each in records], float)  # [N, layers, E]
  layers = load.shape[1]
  figure = Figure(figsize=(12, 5 + layers), layout="constrained")
  figure.suptitle(title)
  top, bottom = figure.subfigures(2, 1, height_ratios=(5, layers))
  panels = top.subplots(1, 4 if dense else 3, sharex=True)
  loss, *differences, imbalance, entropy = panels

  draw_loss(loss, records, "")
  if dense:
    draw_loss(loss, dense, "dense: ")
    draw_difference(differences[0], records, dense)
  if unigram is not None:
    loss.axhline(unigram, color="gray", linestyle="--", label="unigram entropy")
  loss.set_title("loss, nats per byte")
  loss.legend()
  for axes, name, what in [
    (imbalance, "imbalance", "busiest expert's load / mean"),
    (entropy, "entropy", "router's entropy, nats"),
  ]:
    of_layers = np.array([each[name] for each in records]).T
    for layer, values in enumerate(of_layers):
      draw(axes, steps, values, layer)
    axes.set_title(what)
  imbalance.legend(title="layer", ncols=2)
  dropped = np.sum([each["dropped"] for each in records])
  imbalance.set_xlabel(f"step ({dropped:,} choices dropped)")

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
  bottom.colorbar(image, ax=maps, extend="max", label="more than 2 is as 2")
  figure.savefig(path, dpi=100)


def draw_loss(axes, records, model):
  """Draws what a model has reached on text of training and on other text."""
  steps = [each["step"] for each in records]
  line = draw(
    axes, steps, [each["loss"] for each in records], f"{model}training"
  )
  held_out = [
    (each["step"], each["held_out"])
    for each in records
    if each["held_out"] is not None
  ]
  axes.plot(
    *np.reshape(held_out, (-1, 2)).T,
    "o--",
    color=line.get_color(),
    label=f"{model}held out",
  )


def draw_difference(axes, records, dense):
  """Draws the differences of losses, which are small beside the losses."""
  others = {each["step"]: each["loss"] for each in dense}
  differences = [
    (each["step"], others[each["step"]] - each["loss"])
    for each in records
    if each["step"] in others
  ]
  steps, values = np.reshape(differences, (-1, 2)).T
  draw(axes, steps, values, "training")
  axes.axhline(0, color="gray", linestyle="--")
  # The first steps differ most, and would hide the others.
  bound = np.abs(values[len(values) // 6 :]).max(initial=1e-3)
  axes.set_ylim(-bound, bound)
  axes.set_title("loss: dense minus MoE")


def draw(axes, steps, values, label):
  """Draws a faint curve, and over it means over a 30th of the steps."""
  sums = np.concatenate([[0], np.cumsum(values)])
  last = np.arange(len(values)) + 1
  first = np.maximum(last - max(1, len(values) // 30), 0)
  means = (sums[last] - sums[first]) / (last - first)
  (line,) = axes.plot(steps, means, label=label)
  axes.plot(steps, values, color=line.get_color(), linewidth=0.6, alpha=0.3)
  return line


def read(path: str | pathlib.Path) -> list[dict[str, Any]]:
  """Returns the records of a run."""
  lines = pathlib.Path(path).read_text().splitlines()
  return [json.loads(line) for line in lines]


if __name__ == "__main__":
  source, target, *more = sys.argv[1:]
  runs = [read(path) for path in (source, *more)]
  plot(runs[0], target, dense=sum(runs[1:], []))
