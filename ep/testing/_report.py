# SPDX-License-Identifier: Apache-2.0
"""Runs the rules: as cases of pytest, or as a function that returns a table."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
import dataclasses
import textwrap
from typing import Any

from ep.testing._declarations import Subject
from ep.testing._rules import Rule, RULES
from ep.testing._variants import Bench, Variant


@dataclasses.dataclass(frozen=True)
class Case:
  """One case of a rule.

  Attributes:
    id: the rule and the sizes, as in "gradients-float32-to_one_expert-...".
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
      errors = self._rule.check(*self._bench.begin(self._variant))
      return max(errors, default=0.0)
    except Exception as error:
      error.add_note(f"Repeat this with seed={self._variant.seed}.")
      raise


@dataclasses.dataclass(frozen=True)
class Line:
  """The line of a report for one rule.

  Attributes:
    rule: the name of the rule.
    result: "passed", "FAILED in ..." or why the rule did not run.
    cases: number of cases that ran.
    worst: the largest error of these cases, in units of a `Tolerance`.
    failures: error messages by the id of the failed case.
  """

  rule: str
  result: str
  cases: int
  worst: float
  failures: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Report:
  """The results of the object under test. Prints as a table."""

  subject: str
  seed: int
  lines: tuple[Line, ...]

  @property
  def passed(self) -> bool:
    """Whether at least one rule ran, and none failed."""
    return any(x.cases for x in self.lines) and not self.failures

  @property
  def failures(self) -> dict[str, str]:
    """Error messages by the id of the failed case."""
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
      sentence = f"  {RULES[line.rule].check.__doc__}"
      for id, failure in line.failures.items():
        lines += ["", id, sentence, textwrap.indent(failure, "  ")]
    return "\n".join(lines)


def _plan(
  subject: Subject, rules: Collection[str] | None, seed: int
) -> Iterator[tuple[str, list[Case], str]]:
  """Yields each rule's name, cases, and the reason if there are none."""
  if not isinstance(subject, Subject):
    raise TypeError(
      f"ep.testing: subject={subject!r} has to be an ep.testing.Transport,"
      " ep.testing.Layer or ep.testing.GroupedMatmul."
    )
  if unknown := set(rules or ()) - RULES.keys():
    raise ValueError(
      f"ep.testing: there is no rule {', '.join(sorted(unknown))}; the rules"
      f" are {', '.join(RULES)}."
    )
  bench = Bench(subject)
  for name in RULES if rules is None else rules:
    rule = RULES[name]
    cases, why_not = [], rule.left_out(subject)
    if not why_not:
      for variant in rule.variants(subject, seed):
        cases.append(Case(f"{name}-{variant}", rule, bench, variant))
      if not cases:
        why_not = "not run: it needs several devices in one process"
    yield name, cases, why_not


def cases(
  subject: Subject,
  rules: Collection[str] | None = None,
  *,
  seed: int = 0,
) -> list[Any]:
  """Returns the cases of the object under test as parameters of pytest.

      @pytest.mark.parametrize("case", ep.testing.cases(subject))
      def test_transport(case):
        case.check()

  An id consists of the rule, the dtype, the routing and the sizes. A rule that
  does not apply is one parameter, which pytest skips with the reason. The call
  initializes the devices of JAX, so set `XLA_FLAGS` and join other ranks first.

  Args:
    subject: the transport, layer or grouped matmul under test.
    rules: names of rules; None takes all.
    seed: the seed of sizes, routings and numbers. It must be equal on every
      process of a job.

  Returns:
    A `pytest.param` for each `Case`.

  Raises:
    TypeError: `subject` has a wrong type.
    ValueError: there is no such rule, or the tolerance is too large.
  """
  import pytest  # optional

  params = []
  for name, some, why_not in _plan(subject, rules, seed):
    params += [pytest.param(case, id=case.id) for case in some]
    if why_not:
      skipped = pytest.mark.skip(reason=why_not)
      params.append(pytest.param(None, id=name, marks=skipped))
  return params


def check(
  subject: Subject,
  rules: Collection[str] | None = None,
  *,
  seed: int = 0,
) -> Report:
  """Runs the cases of the object under test, and returns their results.

      report = ep.testing.check(subject)
      print(report)
      assert report.passed

  Collective over all processes of a job. Takes the arguments of `cases`, and
  raises the same errors.
  """
  return Report(
    getattr(subject, "name", ""),
    seed,
    tuple(_line(*planned) for planned in _plan(subject, rules, seed)),
  )


def _line(rule: str, cases: Sequence[Case], why_not: str) -> Line:
  worst, failures = 0.0, {}
  for case in cases:
    try:
      worst = max(worst, case.check())
    except AssertionError as error:
      failures[case.id] = str(error)
    except Exception as error:  # an error of the object under test
      failures[case.id] = f"{type(error).__name__}: {error}"
  result = f"FAILED in {len(failures)}" if failures else why_not or "passed"
  return Line(rule, result, len(cases), worst, failures)
