# SPDX-License-Identifier: Apache-2.0
"""Checked mode finds a mistake where it is made."""

import runpy

import jax
import numpy as np
import pytest

from cases import assert_same, Case, global_view, local_view
import ep
from ep._src.base import checked
from groups import BACKEND, GPU, layer
from op_functions import combine, dispatch, everything, round_trip, sizes
from parameters import DTYPES


@pytest.fixture(autouse=True)
def checked_mode():
  with ep.checked():
    yield


def rows_and_sizes(ops, tokens, weights, rows, g):
  return (
    ops.dispatch(tokens, weights),
    ops.combine_bwd((rows,), g),
    ops.sizes(),
  )


@DTYPES
def test_an_unspecified_tail_is_nan(dtype):
  """The tail is NaN, and the slabs before it hold the usual numbers."""
  case = Case(layer(alignment=4, tail="unspecified"), "skewed")
  inputs = case.tokens(dtype), case.weights(), case.rows(dtype)
  inputs += (case.tokens(dtype),)
  actual = case.run(rows_and_sizes, *inputs)
  expected = rows_and_sizes(case.oracle, *inputs)
  used = np.asarray(expected[2][0]).sum(1)
  assert (used < case.layer.capacity).all()
  for got, want in zip(
    jax.tree.leaves(actual[:2]), jax.tree.leaves(expected[:2]), strict=True
  ):
    for shard in got.addressable_shards:
      rank = shard.index[0].start or 0
      rows = np.asarray(shard.data)[0].astype(np.float32)
      wanted = np.asarray(want)[rank].astype(np.float32)
      np.testing.assert_array_equal(rows[: used[rank]], wanted[: used[rank]])
      assert np.isnan(rows[used[rank] :]).all()


def test_good_results_are_the_same():
  case = Case(layer(alignment=4), "with_unused_choices")
  case.check(everything, *case.inputs())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@DTYPES
def test_a_combine_that_is_not_finite(value, dtype):
  """Each rank's error names the element; with "host", its source as well."""
  case = Case(layer(name="moe_3"), "uniform")
  rows = case.rows(dtype)
  rows[1, :, 3] = value  # These are rows of every rank's tokens.
  words = ["ep_combine", '"moe_3"', ", 3]", "is not finite"]
  if BACKEND is None and not GPU:
    words += ["nor is expert_out[", "] of rank 1", "topk_idx[", "step "]
  case.check_error(words, combine, rows)
  case.check(combine, case.rows(dtype))


def test_rows_that_nobody_sums_may_be_anything():
  case = Case(layer(), "to_one_expert")
  rows = np.full_like(case.rows(), np.nan)
  rows[3] = case.rows()[3]  # That expert is on rank 3.
  case.check(combine, rows)


@pytest.mark.skipif(
  jax.process_count() == 1, reason="one process has one program"
)
def test_ranks_of_other_configurations():
  """Checked mode finds a difference that shapes and sizes do not show."""
  last = jax.process_index() == jax.process_count() - 1
  case = Case(layer(name="moe_4" if last else "moe_3"))
  case.check_error(["ep_prepare", "disagree", "layer"], sizes)


def test_the_mode_is_a_part_of_jits_key():
  """JAX traces a function again when the mode is turned on or off."""
  case = Case(layer(tail="unspecified", alignment=2), "one_token")
  inputs = case.tokens(), case.weights()

  def has_nan():
    rows, _ = case.run(dispatch, *inputs)
    return any(np.isnan(s.data).any() for s in rows.addressable_shards)

  assert has_nan()
  with ep.checked(False):
    case.run(round_trip, *inputs)
  assert has_nan()


def exchanges_and_back(ops, tokens, weights, rows):
  recv = ops.dispatch(tokens, weights)
  g = ops.dispatch_bwd((tokens, weights), recv)
  return recv, g, ops.combine_bwd((rows,), tokens)


@pytest.mark.parametrize("view", [global_view, local_view])
def test_jax_debug_nans_finds_no_nan_of_ours(view):
  """JAX finds no NaN in anything that an op returns, tail included."""
  case = Case(layer(tail="unspecified", alignment=2), "one_token")
  inputs = case.tokens(), case.weights(), case.rows()
  call = jax.jit(view(case.layer, exchanges_and_back))
  with jax.debug_nans(True):
    actual = call(*map(case.put, (case.topk_idx, *inputs)))
    assert_same(actual, exchanges_and_back(case.oracle, *inputs))
  with jax.debug_infs(True):
    jax.block_until_ready(call(*map(case.put, (case.topk_idx, *inputs))))


@pytest.mark.parametrize(
  "mode, view", [(lambda f: f, global_view), (jax.jit, local_view)]
)
def test_jax_debug_nans_finds_a_nan_of_the_data(mode, view):
  """JAX finds the NaN of 0 * infinity in a sum.

  Checked mode would find it first, so it is off.
  """
  case = Case(layer())
  rows = np.full_like(case.rows(), np.inf)
  inputs = case.topk_idx, rows, np.zeros_like(case.row_weights())
  call = mode(view(case.layer, combine))
  with ep.checked(False), jax.debug_nans(True):
    with pytest.raises(FloatingPointError, match="nan"):
      call(*map(case.put, inputs))


@pytest.mark.parametrize("value, expected", [("1", True), ("0", False)])
def test_the_environment_turns_it_on(value, expected, monkeypatch):
  monkeypatch.setenv("EP_CHECKED", value)
  assert runpy.run_path(checked.__file__)["is_on"]() == expected
