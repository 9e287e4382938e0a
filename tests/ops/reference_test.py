# SPDX-License-Identifier: Apache-2.0
"""The reference agrees with simple loops over single rows.

`RowByRow` appends rows to lists and pads the lists. The vectorized reference
uses another method.
"""

import functools

import jax
import ml_dtypes
import numpy as np
import pytest

from ep._src.ops import reference
from layer_steps import assert_same_bits

P, T, K, E, H = 3, 5, 3, 11, 7  # the last rank has an empty slot
L = -(-E // P)


class RowByRow:
  """Computes the contract row by row."""

  def __init__(self, topk_idx, alignment, capacity):
    self.capacity = capacity
    self.group_sizes, self.token_counts, self.total = [], [], []
    self.dropped_counts = []
    self.source = {}  # (rank, slot) -> (source rank, token, choice)
    for rank in range(P):
      segments = [self._segment(topk_idx, rank * L + j) for j in range(L)]
      rows = []
      for segment in segments:
        padding = [None] * (-len(segment) % alignment)
        start = len(rows)
        rows += segment + padding
        kept = rows[start:capacity]
        self.group_sizes.append(len(kept))
        self.token_counts.append(sum(r is not None for r in kept))
        self.dropped_counts.append(len(segment) - self.token_counts[-1])
      self.total.append(len(rows))
      for slot, source in enumerate(rows[:capacity]):
        if source is not None:
          self.source[rank, slot] = source

  @staticmethod
  def _segment(topk_idx, expert):
    return [
      (p, t, k)
      for p in range(P)
      for t in range(T)
      for k in range(K)
      if topk_idx[p, t, k] == expert
    ]

  def scatter(self, x):
    """Copies each choice of `x [P, T, K, ...]` to its row of `[P, C, ...]`."""
    out = np.zeros((P, self.capacity, *x.shape[3:]), x.dtype)
    for place, choice in self.source.items():
      out[place] = x[choice]
    return out

  def gather(self, rows):
    """Copies `rows [P, C, ...]` to their choices of `[P, T, K, ...]`."""
    out = np.zeros((P, T, K, *rows.shape[2:]), rows.dtype)
    for place, choice in self.source.items():
      out[choice] = rows[place]
    return out

  def sum_by_token(self, rows, weights):
    """Sums `rows [P, C, H]` to `[P, T, H]`, in float32, and rounds once."""
    out = np.zeros((P, T, H), np.float32)
    for k in range(K):  # ascending k is part of the contract
      for (rank, slot), (p, t, choice) in self.source.items():
        if choice == k:
          row = rows[rank, slot].astype(np.float32)
          out[p, t] += row * weights[rank, slot]
    return out.astype(rows.dtype)


@pytest.fixture
def rng():
  return np.random.default_rng(0)


def choices(rng):
  """Draws distinct experts for each token; a quarter of them are unused."""
  idx = rng.random((P, T, E)).argsort(-1)[..., :K].astype(np.int32)
  idx[rng.random(idx.shape) < 0.25] = -1
  return idx


LAYOUTS = pytest.mark.parametrize(
  "alignment, capacity", [(1, 45), (1, 6), (4, 8)]
)
DTYPES = pytest.mark.parametrize(
  "dtype", [np.float32, np.float16, ml_dtypes.bfloat16]
)


def routings(rng, alignment, capacity):
  idx = choices(rng)
  routing = reference.prepare(
    idx, num_experts=E, capacity=capacity, alignment=alignment
  )
  return routing, RowByRow(idx, alignment, capacity)


def normal(rng, *shape, dtype=np.float32):
  return rng.standard_normal(shape).astype(dtype)


@LAYOUTS
def test_prepare(rng, alignment, capacity):
  routing, by_row = routings(rng, alignment, capacity)
  rank, slot = np.full((2, P, T, K), -1, np.int32)
  for place, choice in by_row.source.items():
    rank[choice], slot[choice] = place
  assert_same_bits(routing.rank, rank)
  assert_same_bits(routing.slot, slot)
  assert_same_bits(routing.kept, slot >= 0)
  for name, shape, expected in [
    ("group_sizes", (P, L), by_row.group_sizes),
    ("token_counts", (P, L), by_row.token_counts),
    ("total_recv_tokens", (P, 1), by_row.total),
    ("dropped_counts", (P, L), by_row.dropped_counts),
    ("max_recv_tokens", (P, 1), [max(by_row.total)] * P),
  ]:
    expected = np.reshape(expected, shape).astype(np.int32)
    assert_same_bits(getattr(routing, name), expected)


@DTYPES
@LAYOUTS
def test_ops(rng, alignment, capacity, dtype):
  routing, by_row = routings(rng, alignment, capacity)
  tokens = normal(rng, P, T, H, dtype=dtype)
  weights = normal(rng, P, T, K)
  recv, recv_weights = reference.dispatch(
    routing, tokens, weights, capacity=capacity
  )
  per_choice = np.repeat(tokens[:, :, None], K, axis=2)
  assert_same_bits(recv, by_row.scatter(per_choice))
  assert_same_bits(recv_weights, by_row.scatter(weights))

  rows = normal(rng, P, capacity, H, dtype=dtype)
  row_weights = normal(rng, P, capacity)
  sums = by_row.sum_by_token(rows, np.ones_like(row_weights))
  weighted = by_row.sum_by_token(rows, row_weights)
  assert_same_bits(reference.combine(routing, rows), sums)
  assert_same_bits(reference.combine(routing, rows, row_weights), weighted)
  g_tokens, g_weights = reference.dispatch_bwd(routing, rows, row_weights)
  assert_same_bits(g_tokens, sums)
  assert_same_bits(g_weights, by_row.gather(row_weights))


def test_backward_is_the_transpose_of_forward(rng):
  """On whole numbers, sums in float32 are exact in any order."""
  capacity = 8  # too small for all rows
  routing, _ = routings(rng, 4, capacity)

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
