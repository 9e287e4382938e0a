# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls pass the rules of ep.testing."""

import functools
import importlib.util

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

import ep
from ep._src.matmul import grouped_matmul as gm
from ep._src.matmul import tiles
from ep._src.matmul.by_function import RAGGED_DOT
from ep._src.native import ffi
from ep.testing import GroupedMatmul

C, F, G = 300, 5, 7

SIZES = [0, 150, 17, 0, 0, 133]  # of expert segments; C in total
SLABS = [*map(slice, np.cumsum(SIZES) - SIZES, np.cumsum(SIZES))]
SEGMENTS = [[0, 0], [100, 50], [0, 17], [0, 0], [0, 0], [130, 0]]


def _of_namespace(ops):
  """Returns the functions of an implementation as one function.

  Two halves of each matrix are two matrices, as in a gated expert.
  """

  def apply(fn, sizes, *args):
    halves = [jnp.split(x, 2, -1) if is_split else x for x, is_split in args]
    return fn(sizes, *halves)

  @jax.custom_vjp
  def matmul(rows, matrices, sizes):
    expand = functools.partial(ops.expand, tail="zero")
    outs = apply(expand, sizes, (rows, False), (matrices, True))
    return jnp.concatenate(outs, 1)

  def backward(residuals, g):
    rows, matrices, sizes = residuals
    contract = functools.partial(ops.contract, tail="zero")
    outer = functools.partial(ops.outer, dtype=matrices.dtype)
    sums = apply(outer, sizes, (rows, False), (g, True))
    return (
      apply(contract, sizes, (g, True), (matrices, True)),
      jnp.concatenate(sums, 2),
      None,
    )

  matmul.defvjp(lambda *args: (matmul(*args), args), backward)
  return matmul


DTYPES = ("float32", "bfloat16", "float16")


def _cases(name, matmul, *rules, **declared):
  """Returns cases of ep.testing; `unread` and `neighbours` check gradients."""
  if not callable(matmul):
    matmul = _of_namespace(matmul)
  declared = dict(dtypes=DTYPES, multiples=(1, 1, 2)) | declared
  subject = GroupedMatmul(
    name=name, matmul=matmul, tail="zero", gradients=True, **declared
  )
  return [
    case._replace(id=f"{name}-{case.id}")
    for case in ep.testing.cases(subject, ["unread", *rules])
  ]


@jax.custom_vjp
def own(lhs, rhs, group_sizes):
  """Multiplies as a kernel may: NaN in rows that no group has."""
  used = jnp.arange(len(lhs)) < group_sizes.sum()
  out = lax.ragged_dot(lhs, rhs, group_sizes)
  return jnp.where(used[:, None], out, jnp.nan)


def _own_gradients(residuals, g):
  """Reads the rows that no group has as rows of the last group.

  Returns NaN as the gradient of rows, which `ep` does not ask for.
  """
  lhs, rhs, group_sizes = residuals
  ends = jnp.cumsum(group_sizes)[:-1]
  groups = (ends <= jnp.arange(len(lhs))[:, None]).sum(axis=1)
  is_in = jax.nn.one_hot(groups, len(rhs))
  sums = jnp.einsum("cl,cf,cg->lfg", is_in, lhs, g)
  return jnp.full_like(lhs, jnp.nan), sums, None


own.defvjp(lambda *args: (own(*args), args), _own_gradients)


@pytest.mark.parametrize(
  "case",
  [
    *_cases(
      "function",
      functools.partial(gm.grouped_matmul, implementation=own),
      *("jvp", "second_order"),
      dtypes=("float32",),
      jvp=True,
      second_order=True,
    ),
    *_cases(
      *("default", gm.grouped_matmul),
      *("neighbours", "repeatable", "jvp", "second_order"),
      jvp=True,
      second_order=True,
    ),
    *_cases("tiles_on_cpu", tiles.ON_CPU, "neighbours"),
    *_cases("tiles_on_gpu", tiles.ON_GPU, "neighbours"),
    # XLA:CPU multiplies the matrices of other groups by zeros.
    *_cases("ragged_dot", RAGGED_DOT),
  ],
)
def test_conformance(case):
  case.check()


def _matmul(rows, matrices):
  out = np.zeros((rows.shape[0], matrices.shape[2]))
  for matrix, slab in zip(matrices, SLABS, strict=True):
    out[slab] = rows[slab] @ matrix
  return out


def _inputs(dtype=jnp.float32):
  rng = np.random.default_rng(0)
  shapes = (C, F), (len(SIZES), F, G), (C, G)
  return tuple(rng.normal(size=s).astype(dtype) for s in shapes)


@pytest.fixture(params=["native", "tiles"])
def implementation_on_cpu(request, monkeypatch):
  if request.param == "tiles":
    monkeypatch.setattr(ffi, "is_native", lambda ctx: False)
  return request.param


def test_the_library_computes_products_and_gradients(implementation_on_cpu):
  rows, matrices, g = _inputs()

  def both(x, w, g):
    fn = functools.partial(gm.grouped_matmul, group_sizes=np.int32(SIZES))
    out, vjp = jax.vjp(fn, x, w)
    return out, vjp(g)

  text = jax.jit(both).lower(rows, matrices, g).as_text()
  expected = {"native": 3, "tiles": 0}[implementation_on_cpu]
  assert text.count("@ep_grouped_matmul(") == expected


