# SPDX-License-Identifier: Apache-2.0
"""ep picks a grouped matmul for each NVIDIA GPU, and a log line says why."""

import logging
import types

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from cases import jit_quickly
import ep
from ep._src.matmul import by_ragged_dot, by_static_tiles, mosaic_sums, on_cuda


class Device(types.SimpleNamespace):
  __hash__ = object.__hash__


HOPPER = Device(compute_capability="9.0", core_count=132)
ADA = Device(compute_capability="8.9", core_count=142)
BLACKWELL = Device(compute_capability="10.0", core_count=148)


def _rows(num_rows=128, dtype=jnp.bfloat16, width=64):
  return jax.ShapeDtypeStruct((num_rows, width), dtype)


@pytest.fixture(autouse=True)
def _fresh_log(monkeypatch):
  monkeypatch.setattr(on_cuda, "_log", logging.getLogger("ep").info)


@pytest.mark.parametrize(
  ("device", "rows", "matrices", "chosen", "why"),
  [
    (None, _rows(), (8, 64, 64), by_static_tiles, "exported"),
    (None, _rows(), (2, 64, 64), by_ragged_dot, "exported"),
    (ADA, _rows(), (8, 64, 64), by_static_tiles, "and this one has 8.9"),
    (BLACKWELL, _rows(), (8, 64, 128), by_static_tiles, "at least 128"),
    (HOPPER, _rows(dtype=jnp.float32), (1, 64, 64), by_static_tiles, "float32"),
    (HOPPER, _rows(132), (8, 64, 64), by_static_tiles, "a multiple of 8"),
    (HOPPER, _rows(56), (8, 64, 64), by_static_tiles, "at least 64"),
    (HOPPER, _rows(0), (8, 64, 64), by_ragged_dot, "at least 64"),
    (HOPPER, _rows(), (8, 64, 72), by_static_tiles, "multiples of 64"),
  ],
)
def test_without_kernels(device, rows, matrices, chosen, why, caplog):
  with caplog.at_level(logging.INFO, "ep"):
    assert on_cuda.choose(device, rows, matrices) is chosen
  assert why in caplog.text


@pytest.mark.parametrize(
  ("device", "accumulate"),
  [
    (HOPPER, mosaic_sums.in_registers),
    (BLACKWELL, mosaic_sums.in_tensor_memory),
  ],
)
def test_kernels(device, accumulate, monkeypatch, caplog):
  monkeypatch.setattr(on_cuda, "_failure", lambda device: None)
  with caplog.at_level(logging.INFO, "ep"):
    chosen = on_cuda.choose(device, _rows(width=128), (8, 128, 128))
  options = {"num_cores": device.core_count, "accumulate": accumulate}
  assert chosen.expand.keywords == options
  assert "kernels of Pallas Mosaic GPU" in caplog.text


@pytest.mark.parametrize(
  ("arrays", "why"),
  [
    ([_rows(), jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)], "of one F"),
    ([jax.ShapeDtypeStruct((128, 64, 64), jnp.bfloat16)], "of one F"),
    ([jax.ShapeDtypeStruct((128,), jnp.float32)], "of one F"),
    ([_rows(), jax.ShapeDtypeStruct((128,), jnp.bool_)], "32 bits"),
    ([_rows(dtype=jnp.float32)], "not float32"),
    ([_rows(132)], "a multiple of 8"),
    ([_rows()], "ImportError: no such name"),
  ],
)
def test_functions_over_all_rows(arrays, why, monkeypatch, caplog):
  def import_fails(device):
    raise ImportError("no such name")

  monkeypatch.setattr(on_cuda, "_row_kernel", import_fails)
  monkeypatch.setattr(jax.sharding, "SingleDeviceSharding", lambda _: None)
  with caplog.at_level(logging.INFO, "ep"):
    assert on_cuda.row_map(HOPPER, jnp.sin, arrays, arrays[:1]) is None
  assert "over all rows, because" in caplog.text
  assert why in caplog.text


def test_a_jax_that_does_not_compile_the_kernels(monkeypatch, caplog):
  """ep tries to compile the kernels once per device."""
  asked = []

  def import_fails(device):
    asked.append(device.core_count)
    raise ImportError("no such name")

  monkeypatch.setattr(on_cuda, "_kernels", import_fails)

  monkeypatch.setattr(jax.sharding, "SingleDeviceSharding", lambda _: None)
  device = Device(compute_capability="9.0", core_count=7)
  with caplog.at_level(logging.INFO, "ep"):
    for _ in range(2):
      chosen = on_cuda.choose(device, _rows(), (8, 64, 64))
  assert chosen is by_static_tiles
  assert asked == [7]
  assert (
    "does not compile the kernels: ImportError: no such name" in caplog.text
  )


def test_an_exported_program_has_no_kernels():
  shapes = (128, 64), (8, 64, 64), (8,)
  dtypes = jnp.bfloat16, jnp.bfloat16, jnp.int32
  args = map(jax.ShapeDtypeStruct, shapes, dtypes)
  exported = jax.export.export(jax.jit(ep.grouped_matmul), platforms=["cuda"])
  text = exported(*args).mlir_module()
  assert "mosaic" not in text
  assert "ragged_dot" not in text


def test_the_loop_over_fewer_rows_than_a_tile():
  @jit_quickly
  def expand(sizes, rows, matrices):
    return by_static_tiles.expand(sizes, rows, [matrices], "zero")[0]

  out = expand(np.int32([1, 1]), np.ones((3, 4), "f"), np.ones((2, 4, 5), "f"))
  np.testing.assert_array_equal(out, [[4] * 5, [4] * 5, [0] * 5])


def test_the_loop_has_a_static_length_and_no_tf32():
  """A static length needs no copy of the loop condition to the host."""
  args = map(
    jax.ShapeDtypeStruct,
    [(300, 6), (8, 6, 5), (8,)],
    [jnp.float32] * 2 + [jnp.int32],
  )

  def both(rows, matrices, sizes):
    out, vjp = jax.vjp(lambda *a: ep.grouped_matmul(*a, sizes), rows, matrices)
    return vjp(out)

  traced = jax.jit(both).trace(*args)
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  length = (300 + 8 * 134) // 128
  assert text.count(f"dense<{length}> : tensor<i32>") >= 1
  assert text.count("stablehlo.while") == 3
  dots = [line for line in text.splitlines() if "dot_general" in line]
  assert len(dots) == 3
  assert all("precision = [HIGHEST, HIGHEST]" in line for line in dots)
