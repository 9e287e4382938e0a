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

from ep._src.matmul import on_tpu, row_map
from ep._src.matmul.by_function import RAGGED_DOT
from ep._src.matmul.row_map import map_used_rows

L, F, G = 4, 72, 80


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
    assert on_tpu.choose(rows, (L, F, G)) is RAGGED_DOT
    assert on_tpu.row_map(jnp.sort, [rows], False) is None
  for record, words in zip(
    caplog.records, ["take bfloat16 and float32", "takes bfloat16"], strict=True
  ):
    assert words in record.getMessage()
