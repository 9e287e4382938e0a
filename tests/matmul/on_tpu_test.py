# SPDX-License-Identifier: Apache-2.0
"""Tests the kernels for TPUs in JAX's interpreter of TPU kernels.

benchmarks/compiled.py compiles them for TPUs.
"""

import logging

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from ep._src.matmul import (
  by_ragged_dot,
  by_tpu_kernels,
  on_tpu,
  row_map,
)
from ep._src.matmul.row_map import map_used_rows

L, F, G = 4, 72, 80
SIZES = {
  "across_blocks": (200, [70, 0, 60, 3]),
  "whole_blocks": (192, [64, 64, 0, 0]),
  "none": (128, [0, 0, 0, 0]),
  "all": (193, [1, 63, 64, 65]),
}


def _slabs(sizes):
  return list(map(slice, np.cumsum(sizes) - sizes, np.cumsum(sizes)))


@pytest.mark.parametrize(
  "name, dtype",
  [*dict.fromkeys(SIZES, jnp.bfloat16).items(), ("all", jnp.float32)],
)
def test_grouped_matmuls_beside_unused_nans(name, dtype, monkeypatch):
  """NaN in unused rows changes no result; matrices are float32.

  The last tile of each axis exceeds the array.
  """
  monkeypatch.setattr(by_tpu_kernels, "_TILES", [(64, 48, 48)])
  monkeypatch.setattr(by_tpu_kernels, "_PART", 32)
  num, sizes = SIZES[name]
  rng = np.random.default_rng(0)
  x, y, z = (rng.normal(size=(num, n)).astype(dtype) for n in (F, G, G))
  w, v = (rng.normal(size=(L, F, G)).astype(np.float32) for _ in range(2))
  for rows in (x, y, z):
    rows[sum(sizes) :] = np.nan
  assert on_tpu.choose(x, w.shape) is by_tpu_kernels

  @jax.jit
  def run(sizes, x, w, v, y, z):
    return (
      by_tpu_kernels.expand(sizes, None, x, [w, v], "zero"),
      by_tpu_kernels.contract(sizes, None, [y, z], [w, v], "zero"),
      by_tpu_kernels.outer(sizes, None, x, [y, z], jnp.dtype("float32")),
    )

  with pltpu.force_tpu_interpret_mode():
    outs, back, sums = run(jnp.int32(sizes), x, w, v, y, z)
  w, v = (np.float64(m.astype(dtype)) for m in (w, v))
  x, y, z = map(np.float64, (x, y, z))
  expected = [np.zeros((num, G)), np.zeros((num, G)), np.zeros((num, F))]
  expected_sums = [np.zeros((L, F, G)), np.zeros((L, F, G))]
  for j, s in enumerate(_slabs(sizes)):
    expected[0][s], expected[1][s] = x[s] @ w[j], x[s] @ v[j]
    expected[2][s] = y[s] @ w[j].T + z[s] @ v[j].T
    for out, g in zip(expected_sums, (y, z), strict=True):
      out[j] = x[s].T @ g[s]
  eps = max(float(jnp.finfo(dtype).eps) / 2, 1e-5)
  for actual, wanted in zip([*outs, back], expected, strict=True):
    assert actual.dtype == dtype
    np.testing.assert_allclose(np.float64(actual), wanted, 1.01 * eps, 1e-4)
  for actual, wanted in zip(sums, expected_sums, strict=True):
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, wanted, 1e-4, 1e-4)


def act(gates, values, weights):
  return jax.nn.silu(gates) * values * weights[:, None], jnp.tanh(gates)


def functions_of_rows(dtype):
  """Yields (fn, arrays) of each `ep_map_used_rows` in a gradient function."""
  rng = np.random.default_rng(0)
  shapes = ((1024, F), dtype), ((1024, F), dtype), ((1024,), jnp.float32)
  args = [rng.normal(size=shape).astype(d) for shape, d in shapes]

  def loss(*args):
    outs = map_used_rows(act, jnp.int32([1024]), *args)
    return sum(jnp.sum(jnp.sin(out.astype(jnp.float32))) for out in outs)

  traced = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(*args)
  for e in traced.eqns:
    if e.primitive.name == "ep_map_used_rows":
      _, *arrays = (v.aval for v in e.invars)
      yield (
        e.params["fn"],
        [rng.normal(size=x.shape).astype(x.dtype) for x in arrays],
      )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_functions_of_rows_and_their_derivatives(dtype):
  functions = [*functions_of_rows(dtype)]
  assert len(functions) == 2  # the function, and the transpose of its tangent
  for fn, arrays in functions:
    expected = jax.jit(fn)(*arrays)
    in_place = isinstance(fn, row_map._Transposed)
    mapped = on_tpu.row_map(fn, arrays, in_place)
    for used in 1024, 77, 0:
      for x in arrays:
        x[used:] = np.nan
      with pltpu.force_tpu_interpret_mode():
        run = jax.jit(lambda n, *x, fn=fn, m=mapped: m(fn, n, x))
        actual = run(jnp.int32(used), *arrays)
      eps = float(jnp.finfo(dtype).eps)
      for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(
          np.float32(a[:used]), np.float32(b[:used]), 4 * eps, 4 * eps
        )


def test_the_choice_is_logged(caplog):
  rows = jax.ShapeDtypeStruct((130, F), jnp.float16)
  with caplog.at_level(logging.INFO, "ep"):
    assert on_tpu.choose(rows, (L, F, G)) is by_ragged_dot
    assert on_tpu.row_map(jnp.sort, [rows], False) is None
  for record, words in zip(
    caplog.records, ["take bfloat16 and float32", "takes bfloat16"], strict=True
  ):
    assert words in record.getMessage()
