# SPDX-License-Identifier: Apache-2.0
"""Compiles a layer and the ops for a TPU, beside a layer of MaxText."""

import jax
import pytest

from benchmarks import compiled, hlo, targets
from benchmarks.workload import Shape

SHAPE = Shape(2048, 1024, 2, 16, 2048)


@pytest.fixture
def mesh():
  # conftest.py demands full precision. JAX's kernels refuse bfloat16 with it.
  with jax.default_matmul_precision("default"):
    yield targets.mesh("v5e")


def _layer(name, mesh):
  lowered, capacity = compiled.lower_layer(name, SHAPE, None, mesh)
  return *compiled.compiled(lowered), capacity


def test_costs_of_a_layer_with_gradients(mesh):
  cost, text, capacity = _layer("ep", mesh)
  need = 18 * capacity * SHAPE.hidden * SHAPE.inner
  assert need <= cost.flops <= 1.1 * need
  assert cost.row_gathers == 4  # one for each of the four exchanges of rows
  assert cost.ragged
  scatters = [op.name for op in hlo.ops(text) if op.opcode == "scatter"]
  assert not [name for name in scatters if "gmm)" not in name]

  theirs, _, _ = _layer("maxtext_ragged", mesh)
  assert theirs.row_gathers == 8
  assert need <= theirs.flops <= 1.1 * need
  assert cost.num_bytes <= 0.9 * theirs.num_bytes


def test_ops_gather_rows_once_and_scatter_none(mesh):
  costs = {
    name: compiled.compiled(lowered)[0]
    for name, lowered in compiled.lower_ops(compiled.OPS, SHAPE, mesh)
  }
  gathers = {name: cost.row_gathers for name, cost in costs.items()}
  assert gathers == {name: int(name != "prepare") for name in compiled.OPS}
  assert not any(cost.scatters for cost in costs.values())
