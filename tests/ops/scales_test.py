# SPDX-License-Identifier: Apache-2.0
"""ep_dispatch sends fp8 and int8 rows and their scales, as the oracle does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import assert_same, Case, expected, global_view, local_view
import ep
from groups import E, H, K, layer
from op_functions import dispatch, Moved
from parameters import EVERY_ROUTING


def any_bits(shape, dtype, seed):
  """Draws random bits, which include all NaNs."""
  rng, dtype = np.random.default_rng(seed), jnp.dtype(dtype)
  bits = rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize))
  return bits.astype(np.uint8).view(dtype)


def inputs(case, row_dtype="float8_e4m3fn", scale_dtype="float32", count=3):
  """Draws rows, weights and `count` scales per row."""
  weights = case.weights()
  lead = weights.shape[:-1]
  rows = any_bits((*lead, H), row_dtype, 1)
  return rows, weights, any_bits((*lead, count), scale_dtype, 2)


def copied(ops, *args):
  return Moved(dispatch(ops, *args))


@pytest.mark.parametrize(
  "options, row_dtype, scale_dtype, count",
  [
    (dict(mesh="dp2_ep2", top_k=E), "float8_e5m2", "bfloat16", 1),
    (dict(alignment=4), "float8_e4m3fn", "float32", 3),
    (dict(mesh="dp4_ep1", alignment=8), "int8", "float8_e8m0fnu", 3),
    (dict(mesh="dp2_ep2", top_k=1), "uint8", "float32", 1),
  ],
)
def test_dtypes_and_layers(options, row_dtype, scale_dtype, count):
  case = Case(layer(**options), "with_unused_choices")
  case.check(copied, *inputs(case, row_dtype, scale_dtype, count))


@pytest.mark.parametrize("view", [global_view, local_view])
@EVERY_ROUTING
def test_every_routing_in_both_views(routing, view):
  case = Case(layer(alignment=2), routing)
  case.check(copied, *inputs(case), view=view)


def test_no_tokens():
  """If no rank has tokens, all ranks receive only zeros."""
  case = Case(layer(), np.zeros((0, K), np.int32), lead=(0,))
  found = case.run(dispatch, *inputs(case))
  for part, width in zip(found, [(H,), (), (3,)], strict=True):
    zeros = np.zeros((*part.shape[:2], *width), part.dtype)
    assert_same(part, zeros)


def test_dropped_rows_have_no_scales():
  options = dict(overflow="drop", drop_by="slot", recv_capacity_per_rank=8)
  case = Case(layer(**options), "skewed")
  case.check(copied, *inputs(case))


def test_checked_mode_marks_the_tail():
  """All bits of unused rows are set, which is NaN in every float type."""
  case = Case(layer(alignment=4, tail="unspecified"), "skewed")
  arrays = inputs(case)
  with ep.checked():
    *found, total = case.run(
      lambda ops, *args: (*ops.dispatch(*args), ops.sizes().total_recv_tokens),
      *arrays,
    )
  for row, weight, scale, used in zip(
    *(x.addressable_shards for x in (*found, total)), strict=True
  ):
    used = int(np.asarray(used.data).squeeze())
    for part in row, weight, scale:
      tail = np.asarray(part.data)[0][used:]
      assert len(tail) and np.isnan(tail.astype(np.float32)).all()


def test_derivatives_of_weights():
  """Weights have the oracle's gradient; scales have a zero gradient."""
  case = Case(layer(alignment=4), "with_unused_choices")
  rows, weights, scales = inputs(case)
  g = case.row_weights()

  def derivatives(ops, rows, weights, scales, g):
    def of_floats(weights, scales):
      return ops.dispatch(rows, weights, scales)[1]

    tangents = 2 * weights, jnp.zeros_like(scales)
    _, tangent = jax.jvp(of_floats, (weights, scales), tangents)
    _, vjp = jax.vjp(of_floats, weights, scales)
    return tangent, vjp(g)

  _, tangent = expected(case, dispatch, rows, 2 * weights)
  _, grad = case.oracle.dispatch_bwd((case.tokens(), weights), (case.rows(), g))
  actual = case.run(derivatives, rows, weights, scales, g)
  assert_same(actual, (tangent, (grad, np.zeros_like(scales))))
