# SPDX-License-Identifier: Apache-2.0
"""Prints tables of results and the gate's verdict."""

from __future__ import annotations

from collections.abc import Mapping
import statistics
from typing import NamedTuple

import numpy as np

from benchmarks import contenders
from benchmarks.measure import Result
from benchmarks.timing import ratio


class Case(NamedTuple):
  """The process layout (`world`), shape, dtype and op of a measurement."""

  world: str
  shape: str
  dtype: str
  op: str


Results = Mapping[Case, Mapping[str, Result]]


def print_tables(results: Results) -> None:
  """Prints a table for each case, with medians and ratios over the rounds."""
  for case, of_case in results.items():
    print(f"\n{case.op}  {case.shape}  {case.dtype}  processes {case.world}")
    print(
      "                     median      middle half     peak  planned  host is"
    )
    host = of_case.get("host")
    for name, result in of_case.items():
      q1, median, q3 = np.quantile(result.seconds, (0.25, 0.5, 0.75)) * 1e3
      times = f"{ratio(result.seconds, host.seconds):.2f} x" if host else ""
      print(
        f"{name:16} {median:7.2f} ms {q1:7.2f}..{q3:7.2f}"
        f" {result.peak_bytes / 1e6:5.0f} MB {result.planned_bytes / 1e6:5.0f}"
        f" MB {times:>8}"
      )


def times_best_xla(of_case: Mapping[str, Result]) -> float:
  """Returns the time of the best pure-XLA contender over the time of host."""
  host = of_case.get("host")
  rivals = [
    result.seconds
    for name, result in of_case.items()
    if contenders.is_pure_xla(name)
  ]
  if host is None or not rivals:
    return float("nan")
  return ratio(min(rivals, key=np.median), host.seconds)


def print_summary(results: Results) -> None:
  """Prints the geometric means of `times_best_xla` over the shapes."""
  means: dict[str, list[float]] = {}
  for case, of_case in results.items():
    row = f"{case.world:6} {case.dtype:9} {case.op:13}"
    means.setdefault(row, []).append(times_best_xla(of_case))
  print("\nhost, times as fast as the best pure XLA, geometric mean of shapes")
  for row, times in means.items():
    print(f"{row} {statistics.geometric_mean(times):6.2f}")


def gate(results: Results, bound: float) -> bool:
  """Prints for each case if host is `bound` times as fast as HAND_WRITTEN.

  Returns whether all cases pass.
  """
  passed = bool(results)
  for case, of_case in results.items():
    times = float("nan")
    if {"host", contenders.HAND_WRITTEN} <= of_case.keys():
      rival, host = of_case[contenders.HAND_WRITTEN], of_case["host"]
      times = ratio(rival.seconds, host.seconds)
    good = times >= bound
    passed &= good
    print(
      f"{'OK' if good else 'FAILED'}: {' '.join(case)}: host is {times:.2f}"
      f" times as fast as {contenders.HAND_WRITTEN}; at least {bound:g} is"
      " demanded."
    )
  return passed
