# SPDX-License-Identifier: Apache-2.0
"""Draws the payload rates of records, side by side."""

from __future__ import annotations

import pathlib
import sys

import numpy as np

from benchmarks import contenders, report


def check_available() -> None:
  """Ends the program if matplotlib is missing."""
  try:
    import matplotlib  # noqa: F401
  except ModuleNotFoundError:
    sys.exit("ep_bench: --plot needs matplotlib; pip install matplotlib")


def save(records: list[report.Record], path: pathlib.Path) -> None:
  """Writes a PNG: a row per op, a column per world, dtype and routing."""
  import matplotlib

  matplotlib.use("Agg")  # no display
  from matplotlib import pyplot

  records = [r for r in records if r["payload_gb_per_s"] is not None]
  rows = list(dict.fromkeys(r["op"] for r in records))
  columns = list(dict.fromkeys(map(_column, records)))
  present = {r["contender"] for r in records}
  names = [name for name in contenders.names() if name in present]
  figure, axes = pyplot.subplots(
    len(rows),
    len(columns),
    figsize=(1 + 5 * len(columns), 1 + 3 * len(rows)),
    sharey="row",
    squeeze=False,
  )
  for (row, op), (column, name) in (
    (r, c) for r in enumerate(rows) for c in enumerate(columns)
  ):
    ax = axes[row, column]
    ax.set_title(", ".join((op, *name)))
    here = [r for r in records if (r["op"], _column(r)) == (op, name)]
    shapes = list(dict.fromkeys(r["shape"] for r in here))
    _bars(ax, here, shapes, names)
    if column == 0:
      ax.set_ylabel("payload, GB/s")
  handles, labels = axes[0, 0].get_legend_handles_labels()
  figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
  figure.set_layout_engine("constrained")
  figure.savefig(path, dpi=120, format="png")


def _column(record: report.Record) -> tuple[str, ...]:
  return record["world"], record["dtype"], record["routing"]


def _bars(ax, records, shapes, names) -> None:
  """Draws a group of bars per shape; whiskers span the middle half."""
  width = 0.8 / len(names)
  for at, name in enumerate(names):
    mine = [r for r in records if r["contender"] == name]
    rates = np.array([r["payload_gb_per_s"] for r in mine])
    q1, median, q3 = (
      np.array([r[name] for r in mine]) for name in ("q1_s", "median_s", "q3_s")
    )
    spread = rates * [1 - median / q3, median / q1 - 1]
    places = [shapes.index(r["shape"]) + (at + 0.5) * width for r in mine]
    ax.bar(places, rates, width, yerr=spread, label=name)
  ax.set_xticks([i + 0.4 for i in range(len(shapes))], shapes, fontsize=8)
