# SPDX-License-Identifier: Apache-2.0
"""With segments, the bits of results do not depend on where rows lie.

The same rows of an expert lie in buffers of other capacities, at other places,
among other experts, and in as many buffers as there are domains.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ep._src.matmul import grouped_matmul as gm
from ep._src.native import ffi

E, F, G, S = 3, 72, 136, 4
COUNTS = np.array([[70, 3, 0, 129], [0, 0, 0, 0], [1, 64, 100, 17]])


def _data(dtype):
  """Returns rows and cotangents of each expert and segment, and matrices."""
  rng = np.random.default_rng(0)

  def draw(*shape):
    return rng.normal(size=shape).astype(dtype)

  rows = [[draw(n, F) for n in counts] for counts in COUNTS]
  cts = [[draw(n, G) for n in counts] for counts in COUNTS]
  return rows, cts, draw(E, F, G)


def _program():
  """Returns a program that computes out, dX and dW."""

  @jax.jit
  def run(x, w, g, sizes, counts):
    def fn(x, w):
      return gm.grouped_matmuls(x, [w], sizes, segments=counts)[0]

    out, vjp = jax.vjp(fn, x, w)
    return out, *vjp(g)

  return run


def _layer(run, data, experts, segments, capacity, alignment=1):
  """Returns out, dX and dW of a buffer with these experts and segments.

  The rows of out and dX are lists by expert and segment.
  """
  rows, cts, matrices = data
  counts = COUNTS[experts][:, segments]
  sizes = -(-counts.sum(1) // alignment) * alignment
  x = np.full((capacity, F), np.nan, matrices.dtype)
  g = np.full((capacity, G), np.nan, matrices.dtype)
  places = {}
  for start, e in zip(np.cumsum(sizes) - sizes, experts, strict=True):
    x[start : start + sizes[experts.index(e)]] = 0
    g[start : start + sizes[experts.index(e)]] = 0
    for s in segments:
      n = COUNTS[e, s]
      places[e, s] = slice(start, start + n)
      x[start : start + n], g[start : start + n] = rows[e][s], cts[e][s]
      start += n
  arrays = x, matrices[np.array(experts)], g
  out, dx, dw = map(np.asarray, run(*arrays, np.int32(sizes), np.int32(counts)))
  by_segment = {k: (out[p], dx[p]) for k, p in places.items()}
  return by_segment, dict(zip(experts, dw, strict=True))


def _assert_same(actual, expected):
  jax.tree.map(
    lambda a, b: np.testing.assert_array_equal(
      a.view(f"u{a.dtype.itemsize}"), b.view(f"u{b.dtype.itemsize}")
    ),
    actual,
    expected,
  )


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bits_do_not_depend_on_the_layout(dtype, is_native, monkeypatch):
  """Neither of the library's results nor of those that do without it."""
  if not is_native:
    monkeypatch.setattr(ffi, "is_native", lambda ctx: False)
  layer = functools.partial(_layer, _program(), _data(dtype))
  every = list(range(S))
  rows, sums = layer([0, 1, 2], every, 1000)
  used = int(COUNTS.sum())
  for experts, capacity, alignment in [
    ([0, 1, 2], used, 1),
    ([2, 0, 1], 900, 16),
    ([2], int(COUNTS[2].sum()), 1),
  ]:
    got, got_sums = layer(experts, every, capacity, alignment)
    _assert_same(got, {k: rows[k] for k in got})
    _assert_same(got_sums, {e: sums[e] for e in got_sums})
  # Two domains, which have half of the segments each.
  halves = [layer([0, 1, 2], s, 500) for s in ([0, 1], [2, 3])]
  _assert_same({**halves[0][0], **halves[1][0]}, rows)
  if dtype == jnp.float32:  # bfloat16 sums are rounded before they are added
    total = {e: halves[0][1][e] + halves[1][1][e] for e in sums}
    _assert_same(total, sums)
  # Four domains; the first has fewer rows than a tile.
  quarters = [layer([0, 2], [s], 260)[0] for s in every]
  for got in quarters:
    _assert_same(got, {k: rows[k] for k in got})


def test_values_are_those_without_segments():
  rows, cts, _matrices = _data(np.float64)
  _, sums = _layer(
    _program(), _data(np.float32), [0, 1, 2], list(range(S)), 400
  )
  for e in range(E):
    x, g = np.concatenate(rows[e]), np.concatenate(cts[e])
    np.testing.assert_allclose(sums[e], x.T @ g, 1e-4, 1e-4)


def test_fewer_rows_than_a_tile():
  layer = functools.partial(_layer, _program(), _data(np.float32))
  _assert_same(layer([2], [0], 1), layer([2], [0], 300))
