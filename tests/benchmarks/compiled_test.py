# SPDX-License-Identifier: Apache-2.0
"""Compiles a layer and the ops for a TPU, beside a layer of MaxText."""

import jax
import pytest

from benchmarks import compiled, targets
from benchmarks.workload import Shape

SHAPE = Shape(1024, 512, 2, 8, 1024)


@pytest.fixture
def mesh():
  # conftest.py demands full precision. JAX's kernels refuse bfloat16 with it.
  with jax.default_matmul_precision("default"):
    yield targets.mesh("v5e")


def _cost(name, mesh, need):
  cost = compiled.compiled(compiled.lower_layer(name, SHAPE, None, mesh))
  assert need <= cost.flops <= 1.1 * need
  return cost


def test_costs_of_a_layer_with_gradients(mesh):
  """Each of the four exchanges of rows gathers them once."""
  rows = mesh.size * SHAPE.tokens * SHAPE.top_k
  need = 18 * rows * SHAPE.hidden * SHAPE.inner
  ours = _cost("ep", mesh, need)
  assert ours.ragged
  assert ours.row_gathers == 4
  assert ours.scatters == 0

  theirs = _cost("maxtext_ragged", mesh, need)
  assert theirs.row_gathers == 8
  assert theirs.scatters
  assert ours.num_bytes <= 0.9 * theirs.num_bytes
  assert ours.temporaries <= 0.9 * theirs.temporaries


def test_ops_gather_rows_once_and_scatter_none(mesh):
  costs = {
    name: compiled.compiled(lowered)
    for name, lowered in compiled.lower_ops(compiled.OPS, SHAPE, mesh)
  }
  gathers = {name: cost.row_gathers for name, cost in costs.items()}
  assert gathers == {name: int(name != "prepare") for name in compiled.OPS}
  assert not any(cost.scatters for cost in costs.values())
