# SPDX-License-Identifier: Apache-2.0
"""Tests the lowering of backend="nccl" with the host engine instead of NCCL EP.

The host engine gets the arguments for NCCL EP. XLA gets the programs for GPUs.
"""

import pytest
from testing_subjects import ours

from cases import Case, lower
from conftest import make_mesh
import ep
from ep._src.backends import host
from groups import bootstrap
from nccl_testing import HostEngine
from op_functions import round_trip


@pytest.fixture(name="case")
def case_over_the_host_engine(monkeypatch):
  monkeypatch.setattr(host, "NativeConnection", HostEngine)
  with bootstrap(make_mesh({"ep": 4}), hidden_dim=13) as group:
    layer = ep.EpLayerConfig(group)
    yield Case(layer, "with_unused_choices", hidden=13, whole=True)


def test_rules(case):
  """Rows of any hidden size arrive, and fp8 rows with their scales."""
  rules = "rows weights scales output unread gradients second_order".split()
  subject = ours("host", dtypes=("float32",), alignments=(1,))
  report = ep.testing.check(subject, rules)
  if not report.passed:
    pytest.fail(str(report))


def test_the_program_names_the_communicators_to_borrow(case, monkeypatch):
  """The host engine decodes lent_axis and lent_mesh, but uses neither."""
  assert "lent_mesh = array" not in program_text(case)
  monkeypatch.setattr(HostEngine, "borrows", True)
  mesh = make_mesh({"dp": 2, "ep": 2})
  with bootstrap(mesh, hidden_dim=8) as group:
    lent = Case(ep.EpLayerConfig(group), hidden=8)
    assert "lent_axis = 1 : i64, lent_mesh = dense<2>" in program_text(lent)
    lent.check_round_trip()


def program_text(case):
  return lower((case, round_trip, case.tokens(), case.weights())).as_text()
