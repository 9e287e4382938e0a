# SPDX-License-Identifier: Apache-2.0
"""Tests that each benchmark runs and rejects wrong results."""

import dataclasses
import gc
import re

import jax
from jax import lax
from jax.sharding import AxisType
import numpy as np
import pytest

from benchmarks import contenders, grouped_matmul, measure, report
from benchmarks import workload as workload_lib
from benchmarks.exchanges import Gathered
import ep
from ep.testing._routings import ROUTINGS

SHAPE = workload_lib.Shape(tokens=6, hidden=5, top_k=2, num_experts=8)


def test_grouped_matmuls_are_measured(capfd):
  sizes = dict(num_rows=128, experts=4, inner=8, outer=16)
  grouped_matmul.measure_products("bfloat16", **sizes, rounds=1, others=True)
  output = capfd.readouterr().out
  errors = re.findall(r"^(?:ep|lax.ragged_dot): errors (.*)$", output, re.M)
  assert len(errors) == 2
  assert all(float(x) < 0.02 for line in errors for x in line.split())
  assert "copies, with gradients: " in output
  cfg = ep.MoEConfig(hidden=8, inner=16, num_experts=4, top_k=2)
  grouped_matmul.measure_layer(cfg, tokens=64, rounds=1)
  output += capfd.readouterr().out
  for line in "ep, with gradients: ", "ep, forward: ":
    assert output.count(line) == 2


@pytest.fixture
def mesh():
  """Makes the mesh of this process, and halves the compile time of XLA.

  The memory meter collects garbage before each op. `gc.freeze` excludes the
  objects that exist before the test.
  """
  jax.config.update("jax_disable_most_optimizations", True)
  gc.freeze()
  yield jax.make_mesh(
    (jax.device_count(),), (workload_lib.AXIS,), axis_types=(AxisType.Auto,)
  )
  gc.unfreeze()
  jax.config.update("jax_disable_most_optimizations", False)


def _workload(mesh, routing="skewed", *, shape=SHAPE, **options):
  choices = ROUTINGS[routing](
    np.random.default_rng(0),
    (mesh.size * shape.tokens, shape.top_k),
    shape.num_experts,
  )
  return workload_lib.Workload(shape, choices, mesh.size, **options)


def _measure(mesh, workload, names, ops):
  return measure.measure(mesh, workload, names=names, ops=ops, rounds=1)


def test_every_contender_is_right(mesh):
  workload = _workload(mesh, "with_unused_choices", dtype="bfloat16")
  names = ["host", *contenders.PURE_XLA]
  results = _measure(mesh, workload, names, [*contenders.EXCHANGES])
  assert {op: [*of_op] for op, of_op in results.items()} == dict.fromkeys(
    contenders.EXCHANGES, names
  )


def test_one_wrong_number_is_an_error(mesh, monkeypatch):
  right = contenders.OPS["dispatch"]

  def spoil(*args):
    leaves, tree = jax.tree.flatten(right.run(*args))
    if isinstance(args[0], Gathered):
      # Unless the rank is full, the last row is unused: it belongs to the tail.
      is_first = lax.axis_index("ep") == 0
      leaves[0] = leaves[0].at[-1, -1].add(is_first)
    return tree.unflatten(leaves)

  monkeypatch.setitem(contenders.OPS, "dispatch", right._replace(run=spoil))
  with pytest.raises(
    AssertionError,
    match=r"gathered: dispatch on rank 0\s+Mismatched elements: 1 ",
  ):
    _measure(mesh, _workload(mesh), ["gathered"], ["dispatch"])


def test_every_layer_is_right(mesh):
  """Contenders that do not implement the op are left out."""
  shape = dataclasses.replace(SHAPE, inner=3)
  workload = _workload(mesh, "with_unused_choices", shape=shape)
  names = ["host", *contenders.LAYERS, *contenders.USERS]
  results = _measure(mesh, workload, ["gathered", *names], ["moe_grad"])
  assert [*results["moe_grad"]] == names
  of_op = results["moe_grad"].values()
  assert all(result.planned_bytes > 0 for result in of_op)


def _results(**seconds):
  case = report.Case(world="w", shape="s", dtype="d", op="round_trip")
  nan = float("nan")
  return {
    case: {
      name: report.Result(np.array(s), nan, nan) for name, s in seconds.items()
    }
  }


def test_ratios_are_of_rounds_and_of_the_best_contender(capsys):
  results = _results(
    host=[1.0, 10.0, 2.0],
    padded_scatter=[4.0, 40.0, 8.0],
    gathered=[2.0, 20.0, 4.0],
  )
  (of_case,) = results.values()
  assert report.times_best_xla(of_case) == pytest.approx(2.0)
  assert report.gate(results, 3.9)
  assert not report.gate(results, 4.1)
  assert not report.gate(_results(host=[1.0]), 0.0)  # nothing to compare
  assert not report.gate({}, 0.0)
  capsys.readouterr()
  report.print_tables(results)
  report.print_summary(results)
  table = capsys.readouterr().out
  assert "gathered" in table and table.endswith("  2.00\n")
  report.print_summary(_results(host=[1.0]))
  assert capsys.readouterr().out.endswith("nan\n")
