# SPDX-License-Identifier: Apache-2.0
"""Tests the kernels for TPUs in JAX's interpreter of TPU kernels.

compiled_test.py compiles them for a TPU.
"""

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

import ep
from ep._src.matmul import on_tpu
from ep._src.matmul.by_function import RAGGED_DOT
from ep.testing import GroupedMatmul

L, F, G = 4, 72, 80


@jax.custom_vjp
def matmul(rows, matrices, sizes):
  return on_tpu.MEGABLOX.expand(sizes, rows, [matrices], "zero")[0]


def _backward(residuals, g):
  rows, matrices, sizes = residuals
  return (
    on_tpu.MEGABLOX.contract(sizes, [g], [matrices], "zero"),
    on_tpu.MEGABLOX.outer(sizes, rows, [g], matrices.dtype)[0],
    None,
  )


matmul.defvjp(lambda *args: (matmul(*args), args), _backward)


def _has_few_tiles(setting):
  """Returns whether each axis has two or more tiles, but not many."""
  rows, hidden = setting.capacity, setting.hidden
  return 64 < rows < 200 and 48 < hidden < 96 and setting.num_experts < 6


def _case(rule, dtype):
  subject = GroupedMatmul(
    name="megablox",
    matmul=matmul,
    tail="zero",
    gradients=True,
    dtypes=(dtype,),
    supports=_has_few_tiles,
  )
  return ep.testing.cases(subject, [rule])[0]


@pytest.fixture
def low_tiles(monkeypatch):
  """Makes tiles so small that the last tile of each axis exceeds the array."""
  monkeypatch.setattr(on_tpu, "_HEIGHT", 64)
  monkeypatch.setattr(on_tpu, "_tile", lambda k, n, dtype: (64, 48, 48))


@pytest.mark.parametrize(
  "case", [_case("unread", "float32"), _case("neighbours", "bfloat16")]
)
@pytest.mark.usefixtures("low_tiles")
def test_conformance(case):
  """The kit checks products and gradients."""
  with pltpu.force_tpu_interpret_mode():
    case.check()


@pytest.mark.usefixtures("low_tiles")
def test_float32_matrices_and_gradients_beside_bfloat16_rows():
  rng = np.random.default_rng(0)
  sizes = np.int32([70, 0, 3, 50])
  rows = rng.normal(size=(130, F)).astype(jnp.bfloat16)
  ws = [rng.normal(size=(L, F, G)).astype(np.float32) for _ in range(2)]
  rows[sizes.sum() :] = np.nan

  @jax.jit
  def products(rows, ws):
    outs = on_tpu.MEGABLOX.expand(sizes, rows, ws, "zero")
    back = on_tpu.MEGABLOX.contract(sizes, outs, ws, "zero")
    return (
      outs,
      back,
      on_tpu.MEGABLOX.outer(sizes, rows, outs, jnp.dtype("float32")),
    )

  with pltpu.force_tpu_interpret_mode():
    outs, back, grads = jax.tree.map(np.asarray, products(rows, ws))
  slabs = [*map(slice, np.cumsum(sizes) - sizes, np.cumsum(sizes))]
  rows, *outs = (x.astype(np.float64) for x in (rows, *outs))
  rounded = [w.astype(jnp.bfloat16).astype(np.float64) for w in ws]
  eps = float(jnp.finfo(jnp.bfloat16).eps)
  for i, slab in enumerate(slabs):
    for w, out, grad in zip(rounded, outs, grads, strict=True):
      np.testing.assert_allclose(out[slab], rows[slab] @ w[i], eps, 1e-5)
      np.testing.assert_allclose(grad[i], rows[slab].T @ out[slab], 1e-4, 1e-4)
    terms = [y[slab] @ w[i].T for y, w in zip(outs, rounded, strict=True)]
    size = sum(map(np.abs, terms))
    assert (abs(sum(terms) - np.float64(back[slab])) <= eps * size + 1e-5).all()
  assert back.dtype == jnp.bfloat16
  assert {g.dtype for g in grads} == {np.dtype("float32")}
  assert not any(x[sizes.sum() :].any() for x in (*outs, back))


@pytest.mark.parametrize("precision", ["default", "highest"])
@pytest.mark.parametrize("wide", [False, True])
def test_programs_lower_for_tpus(precision, wide):
  """The matmul lowers under any default precision, and with 64-bit types."""
  args = [
    jax.ShapeDtypeStruct((200, F), jnp.bfloat16),
    jax.ShapeDtypeStruct((L, F, G), jnp.bfloat16),
    jax.ShapeDtypeStruct((L,), jnp.int32),
  ]

  def loss(*args):
    return ep.grouped_matmul(*args).astype(jnp.float32).sum()

  with jax.default_matmul_precision(precision), jax.enable_x64(wide):
    program = jax.jit(jax.grad(loss, (0, 1))).trace(*args)
    text = program.lower(lowering_platforms=("tpu",)).as_text()
  assert text.count("tpu_custom_call") == 2


def test_what_the_kernels_do_not_take():
  rows = jax.ShapeDtypeStruct((130, F), jnp.float16)
  matrices = jax.ShapeDtypeStruct((L, F, G), jnp.float16)
  assert on_tpu.choose(rows, matrices) is RAGGED_DOT
  rows = rows.update(dtype=jnp.bfloat16)
  assert on_tpu.choose(rows, matrices) is on_tpu.MEGABLOX
