# SPDX-License-Identifier: Apache-2.0
"""Explains for which rank the ranks of a trace waited, and why.

`python -m ep explain FOLDER` explains each trace of a folder, such as
$EP_TRACE. It first merges the files of the processes.
"""

from __future__ import annotations

import argparse
import collections
from collections.abc import Iterator
import dataclasses
import math
import os
from typing import Any, NamedTuple

import numpy as np

from ep._src.base import arguments
from ep._tools.trace import trace

# A rank is late at an op if its lateness is at least _OF_STEP times the step's
# time, _LATE_S seconds (on a busy machine another thread may run for 3 ms), and
# _OF_LAST times the last rank's lateness. A rank is blamed if it is late in at
# least _SHARE of the steps.
_OF_STEP, _LATE_S, _OF_LAST, _SHARE = 0.1, 5e-3, 0.75, 0.5
# A rank's rows may cause lateness if they are this many times the mean rows.
_MORE_ROWS = 1.2
# The significance level of two tests, of how often a rank is late and how often
# it is last: the largest chance to blame a rank although all ranks are alike.
_CHANCE = 0.05

_Step = list[dict[str, Any]]  # exchanges of a step


@dataclasses.dataclass(frozen=True)
class Blame:
  """A rank that other ranks waited for, at one op of a layer.

  A rank's lateness is its arrival time minus the lower median of all arrival
  times.

  Attributes:
    domain, rank: the rank.
    layer, op: the op.
    share: fraction of the steps in which the rank was late.
    late_s: its lateness in seconds, a median over these steps.
    rows_ratio: its rows over the mean rows.
    expert: its expert with the most tokens; None if the rows are not known,
      because the step has no ep_prepare of the layer.
    expert_share: fraction of the rank's tokens that this expert has.
    balanced_s: the lateness that remains with the mean rows; None if the rows
      are not the cause.
  """

  domain: int
  rank: int
  layer: str
  op: str
  share: float
  late_s: float
  rows_ratio: float
  expert: int | None
  expert_share: float
  balanced_s: float | None

  def __str__(self) -> str:
    text = (
      f"domain {self.domain}, rank {self.rank} came late to {self.op} in layer"
      f' "{self.layer}" in {self.share:.0%} of the steps, by'
      f" {self.late_s * 1e3:.1f} ms; "
    )
    if self.balanced_s is not None:
      return text + (
        f"its experts had {self.rows_ratio:.1f} times the mean rows"
        f" ({self.expert_share:.0%} of them expert {self.expert}); balanced it"
        f" would have been {self.balanced_s * 1e3:.1f} ms."
      )
    rows = "were average"
    if self.expert is None:
      rows = "are not known"
    elif not 1 / _MORE_ROWS < self.rows_ratio < _MORE_ROWS:
      rows = f"were {self.rows_ratio:.1f} times the mean, which is not why"
    return text + f"its rows {rows}: it computed longer before."


@dataclasses.dataclass(frozen=True)
class Failure:
  """A failure of an op, and the ranks that caused it.

  Attributes:
    domain: the EP domain.
    ranks: the ranks that did not run the op; empty if all ranks ran it.
    layer, op: the op.
    step: the launch of the program.
    are_absent: True if `ranks` did not arrive; False if they ran another op.
    error: the error of the op.
  """

  domain: int
  ranks: tuple[int, ...]
  layer: str
  op: str
  step: int
  are_absent: bool
  error: str

  def __str__(self) -> str:
    where = f'{self.op} in layer "{self.layer}", step {self.step}'
    ranks = " and ".join(map(str, self.ranks))
    who = f"domain {self.domain}, rank {ranks}"
    if not self.ranks:
      text = f"domain {self.domain}: {where}, failed"
    elif self.are_absent:
      text = f"{who} did not come to {where}"
    else:
      text = f"{who} ran something else than most ranks at {where}"
    return f"{text}: {self.error}"


@dataclasses.dataclass(frozen=True)
class Explanation:
  """An explanation of the time of a step. Times are medians over steps.

  Attributes:
    num_steps: number of steps, without the first step of each program. With
      fewer than two steps, after a failure, the times are NaN.
    step_s: seconds from the end of a step's ops to the end of the next
      step's ops.
    moved_s: seconds of `step_s` in which rows were copied.
    waited_s: seconds of `step_s` in which a rank waited, a mean over ranks.
    punctual_s: `step_s` if no rank were late.
    balanced_s: `step_s` if the experts of all ranks had the same rows.
    blames: the ranks that others waited for, the worst first; often empty.
    failure: the first error of an op; None if no op failed.
  """

  num_steps: int
  step_s: float
  moved_s: float
  waited_s: float
  punctual_s: float
  balanced_s: float
  blames: tuple[Blame, ...]
  failure: Failure | None = None

  def __repr__(self) -> str:
    if self.num_steps < 2:
      return str(self.failure)
    rows = (
      (f"step (median of {self.num_steps})", self.step_s),
      ("  moved", self.moved_s),
      ("  waited", self.waited_s),
      ("step if no rank were late", self.punctual_s),
      ("step if all loads were equal", self.balanced_s),
    )
    table = [f"{name:<32}{s * 1e3:10.2f} ms" for name, s in rows]
    found = (self.failure, *self.blames) if self.failure else self.blames
    blames = [*map(str, found)] or ["No rank is to blame."]
    return "\n".join(blames + table)


