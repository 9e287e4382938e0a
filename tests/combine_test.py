# SPDX-License-Identifier: Apache-2.0
"""ep_combine, forward and backward, against the oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import assert_same, Case, large_case
from groups import E, layer, T
from ops import combine, everything, there_and_back
from routings import ROUTINGS

DTYPES = pytest.mark.parametrize(
  "dtype", [jnp.float32, jnp.bfloat16, jnp.float16], ids=lambda d: d.__name__
)


def combine_and_back(ops, g, *primals):
  return ops.combine(*primals), ops.combine_bwd(primals, g)


def check(case, dtype=jnp.float32):
  case.check(combine_and_back, case.tokens(dtype), case.rows(dtype))


def check_weighted(case, dtype=jnp.float32, weight_dtype=jnp.float32):
  case.check(
    combine_and_back,
    case.tokens(dtype),
    case.rows(dtype),
    case.row_weights(weight_dtype),
  )


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing(routing):
  check(Case(layer(), routing))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing_weighted(routing):
  """The gradient of a weight sums over H in an order that is left open."""
  check_weighted(Case(layer(), routing, whole=True))


@DTYPES
def test_dtypes(dtype):
  check(Case(layer(), "with_unused_choices"), dtype)


@DTYPES
def test_dtypes_weighted(dtype):
  check_weighted(Case(layer(), "with_unused_choices", whole=True), dtype)


@DTYPES
def test_weight_dtypes(dtype):
  """Converted explicitly; the gradient comes back in the weights' own."""
  case = Case(layer(), "with_unused_choices", whole=True)
  check_weighted(case, weight_dtype=dtype)


@DTYPES
def test_a_weighted_sum_is_rounded_as_the_contract_says(dtype):
  case = Case(layer(), "with_unused_choices")
  weights = np.random.default_rng(1).random(case.row_weights().shape)
  case.check(combine, case.rows(dtype), weights.astype(np.float32))


@pytest.mark.parametrize(
  "options",
  [
    dict(mesh="ep4", alignment=4),
    dict(mesh="dp2_ep2", alignment=4, top_k=1),
    dict(mesh="dp2_ep2", top_k=E),
    dict(mesh="dp4_ep1", alignment=8),
  ],
  ids=str,
)
def test_meshes_alignments_and_top_k(options):
  check(Case(layer(**options), "skewed"))


@pytest.mark.parametrize("lead", [(1,), (T - 2,), (1, 2, 2)], ids=str)
def test_leading_dims_of_tokens(lead):
  check(Case(layer(), lead=lead))


@pytest.mark.parametrize("weighted", [False, True])
def test_rows_that_hold_no_token_are_never_read(weighted):
  """Padding and tail may hold NaN: an expert computes what it likes there."""
  case = Case(layer(alignment=4), "skewed")
  ones = np.ones_like(case.weights())
  _, owned = case.oracle.dispatch(case.tokens(), ones)
  nan = np.where(owned, 0, np.nan).astype(np.float32)
  rows = case.rows() + nan[..., None]
  case.check(combine, rows, *[case.row_weights() + nan] * weighted)


@DTYPES
@pytest.mark.parametrize("routing", ROUTINGS)
def test_dispatch_then_combine_is_the_identity(routing, dtype):
  """With weights that sum to one over the choices that a token uses."""
  case = Case(layer(), routing, whole=True)
  used = case.topk_idx >= 0
  last = used & (used[:, ::-1].cumsum(-1)[:, ::-1] == 1)
  halves = np.where(used, 0.5 ** used.cumsum(-1), 0)
  weights = np.where(last, 2 * halves, halves).astype(np.float32)
  tokens = case.tokens(dtype)
  expected = np.where(used.any(-1, keepdims=True), tokens, 0).astype(dtype)
  assert_same(case.run(there_and_back, tokens, weights), expected)


def expert_sum(ops, tokens, weights):
  recv, recv_weights = ops.dispatch(tokens, weights)
  return ops.combine(recv * recv, recv_weights)


def grad_of_expert_sum(ops, tokens, weights, g):
  return jax.vjp(lambda *x: expert_sum(ops, *x), tokens, weights)[1](g)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_gradient_through_both(routing):
  case = Case(layer(), routing, whole=True)
  case.check(grad_of_expert_sum, case.tokens(), case.weights(), case.tokens())


@DTYPES
@pytest.mark.parametrize(
  "options, hidden",
  [
    (dict(mesh="ep4", top_k=1), 7),
    (dict(mesh="dp2_ep2", alignment=4), 6),
    (dict(mesh="dp4_ep1", top_k=1), 1),
  ],
  ids=str,
)
def test_special_values(options, hidden, dtype):
  """Zeros have signs, sums flush denormals, and moved rows keep every bit."""
  case = Case(
    layer(**options), "with_unused_choices", hidden=hidden, specials=True
  )
  case.check(everything, *case.inputs(dtype))


def combine_both(ops, rows, weights):
  return ops.combine(rows), ops.combine(rows, weights)


@DTYPES
def test_sums_start_at_plus_zero_and_flush(dtype):
  """The numbers are written down here, and not taken from the oracle."""
  case = Case(layer(top_k=1))
  tiny = float(jnp.finfo(dtype).smallest_subnormal)
  # A subnormal float16 is a normal float32, in which sums are taken.
  kept = tiny if dtype == jnp.float16 else 0.0
  columns = np.array([0.0, -0.0, tiny, -tiny, 1.0, -1.0, 0.0], dtype)
  sums = np.array([0.0, 0.0, kept, -kept or 0.0, 1.0, -1.0, 0.0], dtype)
  rows = np.broadcast_to(columns, case.rows().shape)
  weights = np.ones_like(case.row_weights())
  wanted = np.broadcast_to(sums, case.tokens().shape)
  assert_same(case.run(combine_both, rows, weights), (wanted, wanted))


@DTYPES
def test_large(dtype):
  case = large_case("skewed")
  check(case, dtype)
  case.check(combine, case.rows(dtype), np.sqrt(case.row_weights()))


def test_each_weight_has_a_gradient_of_its_own():
  """The gradient of weight (t, k) is that of the slot it was sent to."""
  case = Case(layer())
  _, g_weights = case.oracle.dispatch_bwd(
    (case.tokens(), case.weights()), (case.rows(), case.row_weights())
  )
  assert np.unique(g_weights).size == g_weights.size
