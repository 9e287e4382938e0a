# SPDX-License-Identifier: Apache-2.0
"""ep_dispatch gives the oracle's results and gradients.

The tests of shapes, layers and row sizes check all ops.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from cases import assert_same, Case, large_case
from groups import layer, of_one_process
from op_functions import everything, Moved
from parameters import EVERY_ROUTING, LAYERS, LEADING_DIMS


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


@pytest.mark.parametrize(
  "dtype, weight_dtype",
  [(jnp.bfloat16, jnp.float16), (jnp.float16, jnp.bfloat16)],
)
def test_dtypes(dtype, weight_dtype):
  """Dispatch converts weights to float32, and their gradients back."""
  check(Case(layer(), "with_unused_choices"), dtype, weight_dtype)


@LAYERS
def test_every_op_on_meshes_with_alignments_and_top_k(options):
  case = Case(layer(**options), "skewed")
  case.check(everything, *case.inputs())


@of_one_process
@LEADING_DIMS
def test_every_op_with_leading_dims_of_tokens(lead):
  case = Case(layer(), lead=lead)
  case.check(everything, *case.inputs())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_op_on_large_rows(dtype):
  case = large_case("skewed")
  case.check(everything, *case.inputs(dtype))


def dispatch_each(ops, weights, *arrays):
  return [Moved(ops.dispatch(tokens, weights)) for tokens in arrays]


def test_bits_pass_unchanged():
  """Every backend copies NaN payloads, infinities, subnormals and -0.0."""
  case = Case(layer(), specials=True)
  arrays = map(case.tokens, (jnp.float32, jnp.bfloat16, jnp.float16))
  case.check(dispatch_each, case.weights(), *arrays)


def dispatch_moved(ops, *inputs):
  return Moved(ops.dispatch(*inputs))


def test_uint8_rows_with_scales():
  case = Case(layer(alignment=4), "with_unused_choices")
  rows = np.random.default_rng(0).integers(0, 256, case.tokens().shape)
  scales = case.tokens()[:, :3].copy()
  case.check(dispatch_moved, rows.astype(np.uint8), case.weights(), scales)


def segments(ops, tokens, weights):
  """Returns the received rows and weights, with zeros in unused rows."""
  group_sizes = ops.sizes().group_sizes
  recv, recv_weights = ops.dispatch(tokens, weights)
  used = jnp.arange(recv.shape[1]) < group_sizes.sum(-1, keepdims=True)
  return (jnp.where(used[..., None], recv, 0), jnp.where(used, recv_weights, 0))


def test_segments_do_not_depend_on_the_tail():
  """The padding of a segment is zero even with tail="unspecified"."""
  case = Case(layer(alignment=4, tail="unspecified"), "skewed")
  inputs = case.tokens(), case.weights()
  assert_same(case.run(segments, *inputs), case.oracle.dispatch(*inputs))
