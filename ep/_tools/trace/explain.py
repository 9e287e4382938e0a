# SPDX-License-Identifier: Apache-2.0
"""explain: says for whom the ranks of a trace waited, and why."""

from __future__ import annotations

import collections
from collections.abc import Iterator
import dataclasses
import math
import os
from typing import Any, NamedTuple

import numpy as np

from ep._src.base import arguments
from ep._tools.trace import trace

# Nobody is blamed below these: the share of the steps in which a rank came late
# to a layer's op, and by how much, as a part of a step and in seconds. A busy
# machine may let another thread run for 3 ms and more.
_SHARE, _PART, _LATE_S = 0.5, 0.1, 5e-3
_OF_LAST = 0.75  # Nobody waits for a rank that is late by a smaller part of it.
_MORE_ROWS = 1.2  # so many times the mean rows are a cause
# A trace without a cause blames some rank at most this often, by each test.
_CHANCE = 0.05


@dataclasses.dataclass(frozen=True)
class Blame:
  """A rank that others waited for, at one op of a layer.

  Attributes:
    domain, rank, layer, op: what came late, and where.
    share: the part of the steps in which it did.
    late_s: by how much it came after the lower median of all ranks; a median
      over these steps.
    rows_ratio: its rows, in times of the mean.
    expert: its expert with the most tokens; None if the op's layer has no
      ep_prepare in the step, and the rows are not known.
    expert_share: the part of its tokens that this expert has.
    balanced_s: what `late_s` would be if its rows were the mean; None if its
      rows are not the cause.
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
  """Whom an op failed for, on all ranks.

  Attributes:
    domain, ranks, layer, op: who did not do as most ranks did, and where. No
      rank if all ran the op.
    step: the launch of the program.
    are_absent: whether `ranks` did not come, or else came with something else.
    error: what the op raised.
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
  """Where the time of a step goes. Times are medians over steps, in seconds.

  Attributes:
    num_steps: the steps that count: all but the first one of each program. If
      there are fewer than two, after a failure, the times are NaN.
    step_s: the time from the end of a step's ops to the next one's.
    moved_s: the part in which rows moved.
    waited_s: the part in which a rank waited, a mean over ranks.
    punctual_s: `step_s` if no rank were late.
    balanced_s: `step_s` if the experts of all ranks had the same rows.
    blames: whom the ranks waited for, the worst first; often nobody.
    failure: the first error of an op; None if none failed.
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

  A rank is late at an op of a layer if it comes at least a tenth of a step, and
  5 ms, after the lower median of all ranks, and at least 0.75 times as late as
  the last one. It is blamed if it is so in at least half of the steps. If all
  ranks were as often late, or last, some rank would be it so often in fewer
  than 10 % of such traces. Its rows are the cause if the op follows its experts
  and they had at least 1.2 times the mean rows.

  If an op has failed, the ranks are named that had not come to it, or had come
  with something else than most ranks; if processes were killed, theirs alone.
  Of several ops that failed, the one counts that lacked a killed process, or
  else the fewest ranks, or failed first.

  Raises:
    OSError: the file cannot be read.
    ValueError: the file is another one, or has fewer than three steps and no
      failure; or the folder has no trace, several, or a part of one.
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
    runs: collections.Counter = collections.Counter()
    ops = list(_look_at(start, step))
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
  """Returns the failure that the others follow from; see `explain`."""

  def killed(failure) -> list[int]:
    first = failure["domain"] * merged["ep_size"]
    return [r for r in failure["ranks"] if first + r in merged["killed"]]

  def order(failure):
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

  late_s: np.ndarray
  balanced_s: np.ndarray  # the same, if all had the mean rows
  rows_ratio: np.ndarray
  tokens: list[list[int]]  # of each rank's experts; empty if not known
  times: tuple[float, ...]  # moved, waited, late, and late because of rows


def _look_at(start, step) -> Iterator[_Op]:
  """Yields what each op of a step says; the ranks began it at `start`."""
  ends, prepared = start, {}
  for e in step:
    if e["op"] == "ep_prepare":
      prepared[e["layer"]] = np.maximum(e["rows"], 1), e["tokens"]
    came, end = np.array(e["came"]), np.array(e["ended"])
    last = came.max()
    rows, tokens = prepared.get(e["layer"], (np.ones(len(came)), []))
    late = balanced = _lateness(came)
    if e["op"] in ("ep_combine", "ep_dispatch_bwd"):  # experts came before
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
  domain, layer, op, seen: list[_Op], step_s: float, num_places: int
) -> Iterator[Blame]:
  """Yields whom the ranks waited for at an op, in all steps; often nobody."""
  late = np.array([o.late_s for o in seen])  # [step, rank]
  least = np.maximum(_OF_LAST * late.max(axis=1), max(_PART * step_s, _LATE_S))
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
  """Returns by how much each rank came after the lower median of all."""
  return came - np.sort(came)[(len(came) - 1) // 2]


def _at_least(count: int, trials: int, p: float) -> float:
  """Returns the chance of `count` or more of `trials`, each of chance `p`.

  `p` is neither 0 nor 1.
  """

  def log_chance(n):  # the number of ways is no float if trials are many
    ways = math.lgamma(trials + 1) - math.lgamma(n + 1)
    ways -= math.lgamma(trials - n + 1)
    return ways + n * math.log(p) + (trials - n) * math.log(1 - p)

  return sum(math.exp(log_chance(n)) for n in range(count, trials + 1))


def _with_equal_rows(took, rows):
  """Returns the times of ranks as if each had the mean of the rows.

  A row costs what a line through the ranks says. A rank of more rows than the
  mean keeps at least the time that it would have if it did nothing else.
  """
  more = rows - rows.mean()
  cost = max(0.0, more @ took / max(more @ more, 1.0))
  return np.maximum(
    took - cost * more, took / np.maximum(rows / rows.mean(), 1.0)
  )


def _steps(exchanges):
  """Returns, for each step but a program's first, its start and exchanges.

  It starts where each rank ended the step before, of the same domain.
  """
  found: dict[Any, list] = collections.defaultdict(list)
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