def explain(path: str | os.PathLike[str]) -> Explanation:
  """Explains a file that `ep.trace` wrote, or a folder that EP_TRACE named.

  A rank's lateness at an op is its arrival time minus the lower median of all
  arrival times. The rank is late if its lateness is at least a tenth of the
  step, 5 ms, and 0.75 times the last rank's lateness. A rank is blamed if it is
  late in at least half of the steps, and if chance alone (all ranks equally
  often late, and equally often last) would blame a rank in fewer than 10 % of
  such traces. Its rows are the cause if the op follows the experts and the rank
  had at least 1.2 times the mean rows.

  After a failed op, the explanation names the ranks that did not run the op, or
  only the ranks of killed processes, if there are any. Of several failed ops,
  it takes the one that lacked a killed process, then the one that lacked the
  fewest ranks, then the earliest.

  Raises:
    OSError: the file cannot be read.
    ValueError: the file is not a trace, or has fewer than three steps and no
      failure; or the folder has no trace, several, or an incomplete one.
  """
  merged = trace.load(path)
  try:
    failure = _first_failure(merged) if merged["failures"] else None
    return explain_exchanges(merged["exchanges"], failure)
  except trace.DAMAGES as e:
    raise trace.damaged(path, e) from e


def explain_exchanges(
  exchanges: list[dict[str, Any]], failure: Failure | None = None
) -> Explanation:
  """Explains the exchanges of a trace; see `trace.merge`."""
  steps = _steps(exchanges)
  names = "step_s", "moved_s", "waited_s", "punctual_s", "balanced_s"
  if failure and len(steps) < 2:
    unknown = dict.fromkeys(names, math.nan)
    return Explanation(len(steps), blames=(), failure=failure, **unknown)
  arguments.check(
    len(steps) > 1,
    "ep.explain",
    "the trace has fewer than three steps; trace more of them.",
  )
  totals = []
  places = collections.defaultdict(list)
  for start, step in steps:
    runs: collections.Counter[Any] = collections.Counter()
    ops = list(_ops(start, step))
    for e, op in zip(step, ops, strict=True):
      place = e["domain"], e["layer"], e["op"]
      places[*place, runs[place]].append(op)
      runs[place] += 1
    moved, waited, late, unbalanced = np.sum([o.times for o in ops], axis=0)
    step_s = np.max(step[-1]["ended"]) - np.max(start)
    totals.append((step_s, moved, waited, step_s - late, step_s - unbalanced))
  medians = np.median(totals, axis=0).tolist()
  blames = [
    blame
    for place, seen in places.items()
    for blame in _blames(*place[:3], seen, medians[0], len(places))
  ]
  blames.sort(key=lambda b: -b.share * b.late_s)
  times = dict(zip(names, medians, strict=True))
  return Explanation(len(steps), blames=tuple(blames), failure=failure, **times)


def _first_failure(merged: dict[str, Any]) -> Failure:
  """Returns the failure that caused the other failures; see `explain`."""

  def killed(failure: dict[str, Any]) -> list[int]:
    first = failure["domain"] * merged["ep_size"]
    return [r for r in failure["ranks"] if first + r in merged["killed"]]

  def order(failure: dict[str, Any]) -> tuple[Any, ...]:
    return not killed(failure), len(failure["ranks"]), failure["at"]

  first = min(merged["failures"], key=order)
  return Failure(
    first["domain"],
    tuple(sorted(killed(first) or first["ranks"])),
    first["layer"],
    first["op"],
    first["step"],
    first["are_absent"],
    error=first["failed"],
  )


class _Op(NamedTuple):
  """The times and loads of all ranks at an op of a step, [P] each."""

  late_s: np.ndarray  # lateness
  balanced_s: np.ndarray  # lateness if all ranks had the mean rows
  rows_ratio: np.ndarray
  tokens: list[list[int]]  # tokens by rank and expert; empty if unknown
  times: tuple[float, ...]  # moved, waited, late, late because of rows


