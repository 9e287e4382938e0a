# SPDX-License-Identifier: Apache-2.0
"""ep_combine gives the oracle's results and gradients."""

import jax.numpy as jnp
import numpy as np
import pytest

from cases import assert_same, Case
from groups import layer, of_one_process
from op_functions import everything
from parameters import EVERY_ROUTING


def combine_and_back(ops, g, *primals):
  return ops.combine(*primals), ops.combine_bwd(primals, g)


def check(case, dtype=jnp.float32, weighted=False, weight_dtype=jnp.float32):
  """Checks combine and its gradients.

  A weighted case needs whole numbers: the gradient of a weight is a sum over H,
  and the contract does not fix the order of this sum. A dtype of 16 bits would
  round products of these numbers, but float32 does not.
  """
  inputs = [case.tokens(dtype), case.rows(dtype)]
  if weighted:
    inputs = [(x * 11).astype(dtype) for x in inputs]
  if weighted:
    inputs.append(case.row_weights(weight_dtype))
  case.check(combine_and_back, *inputs)


@pytest.mark.parametrize("weighted", [True, False])
@EVERY_ROUTING
def test_every_routing(routing, weighted):
  check(Case(layer(), routing, whole=weighted), weighted=weighted)


@pytest.mark.parametrize(
  "dtype, weight_dtype",
  [(jnp.bfloat16, jnp.float16), (jnp.float16, jnp.bfloat16)],
)
def test_dtypes(dtype, weight_dtype):
  """Combine converts weights to float32, and their gradients back."""
  case = Case(layer(), "with_unused_choices", whole=True)
  check(case, dtype, weighted=True, weight_dtype=weight_dtype)


def combine_both(ops, rows, weights):
  return ops.combine(rows), ops.combine(rows, weights)


def test_combine_reads_no_padding_and_no_tail():
  """An expert may write NaN into padding and unused rows."""
  case = Case(layer(alignment=4), "skewed")
  ones = np.ones_like(case.weights())
  _, owned = case.oracle.dispatch(case.tokens(), ones)
  nan = np.where(owned, 0, np.nan).astype(np.float32)
  case.check(
    combine_both, case.rows() + nan[..., None], case.row_weights() + nan
  )


@pytest.mark.parametrize(
  "options, hidden, dtype",
  [
    (dict(mesh="dp2_ep2", alignment=4), 6, jnp.bfloat16),
    (dict(mesh="ep4", top_k=1), 7, jnp.float32),
    (dict(mesh="dp4_ep1", top_k=1), 1, jnp.float16),
  ],
  ids=str,
)
def test_special_values(options, hidden, dtype):
  """Zeros keep signs, sums flush subnormals, and copied rows keep every bit."""
  case = Case(
    layer(**options), "with_unused_choices", hidden=hidden, specials=True
  )
  case.check(everything, *case.inputs(dtype))


@of_one_process
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_sums_start_at_plus_zero_and_flush(dtype):
  """A sum starts at +0.0, and subnormal float32 numbers count as zero.

  The test states the expected numbers; it does not ask the oracle.
  """
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
