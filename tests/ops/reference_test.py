# SPDX-License-Identifier: Apache-2.0
"""The reference has the rounding and the derivatives of the contract.

tests/repository/docs_test.py computes the worked example of docs/semantics.md.
The rules of rules_test compare the routing of each backend with the reference.
"""

import functools

import jax
import ml_dtypes
import numpy as np
import pytest

from ep._src.ops import reference

P, T, K, E, H = 3, 5, 3, 11, 7  # the last rank has an empty slot
L = -(-E // P)


@pytest.fixture
def rng():
  return np.random.default_rng(0)


def test_backward_is_the_transpose_of_forward(rng):
  """On whole numbers, sums in float32 are exact in any order."""
  capacity = 8  # too small for all rows
  idx = rng.random((P, T, E)).argsort(-1)[..., :K].astype(np.int32)
  idx[rng.random(idx.shape) < 0.25] = -1
  routing = reference.prepare(
    idx, num_experts=E, capacity=capacity, alignment=4
  )

  def whole(*shape):
    return rng.integers(-8, 9, shape).astype(np.float32)

  tokens, weights = whole(P, T, H), whole(P, T, K)
  g_rows, g_weights = whole(P, capacity, H), whole(P, capacity)
  g_out = whole(P, T, H)

  @jax.jit
  def transposes(routing, g_recv, g_out):
    _, dispatch_bwd = jax.vjp(
      lambda *x: reference.dispatch(routing, *x, capacity=capacity),
      tokens,
      weights,
    )
    _, combine_bwd = jax.vjp(
      functools.partial(reference.combine, routing), g_rows
    )
    return *dispatch_bwd(g_recv), *combine_bwd(g_out)

  actual = (
    *reference.dispatch_bwd(routing, g_rows, g_weights),
    reference.combine_bwd(routing, g_out, capacity=capacity),
  )
  expected = transposes(routing, (g_rows, g_weights), g_out)
  for a, e in zip(actual, expected, strict=True):
    np.testing.assert_array_equal(a, e)


def test_a_sum_is_not_rounded_between_its_terms():
  """A sum of 1 + eps/2 + eps/2 keeps eps only if bfloat16 is rounded once."""
  eps = float(ml_dtypes.finfo(ml_dtypes.bfloat16).eps)
  routing = reference.prepare(
    np.arange(3, dtype=np.int32)[None, None], num_experts=3, capacity=3
  )
  rows = np.asarray([[[1.0], [eps / 2], [eps / 2]]], ml_dtypes.bfloat16)
  out = reference.combine(routing, rows)
  assert float(out[0, 0, 0]) == 1 + eps


def test_a_product_is_rounded_before_it_is_added():
  """An FMA would keep the eps**2 that rounding the product removes."""
  eps = float(np.finfo(np.float32).eps)
  routing = reference.prepare(
    np.arange(2, dtype=np.int32)[None, None], num_experts=2, capacity=2
  )
  rows = np.asarray([[[-1 - 2 * eps], [1 + eps]]], np.float32)
  weights = np.asarray([[1, 1 + eps]], np.float32)
  out = reference.combine(routing, rows, weights)
  assert float(out[0, 0, 0]) == 0.0
