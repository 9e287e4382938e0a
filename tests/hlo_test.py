"""The compiled program holds our exchanges, and no other collective."""

import re

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np
import pytest

from cases import (
  Case,
  everything,
  global_view,
  layer,
  local_view,
  lower,
  there_and_back,
)
from conftest import make_mesh, to_global
from ep._src import ffi

COLLECTIVES = (
  "all-gather",
  "all-reduce",
  "all-to-all",
  "collective-broadcast",
  "collective-permute",
  "reduce-scatter",
)


def collectives(hlo):
  """Names of the stock collectives of a program, one for each use."""
  return re.findall(rf"\b({'|'.join(COLLECTIVES)})(?:-start)?\(", hlo)


def exchanges(hlo):
  """Names of our exchanges, sorted."""
  return sorted(re.findall(r'custom_call_target="(ep_\w+)"', hlo))


def compiled(case, fn, *arrays, **view):
  return lower((case, fn, *arrays), **view).compile().as_text()


def forward_and_back(ops, tokens, weights, g):
  out, vjp = jax.vjp(lambda *x: there_and_back(ops, *x), tokens, weights)
  return out, vjp(g)


EVERY_MESH = pytest.mark.parametrize("mesh", ["ep4", "dp2_ep2", "dp4_ep1"])
EVERY_TYPE = pytest.mark.parametrize(
  "axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name
)
BOTH_VIEWS = pytest.mark.parametrize("view", [global_view, local_view])


@EVERY_MESH
@EVERY_TYPE
@BOTH_VIEWS
def test_forward(mesh, axis_type, view):
  case = Case(layer(mesh, axis_type))
  hlo = compiled(case, there_and_back, case.tokens(), case.weights(), view=view)
  assert collectives(hlo) == []
  assert exchanges(hlo) == ["ep_combine", "ep_dispatch", "ep_prepare"]


@EVERY_MESH
@EVERY_TYPE
@BOTH_VIEWS
def test_backward(mesh, axis_type, view):
  """And the routing is exchanged once, for both directions."""
  case = Case(layer(mesh, axis_type))
  inputs = case.tokens(), case.weights(), case.tokens()
  hlo = compiled(case, forward_and_back, *inputs, view=view)
  assert collectives(hlo) == []
  assert exchanges(hlo) == [
    "ep_combine",
    "ep_combine_bwd",
    "ep_dispatch",
    "ep_dispatch_bwd",
    "ep_prepare",
  ]


@BOTH_VIEWS
def test_every_op(view):
  case = Case(layer("dp2_ep2"))
  hlo = compiled(case, everything, *case.inputs(), view=view)
  assert collectives(hlo) == []


def test_gpus_run_every_op_among_their_collectives():
  """Each is alone in a function that is called on the collective stream."""
  case = Case(layer("dp2_ep2"))
  program = lower((case, everything, *case.inputs()), platforms=("cuda",))
  text = program.as_text()
  inside = re.findall(
    r"func private @(\w+)\(.*\n +%\S+ = stablehlo.custom_call @(ep_\w+)", text
  )
  calls = re.findall(
    r"call @(\w+)\(.*_xla_stream_annotation = \"collective\", "
    r"inlineable = \"false\"",
    text,
  )
  assert {op for _, op in inside} == set(ffi.OPS)
  assert len(inside) == text.count("@ep_") - text.count("@ep_op") > 0
  assert sorted(name for name, _ in inside) == sorted(calls)


def test_int64_ids_and_float16_weights():
  with jax.enable_x64(True):
    case = Case(layer("dp2_ep2"))
    case = Case(case.layer, case.topk_idx.astype(np.int64))
    hlo = compiled(
      case, there_and_back, case.tokens(), case.weights(np.float16)
    )
  assert collectives(hlo) == []


def test_other_collectives_would_be_seen():
  """So that the empty lists above mean something."""
  mesh = make_mesh({"x": 4})
  replicated = NamedSharding(mesh, PartitionSpec())
  x = to_global(np.ones((4, 4), np.float32), mesh, PartitionSpec("x"))
  for fn, expected in [
    (lambda x: x, "all-gather"),
    (lambda x: x.sum(), "all-reduce"),
  ]:
    program = jax.jit(fn, out_shardings=replicated)
    assert expected in collectives(program.lower(x).compile().as_text())
