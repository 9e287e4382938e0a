# SPDX-License-Identifier: Apache-2.0
"""A picture of the losses of two runs on the same batches.

In the folder examples:
python -m lm.compare PICTURE.png NAME=METRICS.jsonl NAME=METRICS.jsonl
"""

from collections.abc import Mapping, Sequence
import pathlib
import sys
from typing import Any

from matplotlib.figure import Figure
import numpy as np

from lm import plot

_LAST = 20  # steps


def compare(
  runs: Mapping[str, Sequence[Mapping[str, Any]]], path: str | pathlib.Path
) -> float:
  """Draws the losses of two runs, 900 pixels wide.

  Args:
    runs: the records of `metrics.record`, by the names of the runs.
    path: of the picture.

  Returns:
    The second loss minus the first, in nats per byte, the mean of the last 20
    steps.
  """
  figure = Figure(figsize=(9, 3.5), layout="constrained")
  losses, more = figure.subplots(1, 2)
  for name, records in runs.items():
    plot.draw_loss(losses, records, f"{name}: ")
  losses.set_title("loss, nats per byte")
  losses.legend()
  first, second = (
    np.array([each["loss"] for each in records]) for records in runs.values()
  )
  names = " minus ".join(reversed(runs))
  plot.draw(more, np.arange(len(first)) + 1, second - first, names)
  more.axhline(0, color="gray", linestyle="--")
  more.set_title(f"loss: {names}")
  for axes in (losses, more):
    axes.set_xlabel("step")
  figure.savefig(path, dpi=100)
  return float(np.mean((second - first)[-_LAST:]))


if __name__ == "__main__":
  target, *given = sys.argv[1:]
  paths = dict(each.split("=", 1) for each in given)
  runs = {name: plot.read(path) for name, path in paths.items()}
  more = compare(runs, target)
  print(f"{more:+.4f} nats, the mean of the last {_LAST} steps")
