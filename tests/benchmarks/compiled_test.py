# SPDX-License-Identifier: Apache-2.0
"""Compiles a layer with gradients for a TPU and for an H100."""

import re

import jax
import pytest

from benchmarks import compiled
from benchmarks.workload import Shape
from ep._src.base import compat
import gpu_compiler
import targets


@pytest.mark.skipif(not targets.has_compiler("v5e"), reason="needs libtpu")
def test_costs_of_a_layer_with_gradients():
  """Each of the four exchanges of rows gathers them once.

  Kernels compute three products and their six gradients.
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
  assert found["kernel"] == 9


@gpu_compiler.needs_compiler
def test_kernels_of_jax_compute_all_products_of_a_layer(monkeypatch, capfd):
  """XLA multiplies only in the router; kernels spill no registers."""
  mesh = targets.mesh("h100x4")
  device = mesh.devices.flat[0]
  monkeypatch.setattr(compat, "local_device", lambda ctx: device)
  monkeypatch.setattr(jax, "devices", lambda: [device])  # for its cores
  monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")  # to standard output
  shape = Shape(256, 256, 8, 4 * 128, 128)
  lowered = compiled.lower(shape, None, mesh, implementation="mgpu")
  found = compiled.compiled(lowered).operations
  assert found["kernel"] == 9
  assert found["dot"] == 3
  assert found["while"] <= 1
  spills = re.findall(
    r"frame, (\d+) bytes spill stores", capfd.readouterr().out
  )
  assert spills and set(spills) == {"0"}
