# SPDX-License-Identifier: Apache-2.0
"""ep picks a grouped matmul for each NVIDIA GPU, and a log line says why."""

import functools
import importlib
import importlib.util
import logging
import sys
import types

import jax
import jax.export
import jax.numpy as jnp
import pytest

import ep
from ep._src.matmul import implementations, on_cuda, tiles
from ep._src.matmul.by_function import ByFunction
from ep.testing import GroupedMatmul


class Device(types.SimpleNamespace):
  __hash__ = object.__hash__


HOPPER = Device(compute_capability="9.0", core_count=4)
ADA = Device(compute_capability="8.9")
BLACKWELL = Device(compute_capability="10.0", core_count=4)


def _array(*shape, dtype=jnp.bfloat16):
  return jax.ShapeDtypeStruct(shape, dtype)


ROWS, MATRICES = _array(130, 128), _array(8, 128, 128)


@pytest.fixture(autouse=True)
def _fresh_log(monkeypatch):
  monkeypatch.setattr(on_cuda, "log", logging.getLogger("ep").log)


@pytest.mark.parametrize(
  ("device", "rows", "matrices", "why"),
  [
    (None, ROWS, MATRICES, "exported"),
    (ADA, ROWS, MATRICES, "this one has 8.9"),
    (HOPPER, _array(130, 128, dtype=jnp.float32), MATRICES, "not float32"),
    (HOPPER, ROWS, _array(8, 128, 72), "multiples of 64"),
    (BLACKWELL, ROWS, _array(8, 64, 128), "multiples of 128"),
  ],
)
def test_without_kernels(device, rows, matrices, why, caplog):
  with caplog.at_level(logging.INFO, "ep"):
    chosen = on_cuda.choose(device, rows, matrices, False)
  assert chosen is tiles.ON_GPU
  assert why in caplog.text
  with pytest.raises(ValueError, match=f'"mgpu" cannot run: .*{why}.*; pass'):
    on_cuda.choose(device, rows, matrices, False, named=True)


@pytest.mark.parametrize(
  ("missing", "cure"),
  [("ragged_dot_mgpu", ""), ("absl", "; run: pip install absl-py")],
)
def test_a_jax_without_kernels(missing, cure, monkeypatch, caplog):
  def fail(*_, **__):
    raise ModuleNotFoundError(f"No module named {missing}", name=missing)

  monkeypatch.setattr(importlib, "import_module", fail)
  with caplog.at_level(logging.WARNING, "ep"):
    assert on_cuda.choose(HOPPER, ROWS, MATRICES, False) is tiles.ON_GPU
  words = "does not load the kernels: No module named"
  assert f"JAX {jax.__version__} {words} {missing}{cure}" in caplog.text


def test_gradients_of_matrices_are_not_rounded_twice(caplog):
  """The kernel rounds a gradient to the dtype of the rows."""
  wide = _array(8, 128, 128, dtype=jnp.float32)
  with caplog.at_level(logging.INFO, "ep"):
    assert on_cuda.choose(HOPPER, ROWS, wide, True) is tiles.ON_GPU
  assert 'implementation="mgpu" accepts' in caplog.text
  for args in (MATRICES, True), (wide, True, True), (wide, False):
    assert isinstance(on_cuda.choose(HOPPER, ROWS, *args), ByFunction)


def test_blackwell_warns_of_gradients_in_a_loop(caplog):
  with caplog.at_level(logging.WARNING, "ep"):
    chosen = on_cuda.choose(BLACKWELL, ROWS, MATRICES, False)
    assert chosen is not tiles.ON_GPU
    assert not caplog.records
    for named in (False, True):
      chosen = on_cuda.choose(BLACKWELL, ROWS, MATRICES, True, named)
      assert chosen is tiles.ON_GPU
  assert caplog.text.count("no kernel for it on Blackwell") == 2


def _kernels():
  return on_cuda.choose(HOPPER, ROWS, MATRICES, False)


@jax.custom_vjp
def _by_kernels(rows, matrices, sizes):
  return _kernels().expand(sizes, rows, [matrices], "zero")[0]


def _gradients(residuals, g):
  rows, matrices, sizes = residuals
  of_rows = _kernels().contract(sizes, [g], [matrices], "zero")
  return of_rows, *_kernels().outer(sizes, rows, [g], g.dtype), None


_by_kernels.defvjp(lambda *args: (_by_kernels(*args), args), _gradients)


@pytest.mark.skipif(
  jax.__version_info__ < (0, 12), reason="JAX cannot interpret the kernels"
)
@pytest.mark.parametrize(
  "case",
  ep.testing.cases(
    GroupedMatmul(
      name="mgpu",
      matmul=_by_kernels,
      multiples=(1, 64, 64),
      tail="zero",
      gradients=True,
      dtypes=("bfloat16",),
      supports=lambda s: s.capacity < 200 and s.num_experts < 6,
    ),
    ["unread", "neighbours"],
  )[::9],
)
def test_the_kernels_for_hopper_conform(case, monkeypatch):
  from jax._src.pallas.mosaic_gpu.interpret import params

  def devices(real=jax.devices):
    asks = sys._getframe(1).f_globals["__name__"]
    return [HOPPER] if asks.endswith("transposed_ragged_dot_mgpu") else real()

  monkeypatch.setattr(jax, "devices", devices)
  options = params.InterpretGPUParams(out_of_bounds_reads="uninitialized")
  with params.force_gpu_interpret_mode(options):
    case.check()


def test_tokamax_computes_gradients_of_matrices_on_hopper_alone(
  monkeypatch, caplog
):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
  choose = functools.partial(implementations.choose, "tokamax", "cuda")
  for device in (HOPPER, BLACKWELL, ADA, None):
    assert isinstance(choose(device, ROWS, MATRICES, False), ByFunction)
    chosen = choose(device, ROWS, MATRICES, True)
    assert (chosen is tiles.ON_GPU) == (device is not HOPPER)
  assert caplog.text.count("tokamax multiplies all rows for each matrix") == 3


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
  length = (300 + 8 * 127) // 128
  assert text.count(f"dense<{length}> : tensor<i32>") >= 1
  assert text.count("stablehlo.while") == 3
  dots = [line for line in text.splitlines() if "dot_general" in line]
  assert len(dots) == 3
  assert all("precision = [HIGHEST, HIGHEST]" in line for line in dots)