def _ops(start: np.ndarray, step: _Step) -> Iterator[_Op]:
  """Yields the ops of a step; `start` has each rank's start of the step."""
  ends, prepared = start, {}
  for e in step:
    if e["op"] == "ep_prepare":
      prepared[e["layer"]] = np.maximum(e["rows"], 1), e["tokens"]
    came, end = np.array(e["came"]), np.array(e["ended"])
    last = came.max()
    rows, tokens = prepared.get(e["layer"], (np.ones(len(came)), []))
    late = balanced = _lateness(came)
    if e["op"] in ("ep_combine", "ep_dispatch_bwd"):  # these ops follow experts
      balanced = _lateness(_with_equal_rows(came - ends, rows))
    because_of_rows = max(0.0, late.max() - balanced.max())
    yield _Op(
      late,
      np.clip(balanced, 0.0, late),
      rows / rows.mean(),
      tokens,
      (np.max(end - last), np.mean(last - came), late.max(), because_of_rows),
    )
    ends = end


def _blames(
  domain: int,
  layer: str,
  op: str,
  seen: list[_Op],
  step_s: float,
  num_places: int,
) -> Iterator[Blame]:
  """Yields the ranks to blame at an op; `seen` has the op's times by step."""
  late = np.array([o.late_s for o in seen])  # [step, rank]
  least = np.maximum(_OF_LAST * late.max(1), max(_OF_STEP * step_s, _LATE_S))
  is_late = late >= least[:, np.newaxis]
  num_steps, num_ranks = late.shape
  for rank, count in enumerate(is_late.sum(axis=0).tolist()):
    if count < _SHARE * num_steps:
      continue
    num_last = int(np.sum(late.argmax(axis=1) == rank))
    chance = min(
      _at_least(count, num_steps, float(is_late.mean())),
      _at_least(num_last, num_steps, 1 / num_ranks),
    )
    if num_ranks * num_places * chance > _CHANCE:
      continue
    own = [
      o for o, is_own in zip(seen, is_late[:, rank], strict=True) if is_own
    ]
    late_s, balanced_s, ratio = np.median(
      [(o.late_s[rank], o.balanced_s[rank], o.rows_ratio[rank]) for o in own],
      axis=0,
    ).tolist()
    expert, expert_share = None, 0.0
    if all(o.tokens for o in own):
      tokens = np.sum([o.tokens[rank] for o in own], axis=0)
      expert = rank * tokens.size + int(tokens.argmax())
      expert_share = float(tokens.max() / max(tokens.sum(), 1))
    is_load = ratio >= _MORE_ROWS and balanced_s < late_s
    yield Blame(
      domain,
      rank,
      layer,
      op,
      count / num_steps,
      late_s,
      ratio,
      expert,
      expert_share,
      balanced_s if is_load else None,
    )


def _lateness(came: np.ndarray) -> np.ndarray:
  """Returns arrival times minus their lower median."""
  late: np.ndarray = came - np.sort(came)[(len(came) - 1) // 2]
  return late


def _at_least(count: int, trials: int, p: float) -> float:
  """Returns the binomial chance of at least `count` successes; 0 < p < 1."""

  def log_chance(n: int) -> float:
    # Use logarithms, because a binomial coefficient could overflow a float.
    ways = math.lgamma(trials + 1) - math.lgamma(n + 1)
    ways -= math.lgamma(trials - n + 1)
    return ways + n * math.log(p) + (trials - n) * math.log(1 - p)

  return sum(math.exp(log_chance(n)) for n in range(count, trials + 1))


def _with_equal_rows(took: np.ndarray, rows: np.ndarray) -> np.ndarray:
  """Estimates the ranks' times if each rank had the mean number of rows.

  A linear fit over the ranks gives the time of a row. The time of a rank with
  more rows than the mean falls at most in proportion to its rows.
  """
  more = rows - rows.mean()
  cost = max(0.0, more @ took / max(more @ more, 1.0))
  least = took / np.maximum(rows / rows.mean(), 1.0)
  equal: np.ndarray = np.maximum(took - cost * more, least)
  return equal


def _steps(exchanges: _Step) -> list[tuple[np.ndarray, _Step]]:
  """Returns start times and exchanges of steps, without a program's first step.

  The start of a step is the end of its domain's previous step, on each rank.
  """
  found: dict[Any, _Step] = collections.defaultdict(list)
  for e in exchanges:
    found[e["domain"], e["program"], e["step"]].append(e)
  ends: dict[int, np.ndarray] = {}
  known, steps = set(), []
  for (domain, program, _), step in found.items():
    if (domain, program) in known:
      steps.append((ends[domain], step))
    known.add((domain, program))
    ends[domain] = np.array(step[-1]["ended"])
  return steps


def main(args: list[str]) -> int | str:
  """Prints explanations; returns the exit code, or an error text."""
  parser = argparse.ArgumentParser(
    prog="python -m ep explain",
    description="Says why the steps of a trace are slow.",
  )
  parser.add_argument(
    "path", help="a file of ep.trace, or a folder, such as $EP_TRACE"
  )
  try:
    paths = trace.files(parser.parse_args(args).path)
  except ValueError as e:
    return str(e)
  code = 0
  for path in paths:
    try:
      trace.merge_files(path)
      found = str(explain(path))
    except (OSError, ValueError) as e:
      found, code = str(e), 1
    print(f"{path}:\n{found}")
  return code
