# SPDX-License-Identifier: Apache-2.0
"""In checked mode, the op that receives a wrong array reports the mistake."""

import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import assert_same, Case, global_view
import ep
from ep._src.base import contexts
from groups import BACKEND, GPU, layer, of_one_process
from op_functions import combine, everything


@pytest.fixture(autouse=True)
def checked_mode():
  with ep.checked():
    yield


def rows_and_sizes(ops, tokens, narrow, weights, rows, g):
  return (
    ops.dispatch(tokens, weights),
    ops.dispatch(narrow, weights),
    ops.combine_bwd((rows,), g),
    ops.sizes(),
  )


@of_one_process
def test_an_unspecified_tail_is_nan():
  """Checked mode fills unused rows with NaN, and changes no expert segment."""
  case = Case(layer(alignment=4, tail="unspecified"), "skewed")
  tokens, narrow, g = map(case.tokens, (np.float32, jnp.bfloat16, np.float16))
  inputs = tokens, narrow, case.weights(), case.rows(np.float16), g
  *actual, _ = case.run(rows_and_sizes, *inputs)
  *expected, sizes = rows_and_sizes(case.oracle, *inputs)
  used = np.asarray(sizes.group_sizes).sum(1)
  assert (used < case.layer.capacity).all()
  for got, want in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
    for shard in got.addressable_shards:
      rank = shard.index[0].start or 0
      rows = np.asarray(shard.data)[0].astype(np.float32)
      wanted = np.asarray(want)[rank].astype(np.float32)
      np.testing.assert_array_equal(rows[: used[rank]], wanted[: used[rank]])
      assert np.isnan(rows[used[rank] :]).all()


def test_checked_mode_changes_no_good_result():
  case = Case(layer(alignment=4), "with_unused_choices")
  case.check(everything, *case.inputs())


@pytest.mark.parametrize(
  "value, dtype",
  [(np.nan, np.float32), (np.inf, jnp.bfloat16), (-np.inf, np.float16)],
)
def test_a_combine_that_is_not_finite(value, dtype):
  """All errors name the element; the host backend's also the expert's row."""
  case = Case(layer(name="moe_3"), "uniform")
  rows = case.rows(dtype)
  rows[1, :, 3] = value  # Tokens of every rank sum these rows.
  words = ["ep_combine", '"moe_3"', ", 3]", "is not finite"]
  if BACKEND is None and not GPU:
    words += ["nor is expert_out[", "] of rank 1", "topk_idx[", "step "]
  case.check_error(words, combine, rows)
  case.check(combine, case.rows(dtype))


def test_rows_that_no_token_sums_may_be_nan():
  case = Case(layer(name="moe_3"), "to_one_expert")
  rows = np.full_like(case.rows(), np.nan)
  rows[3] = case.rows()[3]  # The only chosen expert is on rank 3.
  case.check(combine, rows)


@of_one_process
def test_jit_traces_again_when_the_mode_changes():
  case = Case(layer())
  infinite = np.full_like(case.rows(), np.inf)
  case.check_error(["is not finite"], combine, infinite)
  with ep.checked(False):
    case.check(combine, infinite)
  case.check_error(["is not finite"], combine, infinite)


@of_one_process
@pytest.mark.parametrize("mode", [lambda f: f, jax.jit])
def test_jax_debug_nans_finds_a_nan_of_the_data(mode):
  """JAX finds the NaN of 0 * infinity in a sum.

  Checked mode is off, because it would raise first.
  """
  case = Case(layer())
  rows = np.full_like(case.rows(), np.inf)
  inputs = case.topk_idx, rows, np.zeros_like(case.row_weights())
  call = mode(global_view(case.layer, combine))
  with ep.checked(False), jax.debug_nans(True):
    with pytest.raises(FloatingPointError, match="nan"):
      call(*map(case.put, inputs))


def exchanges_and_back(ops, tokens, weights, rows):
  recv = ops.dispatch(tokens, weights)
  g = ops.dispatch_bwd((tokens, weights), recv)
  return recv, g, ops.combine_bwd((rows,), tokens)


@of_one_process
@pytest.mark.parametrize(
  "option", [jax.debug_nans, jax.debug_infs], ids=["nans", "infs"]
)
def test_the_tail_is_zero_under_a_debug_option(option):
  """Each call jits anew: JAX does not trace again when an option changes."""
  case = Case(layer(tail="unspecified", alignment=2), "one_token")
  inputs = case.tokens(), case.weights(), case.rows()
  call = jax.jit(global_view(case.layer, exchanges_and_back))
  with option(True):
    actual = call(*map(case.put, (case.topk_idx, *inputs)))
    assert_same(actual, exchanges_and_back(case.oracle, *inputs))


@of_one_process
@pytest.mark.parametrize("value, expected", [("1", True), ("0", False)])
def test_the_environment_turns_checked_mode_on(value, expected, monkeypatch):
  monkeypatch.setenv("EP_CHECKED", value)
  assert runpy.run_path(contexts.__file__)["is_checked"]() == expected
