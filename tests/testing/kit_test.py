# SPDX-License-Identifier: Apache-2.0
"""Tests ep.testing itself, on our ops and a hand-written layer.

tests/ops/rules_test.py runs the rules of the kit on our ops.
"""

import dataclasses

import jax
from jax import lax
import jax.numpy as jnp
import pytest
from testing_subjects import HOST, ONE_HOT

import ep
from ep.testing import GroupedMatmul, Tolerance
from ep.testing._routings import ROUTINGS
from ep.testing._variants import Draw

# Our ops, with a property undeclared.
PLAIN = dataclasses.replace(HOST, overflow=None)


@pytest.mark.parametrize(
  "case",
  ep.testing.cases(ONE_HOT, ["output", "gradients", "jvp", "second_order"]),
)
def test_a_layer(case):
  case.check()


def test_cases_have_names_and_skipped_rules_have_reasons():
  params = {case.id: case for case in ep.testing.cases(PLAIN)}
  for start in "gradients-bfloat16-to_one_expert-", "rows-float16-":
    assert any(id.startswith(start) for id in params)
  reasons = {
    name: case.marks[0].kwargs["reason"]
    for name, case in params.items()
    if case.marks
  }
  assert reasons["overflow"] == "not declared: overflow="
  of_layer = {case.id: case.marks for case in ep.testing.cases(ONE_HOT)}
  assert of_layer["rows"][0].kwargs["reason"] == "not for a Layer"


@pytest.mark.parametrize(
  "declared, says",
  [
    (dict(order="Source"), r"order = 'Source', .* one of \('source', 'any'\)"),
    (dict(dtypes="float32"), r"write dtypes=\('float32',\)"),
    (dict(dtypes=()), "dtypes = .* at least one element"),
    (dict(alignments=(0,)), "alignments = 0, but it must be at least 1"),
    (dict(dtypes=("int32",)), "'int32', which is no name of a floating-point"),
  ],
  ids=str,
)
def test_an_unknown_declaration_is_refused(declared, says):
  with pytest.raises((TypeError, ValueError), match=says):
    dataclasses.replace(HOST, **declared)


@pytest.mark.parametrize(
  "arguments, says",
  [
    (dict(subject=None), "subject=None has to be an ep.testing.Transport,"),
    (dict(rules=["row"]), "no rule row; the rules are sizes, rows"),
  ],
  ids=str,
)
def test_wrong_arguments_are_refused(arguments, says):
  with pytest.raises((TypeError, ValueError), match=says):
    ep.testing.check(**dict(subject=PLAIN) | arguments)


def test_a_tolerance_that_accepts_anything_is_refused():
  (variant,) = Draw(HOST, 0).one()
  setting = dataclasses.replace(
    variant.setting, top_k=3, dtype=jax.numpy.dtype("bfloat16")
  )
  with pytest.raises(ValueError, match=r"\d\d% with bfloat16; declare fewer"):
    Tolerance(4).limit(setting)


def test_the_drawn_sizes_cover_what_is_declared():
  for seed in range(20):
    variants = Draw(HOST, seed).every_kind()
    assert {x.routing for x in variants} == ROUTINGS.keys()
    settings = [x.setting for x in variants]
    assert {x.alignment for x in settings} == set(HOST.alignments)
    assert {x.dtype.name for x in settings} == set(HOST.dtypes)
    for size in ("tokens", "hidden", "num_experts"):
      assert max(getattr(x, size) for x in settings) > 256
    assert min(x.tokens for x in settings) == 1
    assert any(x.hidden % 4 for x in settings)
    assert min(x.top_k for x in settings) == 1 < 3 <= settings[0].top_k
    assert max(x.top_k for x in settings) > 4
    assert variants == Draw(HOST, seed).every_kind()


def test_a_matmul_gets_the_declared_sizes():
  def matmul(rows, matrices, sizes):
    (c, f), g = rows.shape, matrices.shape[2]
    assert c % 8 == f % 16 == g % 4 == 0
    out = lax.ragged_dot(
      rows, matrices, sizes, preferred_element_type=jnp.float32
    )
    return jnp.where((sizes % 8 == 0).all(), out, jnp.nan)

  subject = GroupedMatmul(
    name="matmul",
    matmul=matmul,
    dtypes=("bfloat16",),
    result_dtype="float32",
    alignments=(8,),
    multiples=(8, 16, 4),
    tail="zero",
  )
  assert ep.testing.check(subject, ["output"]).passed


def test_a_report_without_cases_is_no_pass():
  report = ep.testing.check(PLAIN, ["overflow"])
  assert not report.passed and not report.failures
