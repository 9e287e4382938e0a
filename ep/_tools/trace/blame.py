# SPDX-License-Identifier: Apache-2.0
"""Finds the ranks of a domain that other ranks waited for.

Two kinds of lateness are tested, in each step: a rank's lateness at an op, and
the sum over the step's ops of its own lateness. Its own lateness is the time
from its end of the previous op to its arrival, minus the lower median of these
times. Both times are of the rank's own clock, so wrong offsets between clocks
do not add up. The statistics compare the ranks of a step with each other, so
differences between steps do not matter.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np

# A rank is late if its lateness is at least _OF_STEP times the step's time,
# LATE_S seconds (on a busy machine another thread may run for 3 ms), and
# _OF_LAST times the last rank's lateness. A rank is blamed if it is late in at
# least _SHARE of the steps.
_OF_STEP, LATE_S, _OF_LAST, _SHARE = 0.1, 5e-3, 0.75, 0.5
# A rank's rows may cause lateness if they are this many times the mean rows.
_MORE_ROWS = 1.2
# The op of a sum is the one with at least this share of it.
_MOST = 0.75
# The significance levels at the ops and in the sums, each of two tests: of how
# often a rank is late, and of how often it is last. A level is the largest
# chance to blame a rank of a program although all ranks are alike. A sum needs
# fewer tests than the ops, so its level may be lower.
_OPS_CHANCE, _SUM_CHANCE = 0.048, 0.002

Step = list[dict[str, Any]]  # exchanges of a step


@dataclasses.dataclass(frozen=True)
class Blame:
  """A rank that other ranks waited for, at one op of a layer or at many ops.

  A rank's lateness is its arrival time minus the lower median of all arrival
  times.

  Attributes:
    domain, rank: the rank.
    layer, op: the op. If `num_ops` > 1, `layer` is "", and `op` is the name of
      the op that caused at least 0.75 of the lateness, or "".
    share: fraction of the steps in which the rank was late.
    late_s: its lateness in seconds, a median over these steps.
    rows_ratio: its rows over the mean rows; NaN if the rows are not known,
      because the step has no ep_prepare of the layer.
    expert: its expert with the most tokens; None if the rows are not known or
      `num_ops` > 1.
    expert_share: fraction of the rank's tokens that this expert has.
    balanced_s: the lateness that remains with the mean rows; None if the rows
      are not the cause.
    num_ops: 1, or the number of ops of a step over which the lateness and
      `balanced_s` are sums. A sum leaves out ops that have a blame of the rank.
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
  num_ops: int = 1

  def __str__(self) -> str:
    op, total = f' to {self.op} in layer "{self.layer}"', ""
    if self.num_ops > 1:
      most = f", most of it at {self.op}" if self.op else ""
      op, total = "", f" summed over {self.num_ops} ops{most}"
    text = (
      f"domain {self.domain}, rank {self.rank} came late{op} in"
      f" {self.share:.0%} of the steps, by {self.late_s * 1e3:.1f} ms{total}; "
    )
    if self.balanced_s is not None:
      of_expert = (
        f" ({self.expert_share:.0%} of them expert {self.expert})"
        if self.expert is not None
        else ""
      )
      return text + (
        f"its experts had {self.rows_ratio:.1f} times the mean rows{of_expert};"
        f" balanced it would have been {self.balanced_s * 1e3:.1f} ms."
      )
    rows = "were average"
    if math.isnan(self.rows_ratio):
      rows = "are not known"
    elif not 1 / _MORE_ROWS < self.rows_ratio < _MORE_ROWS:
      rows = f"were {self.rows_ratio:.1f} times the mean, which is not why"
    return text + f"its rows {rows}: it computed longer before."


class _Op(NamedTuple):
  """The times and loads of all ranks at an op or in a sum of ops, [P] each."""

  step: int
  late_s: np.ndarray  # lateness
  balanced_s: np.ndarray  # lateness if all ranks had the mean rows
  own_s: np.ndarray  # [2, P]: own lateness, and with the mean rows
  rows_ratio: np.ndarray  # NaN if unknown
  tokens: list[list[int]]  # tokens by rank and expert; empty if unknown


