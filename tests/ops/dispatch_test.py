# SPDX-License-Identifier: Apache-2.0
"""ep_dispatch and its gradients equal the oracle's."""

import jax
import jax.numpy as jnp
import numpy as np

from cases import Case, expected, large_case
from conftest import assert_shards_equal
from groups import layer
from op_functions import dispatch, Moved, sizes
from parameters import DTYPES, EVERY_ROUTING, LAYERS, LEADING_DIMS


def dispatch_and_back(ops, tokens, weights, g_rows, g_row_weights):
  return (
    ops.dispatch(tokens, weights),
    ops.dispatch_bwd((tokens, weights), (g_rows, g_row_weights)),
  )


def check(case, dtype=jnp.float32, weight_dtype=jnp.float32):
  case.check(
    dispatch_and_back,
    case.tokens(dtype),
    case.weights(weight_dtype),
    case.rows(dtype),
    case.row_weights(),
  )


@EVERY_ROUTING
def test_every_routing(routing):
  check(Case(layer(), routing))


@DTYPES
def test_rows_are_copied(dtype):
  """Dispatch copies rows bit for bit on every backend, GPUs included."""
  case = Case(layer(alignment=4), "with_unused_choices")
  inputs = case.tokens(dtype), case.weights()
  wanted = expected(case, dispatch, *inputs)
  jax.tree.map(assert_shards_equal, case.run(dispatch, *inputs), wanted)


@DTYPES
def test_token_dtypes(dtype):
  check(Case(layer(), "with_unused_choices"), dtype)


@DTYPES
def test_weights_are_converted_and_their_gradient_comes_back(dtype):
  check(Case(layer(), "with_unused_choices"), weight_dtype=dtype)


@LAYERS
def test_meshes_alignments_and_top_k(options):
  check(Case(layer(**options), "skewed"))


@LEADING_DIMS
def test_leading_dims_of_tokens(lead):
  check(Case(layer(), lead=lead))


def test_alignment_padding_and_tail_are_zero():
  """The test reads this from the result itself, not from the oracle."""
  case = Case(layer(alignment=4), "skewed")
  tokens = np.ones_like(case.tokens())
  recv = case.run(dispatch, tokens, case.weights())
  counts = case.run(sizes)
  found = (*recv, *counts[:3])
  shards = zip(*(x.addressable_shards for x in found), strict=True)
  for shard in shards:
    rows, weights, padded, held, total = (np.asarray(s.data)[0] for s in shard)
    holds_token = np.concatenate(
      [np.arange(p) < c for p, c in zip(padded, held, strict=True)]
    )
    assert len(holds_token) == total
    holds_token = np.pad(holds_token, (0, len(rows) - len(holds_token)))
    np.testing.assert_array_equal(rows.any(1), holds_token)
    np.testing.assert_array_equal(weights != 0, holds_token)


@DTYPES
def test_large(dtype):
  check(large_case("skewed"), dtype)


def dispatch_moved(ops, *inputs):
  return Moved(dispatch(ops, *inputs))


@DTYPES
def test_bits_pass_unchanged(dtype):
  """NaN payloads, infinities, subnormals and -0.0 are copied like all data."""
  case = Case(layer(), specials=True)
  case.check(dispatch_moved, case.tokens(dtype), case.weights())


def slabs(ops, tokens, weights):
  """Returns what was received, with zeros in the tail."""
  group_sizes = ops.sizes().group_sizes
  recv, recv_weights = ops.dispatch(tokens, weights)
  used = jnp.arange(recv.shape[1]) < group_sizes.sum(-1, keepdims=True)
  return (
    jnp.where(used[..., None], recv, 0),
    jnp.where(used, recv_weights, 0),
  )


def test_slabs_do_not_depend_on_the_tail():
  """The padding of a slab is zero even if the tail is unspecified."""
  case = Case(layer(alignment=4, tail="unspecified"), "skewed")
  case.check(slabs, case.tokens(), case.weights())
