# SPDX-License-Identifier: Apache-2.0
"""Compiles a layer with gradients for a TPU."""

import jax
import pytest

from benchmarks import compiled
from benchmarks.workload import Shape
import targets


@pytest.mark.skipif(not targets.has_compiler("v5e"), reason="needs libtpu")
def test_costs_of_a_layer_with_gradients():
  """Each of the four exchanges of rows gathers them once."""
  mesh = targets.mesh("v5e")
  shape = Shape(1024, 512, 2, 8, 1024)
  # conftest.py demands full precision. Kernels refuse bfloat16 with it.
  with jax.default_matmul_precision("default"):
    cost = compiled.compiled(compiled.lower(shape, None, mesh))
  need = compiled.needed_flops(shape, None, mesh.size)
  assert need <= cost.flops <= 1.1 * need
  found = cost.operations
  assert found["ragged-all-to-all"]
  assert found["rows"] == 4
  assert found["scatter"] == 0
