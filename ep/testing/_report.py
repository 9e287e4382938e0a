# SPDX-License-Identifier: Apache-2.0
"""Runs the rules, as cases of pytest or as a function that returns a table."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
import dataclasses
import textwrap
from typing import Any

import jax

from ep.testing._declarations import Layer, Subject, Transport
from ep.testing._rules import Rule, RULES
from ep.testing._variants import Bench, Variant


@dataclasses.dataclass(frozen=True)
class Case:
  """One case of a rule for a subject.

  Attributes:
    id: the rule, and what distinguishes its cases, as in
      "gradients-float32-to_one_expert".
  """

  id: str
  _rule: Rule
  _bench: Bench
  _variant: Variant

  def check(self) -> float:
    """Runs the case.

    Returns:
      The largest error, in units of a `Tolerance`; 0 if all bits are expected.

    Raises:
      AssertionError: the rule does not hold. The message names the rank, the
        expert, the row and both values.
    """
    try:
      return self._rule.check(self._bench, self._variant)
    except Exception as error:
      error.add_note(f"Repeat this with seed={self._variant.seed}.")
      raise


@dataclasses.dataclass(frozen=True)
class Line:
  """The line of a report for one rule.

  Attributes:
    rule: its name.
    sentence: what it demands.
    cases: how many were run.
    worst: the largest error of these cases, in units of a `Tolerance`.
    failures: what failed, by the id of the case.
    left_out: why the rule was not run, or "".
  """

  rule: str
  sentence: str
  cases: int = 0
  worst: float = 0.0
  failures: dict[str, str] = dataclasses.field(default_factory=dict)
  left_out: str = ""

  @property
  def result(self) -> str:
    """Returns the words of the table."""
    if self.left_out:
      return self.left_out
    if self.failures:
      return f"FAILED in {len(self.failures)}"
    return "passed"


@dataclasses.dataclass(frozen=True)
class Report:
  """The results of a subject. It prints as a table."""

  subject: str
  seed: int
  lines: tuple[Line, ...]

  @property
  def passed(self) -> bool:
    """Whether some rule was run, and none failed."""
    return any(x.cases for x in self.lines) and not self.failures

  @property
  def failures(self) -> dict[str, str]:
    """The errors, by the ids of the cases that failed."""
    return {k: v for line in self.lines for k, v in line.failures.items()}

  def __repr__(self) -> str:
    lines = [
      f"{'rule':<16}{'cases':>6}{'ulps':>7}  result of {self.subject},"
      f" seed={self.seed}"
    ]
    for line in self.lines:
      worst = f"{line.worst:.2g}" if line.cases else ""
      cases = line.cases or ""
      lines.append(f"{line.rule:<16}{cases:>6}{worst:>7}  {line.result}")
    for line in self.lines:
      for id, failure in line.failures.items():
        lines += ["", id, f"  {line.sentence}", textwrap.indent(failure, "  ")]
    return "\n".join(lines)


def _chosen(rules: Collection[str] | None) -> list[Rule]:
  unknown = set(rules or ()) - RULES.keys()
  if unknown:
    raise ValueError(
      f"ep.testing: there is no rule {', '.join(sorted(unknown))}; the rules"
      f" are {', '.join(RULES)}."
    )
  return [RULES[name] for name in (RULES if rules is None else rules)]


def _plan(
  subject: Subject, rules: Collection[str] | None, seed: int
) -> Iterator[tuple[Rule, list[Case], str]]:
  """Yields each rule with its cases, or with why there are none."""
  if not isinstance(subject, Transport | Layer):
    raise TypeError(
      f"ep.testing: subject={subject!r} has to be an ep.testing.Transport or an"
      " ep.testing.Layer."
    )
  if isinstance(rules, str) or not isinstance(rules, Collection | None):
    raise TypeError(
      f"ep.testing: rules={rules!r} has to be a list of names, as in"
      ' rules=["output"], or None.'
    )
  if not isinstance(seed, int) or seed < 0:
    raise TypeError(
      f"ep.testing: seed={seed!r} has to be a whole number from 0 on."
    )
  bench = Bench(subject)
  for rule in _chosen(rules):
    why_not = rule.left_out(subject)
    if why_not:
      yield rule, [], why_not
    elif rule.starts_ranks and jax.process_count() > 1:
      yield rule, [], "not run: this process is one of several ranks"
    else:
      cases = []
      for variant in rule.variants(subject, seed):
        words = [rule.name, *([] if rule.starts_ranks else [str(variant)])]
        cases.append(Case("-".join(words), rule, bench, variant))
      yield (
        rule,
        cases,
        "" if cases else "not run: it needs several devices in one process",
      )


def cases(
  subject: Subject, rules: Collection[str] | None = None, *, seed: int = 0
) -> list[Any]:
  """Returns the cases of a subject as parameters of pytest.

      @pytest.mark.parametrize("case", ep.testing.cases(subject))
      def test_transport(case):
        case.check()

  Their ids have the rule, the dtype, the routing and the sizes. A rule that is
  not run is one parameter, which pytest skips with the reason. The devices of
  JAX are looked up, so set `XLA_FLAGS` and join other ranks before.

  Args:
    subject: a `Transport` or a `Layer`.
    rules: names of rules; None takes all.
    seed: the seed of the sizes, routings and numbers that are drawn. Every
      process of a job has to give the same seed.

  Returns:
    A `pytest.param` for each `Case`.

  Raises:
    TypeError: an argument has another type.
    ValueError: there is no such rule, or the tolerance is too large.
    ModuleNotFoundError: pytest is not installed.
  """
  try:
    import pytest  # nothing else needs it
  except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
      "ep.testing.cases returns parameters of pytest, which is not installed;"
      " run `pip install pytest`, or call ep.testing.check, which does not need"
      " it."
    ) from error

  params = []
  for rule, some, why_not in _plan(subject, rules, seed):
    params += [pytest.param(case, id=case.id) for case in some]
    if why_not:
      skipped = pytest.mark.skip(reason=why_not)
      params.append(pytest.param(None, id=rule.name, marks=skipped))
  return params


def check(
  subject: Subject, rules: Collection[str] | None = None, *, seed: int = 0
) -> Report:
  """Runs the cases of a subject, and returns their results.

      report = ep.testing.check(subject)
      print(report)
      assert report.passed

  Every process of a job has to call it. The rules that start ranks are run only
  where this process is alone.

  Args:
    subject: a `Transport` or a `Layer`.
    rules: names of rules; None takes all.
    seed: the seed of the sizes, routings and numbers that are drawn. Every
      process of a job has to give the same seed.

  Raises:
    TypeError: an argument has another type.
    ValueError: there is no such rule, or the tolerance is too large.
  """
  return Report(
    getattr(subject, "name", ""),
    seed,
    tuple(_line(*planned) for planned in _plan(subject, rules, seed)),
  )


def _line(rule: Rule, cases: Sequence[Case], why_not: str) -> Line:
  worst, failures = 0.0, {}
  for case in cases:
    try:
      worst = max(worst, case.check())
    except AssertionError as error:
      failures[case.id] = str(error)
    except Exception as error:  # of the subject
      failures[case.id] = f"{type(error).__name__}: {error}"
  return Line(rule.name, rule.sentence, len(cases), worst, failures, why_not)
