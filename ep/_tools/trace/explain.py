# SPDX-License-Identifier: Apache-2.0
"""Explains for which rank the ranks of a trace waited, and why.

`python -m ep explain FOLDER` explains each trace of a folder, such as
$EP_TRACE. It first merges the files of the processes.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import math
import os
from typing import Any

import numpy as np

from ep._src.base import arguments
from ep._tools.trace import trace
from ep._tools.trace.blame import Blame, Domain, LATE_S, Step

# Each rank's start of a step, and the step's exchanges.
_TimedStep = tuple[np.ndarray, Step]


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
  """An explanation of the time of a program's steps. Times are medians.

  Attributes:
    program: the program in which the trace spent the most time: the name of
      its jitted function and a number.
    num_steps: number of the program's steps, without the first one. If no
      program has two, after a failure, the number is 0 and the times are NaN.
    step_s: seconds from the end of the previous step's ops, of any program, to
      the end of a step's ops.
    moved_s: seconds of `step_s` in which rows were copied.
    waited_s: seconds of `step_s` in which a rank waited, a mean over ranks.
    punctual_s: `step_s` if no rank were late.
    balanced_s: `step_s` if the experts of all ranks had the same rows.
    blames: the ranks that others waited for in the program, the worst first;
      often empty.
    failure: the first error of an op; None if no op failed.
    others: explanations of the other programs that ran at least three steps,
      sorted by their total time.
    clock_bound_s: how far an offset between two clocks may be wrong, and with
      it the lateness at an op; sums over ops do not depend on offsets.
  """

  program: str
  num_steps: int
  step_s: float
  moved_s: float
  waited_s: float
  punctual_s: float
  balanced_s: float
  blames: tuple[Blame, ...]
  failure: Failure | None = None
  others: tuple[Explanation, ...] = ()
  clock_bound_s: float = 0.0

  def __repr__(self) -> str:
    lines = [str(self.failure)] if self.failure else []
    for part in (self, *self.others):
      if self.others:
        lines.append(f"program {part.program}:")
      lines += map(str, part.blames)
      if not (part.blames or self.failure):
        lines.append("No rank is to blame.")
      if part.num_steps:
        lines += part._table()
    if self.clock_bound_s >= LATE_S:
      lines.append(
        "The offsets between clocks are known to"
        f" {self.clock_bound_s * 1e3:.1f} ms, so the lateness at an op may be"
        " wrong by as much."
      )
    return "\n".join(lines)

  def _table(self) -> list[str]:
    """Returns the lines of the times."""
    rows = (
      (f"step (median of {self.num_steps})", self.step_s),
      ("  moved", self.moved_s),
      ("  waited", self.waited_s),
      ("step if no rank were late", self.punctual_s),
      ("step if all loads were equal", self.balanced_s),
    )
    return [f"{name:<32}{s * 1e3:10.2f} ms" for name, s in rows]


def explain(path: str | os.PathLike[str]) -> Explanation:
  """Explains a file that `ep.trace` wrote, or a folder that EP_TRACE named.

  A rank's lateness at an op is its arrival time minus the lower median of all
  arrival times. The rank is late if its lateness is at least a tenth of the
  step, 5 ms, and 0.75 times the last rank's lateness. A rank is blamed if it is
  late in at least half of the steps, and if chance alone (all ranks equally
  often late, and equally often last) would blame a rank in at most 10 % of
  such programs. Its rows are the cause if the op follows the experts and the
  rank had at least 1.2 times the mean rows.

  The same rules hold for the sum of a rank's own lateness over a step's ops: a
  slow rank may be a little late in each of many layers. The own lateness
  compares times from the end of the previous op to the arrival.

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
    bounds = [float(c["bound_s"] or 0) for c in merged["clocks"].values()]
    return dataclasses.replace(
      explain_exchanges(merged["exchanges"], failure),
      clock_bound_s=max(bounds, default=0.0),
    )
  except ValueError:
    raise
  except Exception as e:  # a damaged file can raise any error
    raise trace.damaged(path, e) from e


def explain_exchanges(
  exchanges: list[dict[str, Any]], failure: Failure | None = None
) -> Explanation:
  """Explains the exchanges of a trace; see `trace.merge`."""
  parts = [
    _explain_program(program, steps)
    for program, steps in _steps(exchanges).items()
    if len(steps) > 1
  ]
  if failure and not parts:
    nan = math.nan
    parts = [Explanation("", 0, nan, nan, nan, nan, nan, blames=())]
  arguments.check(
    parts != [],
    "ep.explain",
    "the trace has fewer than three steps of every program; trace more.",
  )
  first, *others = sorted(parts, key=lambda p: -p.num_steps * p.step_s)
  return dataclasses.replace(first, failure=failure, others=tuple(others))


def _explain_program(program: str, steps: list[_TimedStep]) -> Explanation:
  """Explains the steps of a program, in all domains."""
  totals = []
  domains: dict[int, Domain] = collections.defaultdict(Domain)
  for start, step in steps:
    moved, waited, late, unbalanced = domains[step[0]["domain"]].add(
      start, step
    )
    step_s = np.max(step[-1]["ended"]) - np.max(start)
    totals.append((step_s, moved, waited, step_s - late, step_s - unbalanced))
  step_s, moved, waited, punctual, balanced = np.median(totals, axis=0).tolist()
  blames = [
    blame
    for number, domain in domains.items()
    for blame in domain.blames(number, step_s)
  ]
  return Explanation(
    program,
    len(steps),
    step_s,
    moved,
    waited,
    punctual,
    balanced,
    tuple(sorted(blames, key=lambda b: -b.share * b.late_s)),
  )


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


def _steps(exchanges: list[dict[str, Any]]) -> dict[str, list[_TimedStep]]:
  """Returns the steps of each program, without its first step.

  The start of a step is the end of its domain's previous step, on each rank.
  """
  found: dict[Any, Step] = collections.defaultdict(list)
  for e in exchanges:
    found[e["domain"], e["program"], e["step"]].append(e)
  ends: dict[int, np.ndarray] = {}
  known = set()
  steps: dict[str, list[_TimedStep]] = collections.defaultdict(list)
  for (domain, program, _), step in found.items():
    if (domain, program) in known:
      steps[program].append((ends[domain], step))
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
    except OSError as e:
      code = 1
      found = (
        f"ep.explain: {e.strerror}; name a file that ep.trace wrote, or a"
        " folder that EP_TRACE named."
      )
    except ValueError as e:
      found, code = str(e), 1
    print(f"{path}:\n{found}")
  return code
