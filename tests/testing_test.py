# SPDX-License-Identifier: Apache-2.0
"""Transports and a layer follow the rules of ep.testing.

Where several processes run this file, the rules that start ranks do not run,
and neither do subjects besides that of the platform's own backend.
"""

import dataclasses
import sys

import jax
import pytest

import ep
from ep.testing import Tolerance
from ep.testing._bench import Variant
from ep.testing._rules import RULES
from testing_subjects import HOST, ONE_HOT, PADDED, SUBJECTS


def _all_cases():
  subjects = SUBJECTS[jax.default_backend()]
  if jax.process_count() > 1:
    subjects = subjects[:1]
  for subject in subjects:
    for case in ep.testing.cases(subject):
      yield case._replace(id=f"{subject.name}-{case.id}".replace(" ", "_"))


@pytest.mark.parametrize("case", list(_all_cases()))
def test_conformance(case):
  case.check()


def test_cases_are_named_and_what_is_not_declared_has_a_reason():
  params = {case.id: case for case in ep.testing.cases(PADDED)}
  assert "gradients-float32-to_one_expert" in params
  assert "rows-bfloat16-with_unused_choices" in params
  reasons = {
    name: case.marks[0].kwargs["reason"]
    for name, case in params.items()
    if case.marks
  }
  assert reasons["overflow"] == "not declared: overflow="
  assert reasons["killed_rank"].startswith("not declared: location=")
  of_layer = {case.id: case.marks for case in ep.testing.cases(ONE_HOT)}
  assert of_layer["rows"][0].kwargs["reason"] == "only for a Transport"


def test_an_alignment_that_is_not_declared_is_not_built():
  subject = dataclasses.replace(HOST, alignments=(4, 8))
  settings = {
    variant.setting()
    for rule in RULES.values()
    for variant in rule.variants(subject)
  }
  assert {x.alignment for x in settings} == {4, 8}
  assert all(x.capacity % x.alignment == 0 for x in settings)


@pytest.mark.parametrize(
  "declared, says",
  [
    (dict(order="Source"), r"order='Source' .* one of \('source', 'any'\)"),
    (dict(tail="zeros"), "tail='zeros' .* one of"),
    (dict(overflow="raise"), "overflow='raise' .* one of"),
    (dict(dtypes="float32"), r"write dtypes=\('float32',\)"),
    (dict(dtypes=()), "dtypes=.* at least one element"),
    (dict(alignments=()), "alignments=.* at least one element"),
    (dict(alignments=(0,)), "whole numbers from 1 on"),
    (dict(location="testing_subjects"), '"package.module:name"'),
  ],
  ids=str,
)
def test_an_unknown_declaration_is_refused(declared, says):
  with pytest.raises(ValueError, match=says):
    dataclasses.replace(HOST, **declared)


def test_a_tolerance_that_accepts_anything_is_refused():
  setting = Variant("bfloat16").setting()
  with pytest.raises(ValueError, match="22% with bfloat16; declare fewer"):
    Tolerance(4).limit(setting)
  assert Tolerance(4).limit(Variant("float32").setting()) == 28


def test_cases_without_pytest_are_refused(monkeypatch):
  monkeypatch.setitem(sys.modules, "pytest", None)
  with pytest.raises(ModuleNotFoundError, match="call ep.testing.check"):
    ep.testing.cases(PADDED)


def test_an_unknown_rule_is_refused():
  with pytest.raises(
    ValueError, match="no rule row; the rules are sizes, rows"
  ):
    ep.testing.check(PADDED, ["row"])


def test_a_report_without_cases_is_no_pass():
  report = ep.testing.check(PADDED, ["overflow"])
  assert not report.passed and not report.failures
