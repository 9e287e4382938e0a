# SPDX-License-Identifier: Apache-2.0
"""Rows beyond a rank's capacity are an error on all ranks, or are dropped."""

import numpy as np
import pytest

from cases import Case
from conftest import assert_shards_equal
from groups import layer
from op_functions import everything, round_trip, sizes


def full_layer(overflow, capacity, **options):
  return layer(overflow=overflow, recv_capacity_per_rank=capacity, **options)


def needed_rows(case):
  """Returns the most rows that any rank would receive."""
  return int(case.oracle.sizes().total_recv_tokens.max())


def test_an_error_on_every_rank_after_which_the_group_works():
  """If only one rank overflows, all ranks report needed and given rows."""
  case = Case(full_layer("error", 8, name="narrow"), "to_one_expert")
  assert needed_rows(case) == 20
  words = ["ep_prepare", '"narrow"', "20", "8", "drop"]
  case.check_error(words, round_trip, case.tokens(), case.weights())
  fits = Case(case.layer, np.full_like(case.topk_idx, -1))
  fits.check(round_trip, fits.tokens(), fits.weights())


@pytest.mark.parametrize("overflow, alignment", [("error", 4), ("drop", 1)])
def test_a_capacity_that_just_suffices(overflow, alignment):
  wanted = needed_rows(Case(layer(alignment=alignment), "skewed"))
  config = full_layer(overflow, wanted, alignment=alignment)
  case = Case(config, "skewed", whole=True)
  case.check(everything, *case.inputs())


def test_one_row_too_few():
  wanted = needed_rows(Case(layer(), "skewed"))
  case = Case(full_layer("error", wanted - 1), "skewed")
  case.check_error([str(wanted), str(wanted - 1)], sizes)


@pytest.mark.parametrize(
  "mesh, alignment, capacity",
  [("dp2_ep2", 1, 11), ("ep4", 4, 8)],
)
@pytest.mark.parametrize("routing", ["skewed", "to_one_expert", "idle"])
def test_drop(mesh, routing, alignment, capacity):
  config = full_layer("drop", capacity, mesh=mesh, alignment=alignment)
  case = Case(config, routing, whole=True)
  case.check(everything, *case.inputs())


def test_dropped_rows_add_nothing_and_have_no_gradient():
  """The results hold ones for kept rows only; no oracle is involved."""
  case = Case(full_layer("drop", 8), "to_one_expert")
  ones = np.ones_like(case.weights())
  tokens = np.ones_like(case.tokens())

  def kept(ops, tokens, weights):
    recv, recv_weights = ops.dispatch(tokens, weights)
    back = ops.dispatch_bwd((tokens, weights), (recv, recv_weights))
    return ops.combine(recv, recv_weights), *back

  out, g_tokens, g_weights = case.run(kept, tokens, ones)
  # The expert's 20 tokens come in order, and 8 fit.
  token = np.arange(20)[:, None]
  for array, expected in [
    (out, token < 8),
    (g_tokens, token < 8),
    (g_weights, (token < 8) & (case.topk_idx >= 0)),
  ]:
    for shard in array.addressable_shards:
      want = np.broadcast_to(expected, array.shape)[shard.index]
      np.testing.assert_array_equal(np.asarray(shard.data), want)


def test_the_counts_of_a_step_with_drops():
  """All of 20 tokens choose expert 6, and 8 fit; no oracle is involved."""
  case = Case(full_layer("drop", 8, alignment=4), "to_one_expert")
  got = case.run(sizes)
  chosen = np.arange(8).reshape(4, 2) == 6
  kept = (case.topk_idx >= 0) & (np.arange(20)[:, None] < 8)
  for actual, expected in [
    (got.total_recv_tokens, 20 * chosen[:, :1]),
    (got.max_recv_tokens, np.full((4, 1), 20)),
    (got.token_counts, 8 * chosen),
    (got.dropped_counts, 12 * chosen),
    (got.kept, kept),
  ]:
    assert_shards_equal(actual, expected.astype(actual.dtype))
