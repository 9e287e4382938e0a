# SPDX-License-Identifier: Apache-2.0
"""The lowering of "nccl" is right, with the host engine in NCCL EP's place.

The engine gets what NCCL EP would get, and XLA what it would compile for GPUs.
"""

import jax
import pytest

from cases import Case, lower
from conftest import make_mesh
import ep
from ep._src.backends import host
from ep._src.backends.nccl.backend import NcclConnection
from ep._src.base.backend import OPS
from groups import bootstrap
from op_functions import everything


class HostEngine(NcclConnection):
  """Lowers as "nccl" does, to the host engine; checks what NCCL EP demands."""

  def _lower_call(self, op, ctx, *operands, params):
    if op != "ep_prepare":
      assert ctx.avals_in[1].shape[1] % 8 == 0
      assert op != "ep_combine" or len(operands) == 2
    return super()._lower_call(op, ctx, *operands, params=params)


@pytest.fixture(name="case", params=[1, 7, 8, 13])
def case_over_the_host_engine(monkeypatch, request):
  monkeypatch.setattr(host, "HostConnection", HostEngine)
  hidden = request.param
  with bootstrap(make_mesh({"ep": 4}), hidden_dim=hidden) as group:
    layer = ep.EpLayerConfig(group)
    yield Case(layer, "with_unused_choices", hidden=hidden, whole=True)


def test_rows_of_any_hidden_size_arrive(case):
  case.check(everything, *case.inputs())


def test_nothing_but_the_calls_is_on_the_stream_of_collectives(case):
  lowered = lower((case, everything, *case.inputs()))
  text = lowered.compiler_ir("hlo").as_hlo_text()
  annotated = [x for x in text.splitlines() if "_xla_stream_annotation" in x]
  assert len(annotated) == 6
  assert all(" call(" in x for x in annotated)


def test_a_program_survives_its_export(case):
  def program(tokens, weights):
    handle = ep.ep_prepare(case.layer, case.topk_idx)
    return ep.ep_combine(handle, *ep.ep_dispatch(handle, tokens, weights))

  inputs = [*map(case.put, (case.tokens(), case.weights()))]
  allowed = [jax.export.DisabledSafetyCheck.custom_call(op) for op in OPS]
  export = jax.export.export(jax.jit(program), disabled_checks=allowed)
  exported = export(*inputs)
  loaded = jax.export.deserialize(exported.serialize())
  got, expected = loaded.call(*inputs), program(*inputs)
  assert (got == expected).all()
