# SPDX-License-Identifier: Apache-2.0
"""Makes numbers, tables and verdicts from records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
import itertools
import statistics
from typing import Any

import numpy as np

from benchmarks import contenders
from benchmarks.ops import ALL

Record = dict[str, Any]

CASE = ("world", "shape", "dtype", "routing", "op")


def add_statistics(record: Record) -> Record:
  """Returns the record with statistics of its times.

  The quartiles show how far the rounds spread. The time per token is divided by
  the tokens of all ranks. workload.py defines "payload"; an op without payload,
  like prepare, has no rate.
  """
  seconds = record["seconds"]
  q1, median, q3 = (float(np.quantile(seconds, q)) for q in (0.25, 0.5, 0.75))
  payload = record["payload_bytes"] * ALL[record["op"]].directions
  return {
    **record,
    "median_s": median,
    "q1_s": q1,
    "q3_s": q3,
    "payload_gb_per_s": payload / median / 1e9 if payload else None,
    "ns_per_token": median * 1e9 / record["tokens"],
  }


def cases(records: Iterable[Record]) -> Iterator[tuple[tuple, list[Record]]]:
  """Yields the records of each world, shape, dtype, routing and op."""
  key = lambda record: tuple(record[name] for name in CASE)  # noqa: E731
  for case, group in itertools.groupby(records, key):
    yield case, list(group)


def ratio(slow: Record, fast: Record) -> float:
  """Returns how many times as fast one is: the median over the rounds.

  Both run in every round, one soon after the other, so other work that lasts
  longer than a round does not affect the ratio.
  """
  pairs = zip(slow["seconds"], fast["seconds"], strict=True)
  return statistics.median(a / b for a, b in pairs)


def best_pure_xla(group: list[Record]) -> Record | None:
  rivals = [r for r in group if contenders.is_pure_xla(r["contender"])]
  return min(rivals, key=lambda r: r["median_s"], default=None)


def find(group: list[Record], contender: str) -> Record | None:
  return next((r for r in group if r["contender"] == contender), None)


def print_tables(records: list[Record]) -> None:
  """Prints a table for each case; its ratios are medians over the rounds."""
  for case, group in cases(records):
    world, shape, dtype, routing, op = case
    print(f"\n{op}  {shape}  {dtype}  {routing}  world {world}")
    print(
      "                     median      middle half    payload   per token"
      "    peak planned  host is  of memcpy"
    )
    for record in group:
      print(_row(record, find(group, "host"), find(group, contenders.MEMCPY)))


def _row(record: Record, host: Record | None, memcpy: Record | None) -> str:
  def show(value, form, unit, width):
    text = "" if value is None else f"{value:{form}}{unit}"
    return text.rjust(width)

  def megabytes(key):
    return show(record[key] and record[key] / 2**20, ".0f", " MB", 7)

  rate = record["payload_gb_per_s"]
  times = host and ratio(record, host)
  share = memcpy and ratio(memcpy, record)
  return (
    f"{record['contender']:16}"
    f" {record['median_s'] * 1e3:7.2f} ms"
    f" {record['q1_s'] * 1e3:7.2f}..{record['q3_s'] * 1e3:7.2f}"
    f" {show(rate, '.2f', ' GB/s', 10)}"
    f" {record['ns_per_token']:8.0f} ns"
    f" {megabytes('peak_bytes')} {megabytes('planned_bytes')}"
    f" {show(times, '.2f', ' x', 8)}"
    f" {show(share, '.2f', '', 9)}"
  )


def summary(records: list[Record]) -> list[Record]:
  """Returns geometric means over the shapes, per world, dtype, routing and op.

  The means are of how many times as fast host is as the best pure-XLA contender
  of each shape, and of the share of one thread's memcpy that host reaches.
  Either is None if one of the two contenders did not take part.
  """
  means: dict[tuple, list[tuple]] = {}
  for (world, _, dtype, routing, op), group in cases(records):
    host = find(group, "host")
    best = best_pure_xla(group)
    memcpy = find(group, contenders.MEMCPY)
    means.setdefault((world, dtype, routing, op), []).append(
      (
        ratio(best, host) if host and best else None,
        ratio(memcpy, host) if host and memcpy else None,
      )
    )
  return [
    {
      **dict(zip(("world", "dtype", "routing", "op"), key, strict=True)),
      "shapes": len(pairs),
      "times_best_pure_xla": _geometric_mean([a for a, _ in pairs]),
      "share_of_memcpy": _geometric_mean([b for _, b in pairs]),
    }
    for key, pairs in means.items()
  ]


def print_summary(rows: list[Record]) -> None:
  print("\nhost, geometric mean over the shapes")
  print(
    "world  dtype     routing       op            shapes"
    "  times the best pure XLA  of memcpy"
  )
  for row in rows:
    best, share = (
      "-" if x is None else f"{x:.2f}"
      for x in (row["times_best_pure_xla"], row["share_of_memcpy"])
    )
    print(
      f"{row['world']:6} {row['dtype']:9} {row['routing'][-13:]:13}"
      f" {row['op']:13} {row['shapes']:6} {best:>24} {share:>10}"
    )


def gate(records: list[Record], bound: float) -> bool:
  """Prints and returns if host is `bound` times as fast as HAND_WRITTEN."""
  passed = bool(records)
  for case, group in cases(records):
    host, rival = find(group, "host"), find(group, contenders.HAND_WRITTEN)
    times = ratio(rival, host) if host and rival else float("nan")
    good = times >= bound
    passed &= good
    print(
      f"{'OK' if good else 'FAILED'}: {' '.join(case)}: host is {times:.2f}"
      f" times as fast as {contenders.HAND_WRITTEN}; at least {bound:g} is"
      " demanded."
    )
  return passed


def _geometric_mean(values: list[float | None]) -> float | None:
  if not values or None in values:
    return None
  return statistics.geometric_mean(values)
