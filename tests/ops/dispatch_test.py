# SPDX-License-Identifier: Apache-2.0
"""Every op by itself gives the oracle's results and gradients.

rules_test composes dispatch and combine under drawn options. Here each op gets
separate inputs, and every array has special values.
"""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from cases import assert_same, Case
from conftest import make_mesh
import ep
from ep._src.ops import reference
from ep.testing._routings import ROUTINGS
from groups import bootstrap, E, H, layer, of_one_process
from op_functions import everything, round_trip


@pytest.mark.parametrize(
  "options, hidden, dtype",
  [
    (dict(mesh="ep4", top_k=1), 7, jnp.float32),
    (dict(mesh="dp2_ep2", alignment=4, top_k=E), 6, jnp.bfloat16),
    (dict(mesh="dp4_ep1", alignment=8), 1, jnp.float16),
  ],
  ids=str,
)
def test_special_values(options, hidden, dtype):
  """Zeros keep signs, sums flush subnormals, and copied rows keep every bit."""
  config = layer(**options)
  for routing in "with_unused_choices", "skewed":
    case = Case(config, routing, hidden=hidden, specials=True)
    case.check(everything, *case.inputs(dtype))


@pytest.mark.parametrize(
  "dtype, weight_dtype",
  [(jnp.bfloat16, jnp.float16), (jnp.float16, jnp.bfloat16)],
)
def test_dtypes_of_weights(dtype, weight_dtype):
  """Ops convert weights to float32, and their gradients back."""

  def ops_and_back(ops, tokens, weights, rows, row_weights, g_weights):
    primals = tokens, weights
    return (
      ops.dispatch(*primals),
      ops.dispatch_bwd(primals, (rows, g_weights)),
      ops.combine(rows, row_weights),
      ops.combine_bwd((rows, row_weights), tokens),
    )

  # The gradient of a row's weight is a sum of any order, so numbers are whole.
  case = Case(layer(), "with_unused_choices", whole=True)
  tokens, rows = case.tokens(dtype), case.rows(dtype)
  weights = case.weights(weight_dtype), case.row_weights(weight_dtype)
  g_weights = case.row_weights()
  case.check(ops_and_back, tokens, weights[0], rows, weights[1], g_weights)


@of_one_process
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_sums_start_at_plus_zero_and_flush(dtype):
  """A sum starts at +0.0, and subnormal float32 numbers count as zero.

  The test states the expected numbers; it does not ask the oracle.
  """

  def combine_both(ops, rows, weights):
    return ops.combine(rows), ops.combine(rows, weights)

  case = Case(layer(top_k=1))
  tiny = float(jnp.finfo(dtype).smallest_subnormal)
  # Sums are in float32, where a subnormal float16 is a normal number.
  kept = tiny if dtype == jnp.float16 else 0.0
  columns = np.array([0.0, -0.0, tiny, -tiny, 1.0, -1.0, 0.0], dtype)
  sums = np.array([0.0, 0.0, kept, -kept or 0.0, 1.0, -1.0, 0.0], dtype)
  rows = np.broadcast_to(columns, case.rows().shape)
  weights = np.ones_like(case.row_weights())
  wanted = np.broadcast_to(sums, case.tokens().shape)
  assert_same(case.run(combine_both, rows, weights), (wanted, wanted))


@of_one_process
def test_bits_do_not_depend_on_the_number_of_ranks():
  """On 4 ranks, 5 experts have the slots 01 23 4- --; on 3 ranks, 01 23 4-."""
  rng = np.random.default_rng(0)
  tokens = rng.standard_normal((12, H)).astype(np.float32)
  topk_idx = ROUTINGS["uniform"](rng, (12, 3), 5)
  weights = rng.random((12, 3)).astype(np.float32)
  outs = []
  for ranks in 1, 3, 4:
    sizes = dict(num_experts=5, max_tokens_per_rank=12)
    with bootstrap(make_mesh({"ep": ranks}), **sizes) as group:
      case = Case(ep.EpLayerConfig(group), topk_idx, lead=(12 // ranks,))
      outs.append(np.asarray(case.run(round_trip, tokens, weights)))
      case.check_round_trip()
  for out in outs[1:]:
    np.testing.assert_array_equal(out, outs[0])


# --- The rounding of the reference --------------------------------------------


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