@pytest.mark.parametrize(
  "implementation_on_cpu, segments",
  [("native", None), ("native", SEGMENTS), ("tiles", SEGMENTS)],
  indirect=["implementation_on_cpu"],
)
@pytest.mark.usefixtures("implementation_on_cpu")
def test_float32_gradients_of_matrices_beside_bfloat16_rows(segments):
  """The op rounds matrices to the dtype of rows, but not their gradients."""
  rows, _, g = _inputs(jnp.bfloat16)
  _, matrices, _ = _inputs()
  rows[297:300] = 0  # These rows are padding after the segments.
  counts = None if segments is None else jnp.int32(segments)

  def product(x, w):
    return gm.grouped_matmuls(x, [w], jnp.int32(SIZES), segments=counts)[0]

  @jax.jit
  def both(x, w, g):
    out, vjp = jax.vjp(product, x, w)
    return out, *vjp(g)

  *results, g_matrices = both(rows, matrices, g)
  rows, rounded, g = map(np.float64, (rows, matrices.astype(rows.dtype), g))
  expected = _matmul(rows, rounded), _matmul(g, rounded.swapaxes(1, 2))
  tolerance = 1.01 * float(jnp.finfo(jnp.bfloat16).eps) / 2, 2e-5
  for a, b in zip(results, expected, strict=True):
    assert a.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float64(a), b, *tolerance)
  assert g_matrices.dtype == jnp.float32
  sums = np.stack([rows[slab].T @ g[slab] for slab in SLABS])
  np.testing.assert_allclose(np.float64(g_matrices), sums, 1e-4, 1e-4)


def test_work_is_linear_in_the_rows_used():
  steps = []

  def step(tile, out):
    jax.debug.callback(lambda group: steps.append(int(group)), tile.group)
    return out

  for sizes in ([128, 0, 0, 1], [0, 0, 0, 0]):
    tiles.ON_CPU._fold(step, 0, 0, jnp.int32(sizes), 1024)
  jax.effects_barrier()
  assert steps == [0, 0, 3]  # The expert segment of each tile.


def test_bfloat16_with_wide_integers():
  """jax_enable_x64 changes neither the dtype of sums of sizes nor results."""
  rows = jnp.ones((6, 4), jnp.bfloat16)
  matrices = jnp.ones((2, 4, 3), jnp.bfloat16)
  sizes = np.array([2, 3])
  expected = np.asarray(gm.grouped_matmul(rows, matrices, sizes), np.float32)
  with jax.enable_x64(True):
    got = jax.jit(gm.grouped_matmul)(rows, matrices, sizes)
  np.testing.assert_array_equal(np.asarray(got, np.float32), expected)


def test_no_rows():
  out = gm.grouped_matmul(
    jnp.ones((0, 4)), jnp.ones((2, 4, 3)), np.array([0, 0])
  )
  assert out.shape == (0, 3)


def test_without_jit():
  with jax.disable_jit():
    out = gm.grouped_matmul(
      jnp.ones((2, 4)), jnp.ones((1, 4, 3)), np.array([2])
    )
  np.testing.assert_array_equal(out, np.full((2, 3), 4))


def test_a_function_gets_operands_of_one_dtype():
  rows, matrices, g = _inputs(jnp.bfloat16)
  matrices = matrices.astype("float32")
  dtypes = []

  def dot(lhs, rhs, group_sizes):
    dtypes.append((lhs.dtype, rhs.dtype))
    return lax.ragged_dot(lhs, rhs, group_sizes)

  def product(w):
    sizes = jnp.int32(SIZES)
    return gm.grouped_matmuls(rows, [w], sizes, implementation=dot)[0]

  out, vjp = jax.vjp(product, matrices)
  (grad,) = vjp(g)
  assert out.dtype == jnp.bfloat16 and grad.dtype == jnp.float32
  assert set(dtypes) == {(rows.dtype, rows.dtype)}


@pytest.mark.parametrize(
  ("implementation", "words"),
  [
    ("tile", r"= 'tile', but it must be None, one of \('tiles', 'ragged_dot'"),
    (3, "= 3, but it must be None, one of"),
    (lambda *_: 1, r"returned int, but an array \[2, 3\] is expected"),
    (lambda x, *_: x, r"returned \(2, 4\), but an array \[2, 3\]"),
    ("mgpu", '= "mgpu" is for an NVIDIA GPU, and this program is for cpu; p'),
    ("megablox", '= "megablox" is for a TPU, and this program is for cpu; p'),
  ],
)
def test_an_implementation_that_cannot_run(implementation, words):
  args = jnp.ones((2, 4)), jnp.ones((1, 4, 3)), np.int32([2])
  with pytest.raises(
    ValueError, match=f"grouped_matmul: implementation {words}"
  ):
    gm.grouped_matmul(*args, implementation=implementation)


def test_tokamax_that_is_not_installed(monkeypatch):
  args = jnp.ones((2, 4)), jnp.ones((1, 4, 3)), np.int32([2])
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ValueError, match="pip install tokamax; or pass implem"):
    gm.grouped_matmul(*args, implementation="tokamax")
