# SPDX-License-Identifier: Apache-2.0
"""Grouped matmuls and their derivatives equal a loop over the segments."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ep._src.matmul import by_ragged_dot, by_static_tiles, by_tiles
from ep._src.matmul import grouped_matmul as gm
from ep._src.native import ffi

C, F, G = 300, 5, 7

# Sizes of expert segments: within a tile, whole tiles, across tiles, empty, and
# C in total. Cases with equally many segments share a program.
SIZES = {
  "one": [41, 0, 0, 0, 0, 0],
  "empty": [0, 33, 0, 0, 64, 0],
  "none": [0, 0, 0, 0, 0, 0],
  "tiny": [1, 2, 3, 1, 1, 2],
  "tiles": [128, 0, 128, 0, 0, 0],
  "full": [0, 150, 17, 0, 0, 133],
}
MANY = [3] * 100
SEGMENTS = [[0, 0], [100, 50], [0, 17], [0, 0], [0, 0], [130, 0]]  # of "full"

IMPLEMENTATIONS = {
  "tiles": by_tiles,
  "static": by_static_tiles,
  "ragged": by_ragged_dot,
}


def _slabs(sizes):
  ends = np.cumsum(sizes)
  return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _matmul(rows, matrices, sizes):
  out = np.zeros((rows.shape[0], matrices.shape[2]))
  for matrix, slab in zip(matrices, _slabs(sizes), strict=True):
    out[slab] = rows[slab] @ matrix
  return out


def _outer(left, right, sizes):
  return np.stack([left[slab].T @ right[slab] for slab in _slabs(sizes)])


def _inputs(sizes, dtype=jnp.float32):
  rng = np.random.default_rng(0)
  shapes = (C, F), (len(sizes), F, G), (C, G)
  rows, matrices, g = (np.asarray(rng.normal(size=s), dtype) for s in shapes)
  used = np.arange(C)[:, None] < sum(sizes)
  rows, g = (np.where(used, x, np.array(np.nan, dtype)) for x in (rows, g))
  return rows, matrices, g


@functools.cache
def _program(implementation):
  ops = IMPLEMENTATIONS[implementation]

  @jax.jit
  def call(sizes, rows, matrices, g):
    whole = jnp.zeros((*sizes.shape, 0), jnp.int32)
    return (
      ops.expand(sizes, whole, rows, [matrices], "zero"),
      ops.contract(sizes, whole, [g], [matrices], "zero"),
      ops.outer(sizes, whole, rows, [g], jnp.float32),
    )

  return call


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
  "sizes, dtype",
  [
    (MANY, jnp.float32),
    *itertools.product(SIZES.values(), [jnp.float32, jnp.bfloat16]),
  ],
)
def test_the_operations_beside_unused_nans(sizes, dtype, implementation):
  """Rows are float32 or bfloat16; matrices and their gradients are float32."""
  rows, _, g = _inputs(sizes, dtype)
  _, matrices, _ = _inputs(sizes)

  call = _program(implementation)
  (out,), back, (sums,) = call(jnp.int32(sizes), rows, matrices, g)
  assert (out.dtype, back.dtype, sums.dtype) == (dtype, dtype, jnp.float32)
  rows, g, rounded = map(np.float64, (rows, g, matrices.astype(dtype)))
  eps = max(float(jnp.finfo(dtype).eps) / 2, 1e-5)
  for actual, expected in [
    (out, _matmul(rows, rounded, sizes)),
    (back, _matmul(g, rounded.swapaxes(1, 2), sizes)),
  ]:
    np.testing.assert_allclose(np.float64(actual), expected, 1.01 * eps, 2e-5)
  np.testing.assert_allclose(sums, _outer(rows, g, sizes), 1e-4, 1e-4)


@pytest.fixture(params=["native", "tiles"])
def implementation_on_cpu(request, monkeypatch):
  if request.param == "tiles":
    monkeypatch.setattr(ffi, "is_native", lambda ctx: False)
  return request.param


def test_the_library_computes_products_and_gradients(implementation_on_cpu):
  rows, matrices, g = _inputs(SIZES["full"])

  def both(x, w, g):
    fn = functools.partial(
      gm.grouped_matmul, group_sizes=np.int32(SIZES["full"])
    )
    out, vjp = jax.vjp(fn, x, w)
    return out, vjp(g)

  text = jax.jit(both).lower(rows, matrices, g).as_text()
  expected = {"native": 3, "tiles": 0}[implementation_on_cpu]
  assert text.count("@ep_grouped_matmul(") == expected


@jax.jit
def _gradients(rows, matrices, sizes, g):
  return jax.vjp(lambda x, w: gm.grouped_matmul(x, w, sizes), rows, matrices)[
    1
  ](g)


@pytest.mark.parametrize("sizes", [*SIZES.values(), MANY])
def test_gradients_beside_unused_nans(sizes):
  rows, matrices, g = _inputs(sizes)
  g_rows, g_matrices = _gradients(rows, matrices, jnp.int32(sizes), g)
  expected = _matmul(g, matrices.swapaxes(1, 2), sizes)
  np.testing.assert_allclose(g_rows, expected, 1e-5, 1e-5)
  np.testing.assert_allclose(g_matrices, _outer(rows, g, sizes), 1e-4, 1e-4)


@pytest.mark.parametrize(
  "implementation_on_cpu, dtype, matrix_dtype, segments",
  [
    ("native", jnp.float16, jnp.float16, None),
    ("tiles", jnp.float16, jnp.float16, None),
    ("native", jnp.bfloat16, jnp.bfloat16, None),
    ("native", jnp.bfloat16, jnp.float32, None),
    ("native", jnp.bfloat16, jnp.float32, SEGMENTS),
    ("tiles", jnp.bfloat16, jnp.float32, SEGMENTS),
  ],
  indirect=["implementation_on_cpu"],
)
@pytest.mark.usefixtures("implementation_on_cpu")
def test_low_precision_is_summed_in_float32_and_rounded_once(
  dtype, matrix_dtype, segments
):
  """The op rounds matrices to the dtype of rows, but not their gradients."""
  sizes = SIZES["full"]
  rows, _, g = _inputs(sizes, dtype)
  _, matrices, _ = _inputs(sizes, matrix_dtype)
  rows[297:300] = 0  # These rows are padding after the segments.
  counts = None if segments is None else jnp.int32(segments)

  def product(x, w):
    return gm.grouped_matmuls(x, [w], jnp.int32(sizes), segments=counts)[0]

  @jax.jit
  def both(x, w, g):
    out, vjp = jax.vjp(product, x, w)
    return out, *vjp(g)

  *results, g_matrices = both(rows, matrices, g)
  rows, rounded, g = map(np.float64, (rows, matrices.astype(dtype), g))
  expected = (
    _matmul(rows, rounded, sizes),
    _matmul(g, rounded.swapaxes(1, 2), sizes),
  )
  tolerance = 1.01 * float(jnp.finfo(dtype).eps) / 2, 2e-5
  for a, b in zip(results, expected, strict=True):
    assert a.dtype == dtype
    np.testing.assert_allclose(np.float64(a), b, *tolerance)
  assert g_matrices.dtype == matrix_dtype
  if matrix_dtype == jnp.float32:
    tolerance = 1e-4, 1e-4
  expected = _outer(rows, g, sizes)
  np.testing.assert_allclose(np.float64(g_matrices), expected, *tolerance)


def test_work_is_linear_in_the_rows_used():
  steps = []

  def step(tile, out):
    jax.debug.callback(lambda slab: steps.append(int(slab)), tile.slab)
    return out

  for sizes in ([128, 0, 0, 1], [0, 0, 0, 0]):
    by_tiles._Tiles(0, jnp.int32(sizes), 1024).fold(step, 0)
  jax.effects_barrier()
  assert steps == [0, 0, 3]  # The expert segment of each tile.


def test_fewer_rows_than_a_block():
  rows, matrices = jnp.ones((3, F)), jnp.ones((2, F, G))
  out = gm.grouped_matmul(rows, matrices, jnp.int32([1, 1]))
  np.testing.assert_array_equal(out, [[F] * G, [F] * G, [0] * G])


_BAD_SHAPES = ValueError, r"expected \[C, F\], \[L, F, G\]"


@pytest.mark.parametrize(
  ("shapes", "dtypes", "expected"),
  [
    ([(3, 5), (2, 4, 7), (2,)], "ffi", _BAD_SHAPES),
    ([(3, 5), (2, 5, 7), (3,)], "ffi", _BAD_SHAPES),
    ([(3, 5), (5, 7), (2,)], "ffi", _BAD_SHAPES),
    ([(1, 3, 5), (2, 5, 7), (2,)], "ffi", _BAD_SHAPES),
    ([(3, 5), (1, 5, 7), (1,)], "efi", (ValueError, "convert one")),
    ([(2, 4), (1, 4, 3), (1,)], "fff", (TypeError, "group_sizes is float32")),
  ],
)
def test_wrong_arguments_are_refused(shapes, dtypes, expected):
  error, words = expected
  rows, matrices, sizes = map(jnp.zeros, shapes, dtypes)
  with pytest.raises(error, match=words):
    gm.grouped_matmul(rows, matrices, sizes)


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
  with pytest.raises(ValueError, match="there are no rows; pass zeros"):
    gm.grouped_matmul(jnp.ones((0, 4)), jnp.ones((1, 4, 3)), np.array([1]))


def test_without_jit():
  with jax.disable_jit():
    out = gm.grouped_matmul(
      jnp.ones((2, 4)), jnp.ones((1, 4, 3)), np.array([2])
    )
  np.testing.assert_array_equal(out, np.full((2, 3), 4))
