# SPDX-License-Identifier: Apache-2.0
"""Compiles a layer with gradients for a TPU."""

from benchmarks import compiled
from benchmarks.workload import Shape
import targets


def test_costs_of_a_layer_with_gradients():
  """Each of the four exchanges of rows gathers them once.

  Kernels compute three products, their six gradients, and the activation and
  the weights with their gradients.
  """
  mesh = targets.mesh("v5e")
  shape = Shape(1024, 512, 2, 8, 1024)
  cost = compiled.compiled(compiled.lower(shape, None, mesh))
  need = compiled.needed_flops(shape, None, mesh.size)
  assert need <= cost.flops <= 1.1 * need
  found = cost.operations
  assert found["ragged-all-to-all"]
  assert found["rows"] == 4
  assert found["scatter"] == 0
  assert found["kernel"] == 9 + 4
