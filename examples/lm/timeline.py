# SPDX-License-Identifier: Apache-2.0
"""A picture of a trace: a step of all ranks, and where their time went.

python examples/lm/timeline.py STEPS.json.gz PICTURE.png
"""

import collections
import gzip
import json
import pathlib
import sys

from matplotlib.figure import Figure
import numpy as np

COLORS = {"moving": "tab:blue", "waiting": "tab:red", "between": "lightgray"}


def plot(trace: str | pathlib.Path, path: str | pathlib.Path) -> None:
  """Draws the file of `ep.trace` at `trace`, 1200 pixels wide.

  It shows the program with the most exchanges in a step. On the left is its
  step of the median length, with a line for each rank; on the right a bar for
  each rank, with the means of its times by cause.

  Raises:
    ValueError: there are fewer than two steps.
  """
  with (gzip.open if str(trace).endswith(".gz") else open)(trace) as file:
    exchanges = json.load(file)["ep"]["exchanges"]
  counts = collections.Counter((e["program"], e["step"]) for e in exchanges)
  program, _ = max(counts, key=counts.get)
  steps = collections.defaultdict(list)
  for e in exchanges:
    if e["program"] == program:
      steps[e["step"]].append(e)
  ends = {n: max(max(e["ended"]) for e in each) for n, each in steps.items()}
  # A step begins where the one before ends.
  spans = {n: ends[n] - ends[n - 1] for n in ends if n - 1 in ends}
  if not spans:
    raise ValueError(f"{trace} has fewer than two steps; trace more of them.")
  median = sorted(spans, key=spans.get)[len(spans) // 2]
  ranks = sorted(
    {(e["domain"], r) for e in exchanges for r in range(len(e["came"]))}
  )

  figure = Figure(figsize=(12, 1.5 + 0.4 * len(ranks)), layout="constrained")
  step, bars = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
  means = {cause: np.zeros(len(ranks)) for cause in COLORS}
  for n in spans:
    for e in steps[n]:
      times = np.transpose([e["came"], e["began"], e["ended"]])
      for r, (came, began, ended) in enumerate(times):
        row = ranks.index((e["domain"], r))
        for cause, start, end in (
          ("waiting", came, began),
          ("moving", began, ended),
        ):
          ms = 1e3 * (end - start)
          means[cause][row] += ms / len(spans)
          if n == median:
            left = 1e3 * (start - ends[n - 1])
            step.barh(row, ms, left=left, color=COLORS[cause])
  mean = 1e3 * np.mean([*spans.values()])
  means["between"] = mean - means["moving"] - means["waiting"]
  left = np.zeros(len(ranks))
  for cause, values in means.items():
    bars.barh(
      range(len(ranks)), values, left=left, color=COLORS[cause], label=cause
    )
    left += values
  step.set_xlim(0, 1e3 * spans[median])
  step.set_yticks(range(len(ranks)), [f"{d}.{r}" for d, r in ranks])
  step.invert_yaxis()
  step.set_ylabel("domain.rank")
  step.set_title(f"step {median}")
  step.set_xlabel("ms")
  bars.set_title(f"mean of {len(spans)} steps")
  bars.set_xlabel("ms")
  figure.legend(*bars.get_legend_handles_labels(), loc="outside right upper")
  figure.savefig(path, dpi=100)


if __name__ == "__main__":
  plot(*sys.argv[1:])
