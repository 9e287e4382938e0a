# SPDX-License-Identifier: Apache-2.0
"""The rows that "nccl" gives to NCCL EP: of any hidden size, and weighted.

The host backend moves them here, and is given nothing but what NCCL EP takes.
"""

import pytest

from cases import Case
from conftest import make_mesh
import ep
from ep._src.backends.host import HostConnection
from ep._src.backends.nccl import backend as nccl_backend
from groups import bootstrap
from op_functions import everything


@pytest.fixture(autouse=True)
def fitting_rows(monkeypatch):
  """Makes the host backend lower its movers as "nccl" does."""
  lower = HostConnection.lower

  def lower_fitting(self, op, ctx, *operands, params):
    def lower_checked(ctx, *operands):
      assert ctx.avals_in[1].shape[1] % 8 == 0
      assert op != "ep_combine" or len(operands) == 2
      return lower(self, op, ctx, *operands, params=params)

    if op == "ep_prepare":
      return lower(self, op, ctx, *operands, params=params)
    return nccl_backend._with_fitting_rows(op, lower_checked, ctx, *operands)

  monkeypatch.setattr(HostConnection, "lower", lower_fitting)


@pytest.mark.parametrize("hidden", [1, 7, 8, 13])
def test_rows_of_any_hidden_size_arrive(hidden):
  with bootstrap(make_mesh({"ep": 4}), hidden_dim=hidden) as group:
    layer = ep.EpLayerConfig(group)
    case = Case(layer, "with_unused_choices", hidden=hidden, whole=True)
    case.check(everything, *case.inputs())