class Domain:
  """The ops of a program's steps in one domain."""

  def __init__(self) -> None:
    self._num_ops: list[int] = []  # of each step
    # By layer, op and number of the op's earlier runs in the step.
    self._places: dict[tuple[str, str, int], list[_Op]] = (
      collections.defaultdict(list)
    )

  def add(self, start: np.ndarray, step: Step) -> tuple[float, ...]:
    """Adds a step; `start` has each rank's start of the step.

    Returns:
      Sums over the step's ops, in seconds: of the time in which rows were
      copied, of the mean time in which a rank waited, of the largest lateness,
      and of the part of it that balanced rows would save.
    """
    came = np.array([e["came"] for e in step])  # [op, P]
    ended = np.array([e["ended"] for e in step])
    took = _took(start, came, ended)
    late, own = _lateness(came), _lateness(took)
    balanced, own_balanced = late.copy(), own.copy()
    unknown: tuple[np.ndarray, Any] = np.full(came.shape[1], math.nan), []
    prepared: dict[str, tuple[np.ndarray, Any]] = {}
    loads = []
    for i, e in enumerate(step):
      if e["op"] == "ep_prepare" and min(e["rows"]) >= 0:
        rows = np.maximum(e["rows"], 1)
        prepared[e["layer"]] = rows / rows.mean(), e["tokens"]
      load = ratio, tokens = prepared.get(e["layer"], unknown)
      # These ops follow the experts.
      if tokens and e["op"] in ("ep_combine", "ep_dispatch_bwd"):
        balanced[i] = own_balanced[i] = _lateness(
          _with_equal_rows(took[i], ratio)
        )
      loads.append(load)
    saved = np.maximum(0.0, late.max(axis=1) - balanced.max(axis=1))
    balanced = np.clip(balanced, 0.0, late)
    owns = np.stack([own, own_balanced], axis=1)
    runs: collections.Counter[Any] = collections.Counter()
    for i, e in enumerate(step):
      place = e["layer"], e["op"]
      self._places[*place, runs[place]].append(
        _Op(len(self._num_ops), late[i], balanced[i], owns[i], *loads[i])
      )
      runs[place] += 1
    self._num_ops.append(len(step))
    last = came.max(axis=1, keepdims=True)
    moved, waited = (ended - last).max(axis=1), (last - came).mean(axis=1)
    return tuple(
      float(x.sum()) for x in (moved, waited, late.max(axis=1), saved)
    )

  def blames(self, domain: int, step_s: float) -> list[Blame]:
    """Returns the ranks to blame; `step_s` is the time of a step."""
    blames: list[Blame] = []
    num_ops = np.array(self._num_ops)[:, np.newaxis]
    num_ranks = len(next(iter(self._places.values()))[0].late_s)
    sums = np.zeros((len(num_ops), 2, num_ranks))
    ratios = np.zeros((len(num_ops), num_ranks))
    by_op: dict[str, np.ndarray] = collections.defaultdict(ratios.copy)
    chance_of_ops = _OPS_CHANCE / len(self._places)
    for (layer, op, _), seen in self._places.items():
      found = [
        Blame(domain=domain, layer=layer, op=op, **late)
        for late in _late_ranks(seen, step_s, chance_of_ops)
      ]
      blames += found
      own = np.array([o.own_s for o in seen])
      own[..., [b.rank for b in found]] = 0.0
      steps = [o.step for o in seen]
      sums[steps] += own
      ratios[steps] += [o.rows_ratio for o in seen]
      by_op[op][steps] += own[:, 0]
    late, balanced = np.moveaxis(_lateness(sums), 1, 0)
    balanced = np.clip(balanced, 0.0, late)
    totals = zip(late, balanced, sums, ratios / num_ops, strict=True)
    summed = [_Op(step, *total, []) for step, total in enumerate(totals)]
    for fields in _late_ranks(summed, step_s, _SUM_CHANCE):
      of_ops = {
        op: np.median(_lateness(times)[:, fields["rank"]])
        for op, times in by_op.items()
      }
      most = max(of_ops, key=of_ops.__getitem__)
      is_most = of_ops[most] >= _MOST * sum(of_ops.values())
      already = sum(b.rank == fields["rank"] for b in blames)
      fields["num_ops"] = int(np.median(num_ops)) - already
      if fields["num_ops"] > 1:
        op = most if is_most else ""
        blames.append(Blame(domain=domain, layer="", op=op, **fields))
    return blames


def _late_ranks(
  seen: list[_Op], step_s: float, level: float
) -> Iterator[dict[str, Any]]:
  """Yields fields of `Blame` of late ranks; `seen` has an op of each step.

  Two binomial tests count the steps in which a rank was late (if all ranks are
  equally often late) and in which it was last (if each of P ranks is last in
  1 / P of the steps). One of them must be significant at the level over the
  number of ranks. The tests assume that steps are independent.
  """
  late = np.array([o.late_s for o in seen])  # [step, rank]
  least = np.maximum(_OF_LAST * late.max(1), max(_OF_STEP * step_s, LATE_S))
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
    if num_ranks * chance > level:
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
    yield dict(
      rank=rank,
      share=count / num_steps,
      late_s=late_s,
      rows_ratio=ratio,
      expert=expert,
      expert_share=expert_share,
      balanced_s=balanced_s if is_load else None,
    )


def _took(start: np.ndarray, came: np.ndarray, ended: np.ndarray) -> np.ndarray:
  """Returns the ranks' own times before each op of a step, [op, P].

  The time is since the end of the previous op, or since the arrival at it if
  both ops overlap on the rank.
  """
  ends = np.concatenate([start[np.newaxis], ended[:-1]])
  arrivals = np.concatenate([start[np.newaxis], came[:-1]])
  since = np.where(ends <= came, ends, np.minimum(arrivals, came))
  took: np.ndarray = came - since
  return took


def _lateness(came: np.ndarray) -> np.ndarray:
  """Returns times minus their lower median over the ranks, the last axis."""
  middle = (came.shape[-1] - 1) // 2
  late: np.ndarray = came - np.sort(came)[..., middle, np.newaxis]
  return late


def _at_least(count: int, trials: int, p: float) -> float:
  """Returns the binomial chance of at least `count` successes; 0 < p < 1."""

  def log_chance(n: int) -> float:
    # Use logarithms, because a binomial coefficient could overflow a float.
    ways = math.lgamma(trials + 1) - math.lgamma(n + 1)
    ways -= math.lgamma(trials - n + 1)
    return ways + n * math.log(p) + (trials - n) * math.log(1 - p)

  return sum(math.exp(log_chance(n)) for n in range(count, trials + 1))


def _with_equal_rows(took: np.ndarray, rows_ratio: np.ndarray) -> np.ndarray:
  """Estimates the ranks' times if each rank had the mean number of rows.

  A linear fit over the ranks gives the time of a row. The time of a rank with
  more rows than the mean falls at most in proportion to its rows.
  """
  more = rows_ratio - 1.0
  cost = max(0.0, more @ took / max(more @ more, 1e-9))
  least = took / np.maximum(rows_ratio, 1.0)
  equal: np.ndarray = np.maximum(took - cost * more, least)
  return equal
