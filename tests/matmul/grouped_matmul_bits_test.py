# SPDX-License-Identifier: Apache-2.0
"""With expert segments, a row's position does not change the bits of results.

The tests move the same rows of an expert to buffers of other capacities, to
other positions, beside other experts, and to one buffer per domain.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ep._src.matmul import grouped_matmul as gm
from layer_steps import assert_same_bits

E, F, G, S = 3, 72, 136, 4
COUNTS = np.array([[70, 3, 0, 129], [0, 0, 0, 0], [1, 64, 100, 17]])


def _data(dtype):
  """Returns rows and cotangents per expert and segment, and matrices."""
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
  """Computes out, dX and dW for a buffer with these experts and segments.

  out and dX are dicts by expert and segment.
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


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bits_do_not_depend_on_the_layout(dtype):
  data = _data(dtype)
  layer = functools.partial(_layer, _program(), data)
  every = list(range(S))
  rows, sums = layer([0, 1, 2], every, 1000)
  for experts, capacity, alignment in [
    ([2, 0, 1], 1000, 16),
    ([2], int(COUNTS[2].sum()), 1),
  ]:
    got, got_sums = layer(experts, every, capacity, alignment)
    assert_same_bits(got, {k: rows[k] for k in got})
    assert_same_bits(got_sums, {e: sums[e] for e in got_sums})
  # Four domains with one segment each. The last buffer below has one row.
  quarters, quarter_sums = zip(
    *(layer([0, 1, 2], [s], 260) for s in every), strict=True
  )
  for got in *quarters, layer([2], [0], 1)[0]:
    assert_same_bits(got, {k: rows[k] for k in got})
  if dtype == jnp.float32:  # bfloat16 rounds each domain's sums.
    for e in range(E):
      first, second, third, last = (of_domain[e] for of_domain in quarter_sums)
      assert_same_bits((first + second) + (third + last), sums[e])
      x, g = (np.concatenate(x[e]).astype(np.float64) for x in data[:2])
      np.testing.assert_allclose(sums[e], x.T @ g, 1e-4, 1e-4)
