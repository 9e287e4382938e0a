# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls pass the rules of ep.testing and JAX's transformations."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from cases import jit_quickly
from conftest import make_mesh
import ep
from ep._src.matmul import grouped_matmul as gm
from ep._src.matmul import tiles
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
    *_cases("tiles", tiles, "neighbours"),
  ],
)
def test_conformance(case):
  case.check()


def test_tiles_add_gradients_in_float32():
  """A sum of whole numbers over several tiles is rounded once, at the end."""
  rng = np.random.default_rng(0)
  rows, g = (rng.integers(0, 4, (700, n)).astype(float) for n in (8, 16))
  x, ct = (jnp.asarray(a, jnp.bfloat16) for a in (rows, g))

  def multiply(matrices):
    sizes = np.int32([len(rows)])
    return gm.grouped_matmul(x, matrices, sizes, implementation="tiles")

  (grad,) = jax.vjp(multiply, jnp.zeros((1, 8, 16), jnp.bfloat16))[1](ct)
  np.testing.assert_array_equal(grad[0], (rows.T @ g).astype(jnp.bfloat16))


def _matmul(rows, matrices):
  out = np.zeros((rows.shape[0], matrices.shape[2]))
  for matrix, slab in zip(matrices, SLABS, strict=True):
    out[slab] = rows[slab] @ matrix
  return out


def _inputs(dtype=jnp.float32):
  rng = np.random.default_rng(0)
  shapes = (C, F), (len(SIZES), F, G), (C, G)
  return tuple(rng.normal(size=s).astype(dtype) for s in shapes)


@pytest.mark.parametrize(
  "is_native, segments", [(True, None), (True, SEGMENTS), (False, SEGMENTS)]
)
def test_float32_gradients_of_matrices_beside_bfloat16_rows(
  is_native, segments, monkeypatch
):
  """The op rounds matrices to the dtype of rows, but not their gradients.

  On CPUs, the native library computes the product and both gradients.
  """
  if not is_native:
    monkeypatch.setattr(ffi, "is_native", lambda ctx: False)
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
  calls = both.lower(rows, matrices, g).as_text().count("@ep_grouped_matmul(")
  assert calls == (3 if is_native else 0)
  rows, rounded, g = map(np.float64, (rows, matrices.astype(rows.dtype), g))
  expected = _matmul(rows, rounded), _matmul(g, rounded.swapaxes(1, 2))
  tolerance = 1.01 * float(jnp.finfo(jnp.bfloat16).eps) / 2, 2e-5
  for a, b in zip(results, expected, strict=True):
    assert a.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float64(a), b, *tolerance)
  assert g_matrices.dtype == jnp.float32
  sums = np.stack([rows[slab].T @ g[slab] for slab in SLABS])
  np.testing.assert_allclose(np.float64(g_matrices), sums, 1e-4, 1e-4)


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


# Transformations of JAX. The function multiplies shared rows, of which two are
# unused, by two lists of matrices, as a gated expert does. The dense reference
# looks up a matrix for each row.

SHORT = np.int32([3, 0, 6])


def gated(x, w, v, sizes=SHORT):
  y, z = gm.grouped_matmuls(x, [w, v], sizes, tail="zero")
  return jnp.sin(y), jnp.cos(z) * z


def dense(x, w, v, sizes=SHORT):
  ends = jnp.cumsum(sizes)
  row = jnp.arange(11)
  slab = jnp.searchsorted(ends, row, side="right", method="compare_all")
  used = (row < ends[-1])[:, None]
  y, z = (
    jnp.where(used, jnp.einsum("cf,cfg->cg", x, m[slab]), 0) for m in (w, v)
  )
  return jnp.sin(y), jnp.cos(z) * z


def inputs(seed=0, lead=()):
  rng = np.random.default_rng(seed)
  shapes = (11, 4), (3, 4, 6), (3, 4, 5)
  return tuple(rng.normal(size=(*lead, *s)).astype(np.float32) for s in shapes)


def close(actual, expected):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-4), actual, expected
  )


def scalar(fn):
  return lambda *args: sum(jnp.sum(jnp.tanh(y)) for y in fn(*args))


def grad(fn):
  return jax.grad(scalar(fn), (0, 1, 2))


def forward(fn):
  return lambda *args: jax.jvp(fn, args, inputs(1))[1]


def linearized(fn):
  return lambda *args: jax.linearize(fn, *args)[1](*inputs(1))


OF_DENSE = jit_quickly(lambda *args: (dense(*args), grad(dense)(*args)))


def of_examples(*args):
  """Returns stacked results and gradients of `dense` for stacked arguments."""
  results = [OF_DENSE(*example) for example in zip(*args, strict=True)]
  return jax.tree.map(lambda *xs: np.stack(xs), *results)


def test_derivatives():
  """Tests all orders, modes and arguments, and a loss of only one output."""

  def derivatives(fn):
    def of_one(i, *args):
      """Differentiates by argument i; other arguments have no tangents."""

      def fn_of_one(x):
        return fn(*args[:i], x, *args[i + 1 :])

      tangent = jax.jvp(fn_of_one, [args[i]], [inputs(1)[i]])[1]
      return jax.grad(scalar(fn_of_one))(args[i]), tangent

    return jit_quickly(
      lambda *args: dict(
        linearized=linearized(fn)(*args),
        reverse_over_reverse=grad(grad(fn))(*args),
        forward_over_forward=forward(forward(fn))(*args),
        three_times=grad(forward(grad(fn)))(*args),
        of_one_argument=[of_one(i, *args) for i in range(3)],
        of_one_output=grad(lambda *a: fn(*a)[1:])(*args),
      )
    )

  close(derivatives(gated)(*inputs()), derivatives(dense)(*inputs()))


@pytest.mark.parametrize("batched", [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_vmap(batched):
  """Batches any operand, inside and outside of a gradient."""
  rows, matrices, sizes = batched
  is_batched = rows, matrices, matrices, sizes
  x, w, v = inputs(lead=(2,))
  stacked = x, w, v, np.stack([SHORT, np.int32([0, 4, 4])])
  args = [a if b else a[0] for a, b in zip(stacked, is_batched, strict=True)]
  axes = [0 if b else None for b in is_batched]

  @jit_quickly
  def of_all(*args):
    inner = jax.vmap(lambda *a: (gated(*a), grad(gated)(*a)), axes)(*args)
    return inner, grad(lambda *a: jax.vmap(gated, axes)(*a))(*args)

  inner, outer = of_all(*args)
  expected = of_examples(
    *(
      a if b else np.stack([a, a])
      for a, b in zip(args, is_batched, strict=True)
    )
  )
  close(inner, expected)
  for got, of_each, b in zip(outer, expected[1], is_batched[:3], strict=True):
    close(got, of_each if b else of_each.sum(0))


def test_arrays_that_xla_divides():
  """XLA partitions the op, and would reject an op with a side effect."""
  mesh = make_mesh({"ranks": 2})
  sharding = jax.NamedSharding(mesh, PartitionSpec("ranks"))
  stacked = inputs(lead=(2,))
  shards = [jax.device_put(x, sharding) for x in stacked]
  got = jit_quickly(jax.vmap(grad(gated)))(*shards)
  close(got, of_examples(*stacked)[1])


def test_sizes_beyond_the_rows_fail():
  errors = ValueError, jax.errors.JaxRuntimeError
  args = jnp.ones((4, 2)), jnp.ones((2, 2, 2)), jnp.int32([3, 2])
  with pytest.raises(errors, match="is 5, but there are 4 rows"):
    jax.block_until_ready(ep.grouped_matmul(*args))
