# SPDX-License-Identifier: Apache-2.0
"""fp8 rows that a caller sends with scales, and fp8 rows of `wire=`.

The expected results use ep.quant, which quantizers_test tests, for rounding.
The rule `scales` of rules_test tests the bits of rows and scales.
"""

import collections
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import (
  assert_same,
  Case,
  expected,
  global_view,
  local_view,
  lower,
  rounded,
)
from conftest import assert_alike
import ep
from ep._src.base.backend import OPS
from groups import group
from op_functions import dispatch, Moved

HIDDEN = 256


def case_of(
  wire, routing="with_unused_choices", *, mesh="ep4", specials=False, **options
):
  options = dict(alignment=4) | options
  wide = group(mesh, hidden_dim=HIDDEN)
  config = ep.EpLayerConfig(wide, wire=wire, **options)
  return Case(config, routing, hidden=HIDDEN, specials=specials)


def ops_and_back(ops, tokens, weights, rows, row_weights, g):
  primals = tokens, weights
  return dict(
    dispatch=ops.dispatch(*primals),
    dispatch_bwd=ops.dispatch_bwd(primals, (rows, row_weights)),
    combine=ops.combine(rows),
    combine_bwd=Moved(ops.combine_bwd((rows,), g)),
  )


@pytest.mark.parametrize(
  "wire, dtype, view, mesh, tail",
  [
    ("mxfp8", jnp.float32, global_view, "ep4", "zero"),
    ("fp8_block128", jnp.float16, local_view, "ep4", "zero"),
    # A rank also rounds the rows for its own experts.
    ("fp8_block128", jnp.bfloat16, global_view, "dp4_ep1", "zero"),
    ("mxfp8", jnp.bfloat16, global_view, "ep4", "unspecified"),
  ],
)
def test_rounded_rows(wire, dtype, view, mesh, tail):
  """Dispatch rounds tokens, and combine's backward pass rounds gradients.

  Forward sums and the backward pass of dispatch are exact. The tokens have
  special values; an unspecified tail does not change the expert segments.
  """
  case = case_of(wire, mesh=mesh, specials=tail == "zero", tail=tail)
  tokens, rows, g = case.tokens(dtype), case.rows(dtype), case.tokens(dtype)
  rest = case.weights(), rows, case.row_weights()
  want = expected(case, ops_and_back, tokens, *rest, g)
  sent = rounded(wire, tokens), *rest, rounded(wire, g)
  sent = expected(case, ops_and_back, *sent)
  want |= {name: sent[name] for name in ("dispatch", "combine_bwd")}
  actual = case.run(ops_and_back, tokens, *rest, g, view=view)
  if tail == "unspecified":
    used = case.oracle.sizes().total_recv_tokens > np.arange(rows.shape[1])
    used = case.put(used[..., None])
    rows = jnp.where(used, actual["dispatch"][0], 0)
    assert_same(rows, want["dispatch"][0])
    return
  assert_same(actual, want)
  with ep.checked():  # rows that the op leaves unwritten are NaN
    actual = case.run(dispatch, tokens, rest[0], view=view)
  assert_same(actual, want["dispatch"])


def test_backward_of_weighted_combine():
  """The op rounds the cotangent and then computes both gradients exactly."""
  case = case_of("mxfp8")
  rows, weights, g = case.rows(), case.row_weights(), case.tokens()

  def back(ops, rows, weights, g):
    return ops.combine_bwd((rows, weights), g)

  exact = Case(case_of(None).layer, case.topk_idx, hidden=HIDDEN)
  want = exact.run(back, rows, weights, rounded("mxfp8", g))
  assert_alike(case.run(back, rows, weights, g), want)


def test_bytes_per_row():
  """Dispatch and combine's backward send at most 0.53 of bfloat16 rows' bytes.

  Scales take one byte per 32 elements.
  """

  def round_trip_and_back(ops, tokens, weights):
    def of_tokens(tokens):
      return ops.combine(*ops.dispatch(tokens, weights))

    out, vjp = jax.vjp(of_tokens, tokens)
    return vjp(out)

  sent = {}
  for name in None, "mxfp8":
    case = case_of(name)
    arrays = case.tokens(jnp.bfloat16), case.weights()
    program = lower((case, round_trip_and_back, *arrays)).compile()
    sent[name] = bytes_by_op(program.as_text())
  exact, narrow = sent.values()
  assert exact.keys() == narrow.keys() == set(OPS[1:])
  for op, count in exact.items():
    if op in ("ep_dispatch", "ep_combine_bwd"):
      assert 0.5 * count < narrow[op] <= 0.53 * count
    else:
      assert narrow[op] == count


def bytes_by_op(hlo):
  """Returns the bytes of the rows that each op of a compiled program sends.

  A native op is a custom call, whose second operand has the rows. With "xla",
  an all-to-all sends the rows, and routing weights beside the rows.
  """
  call = r"custom-call\(.*operand_layout_constraints={[^ ]* ([^ ]*)"
  exchange = r"= \(?(.*) all-to-all\("
  sent = collections.Counter()
  for line in hlo.splitlines():
    op = re.search(r'op_name="[^"]*(ep_(?:dispatch|combine)\w*)\[', line)
    arrays = re.search(f"{call}|{exchange}", line)
    if op and arrays:
      found = re.findall(r"([a-z]+)(\d+)\[([\d,]+)\]", arrays[1] or arrays[2])
      for _, bits, shape in found:
        size = math.prod(map(int, shape.split(",")))
        sent[op[1]] += size * int(bits) // 8
  return sent


def scaled_inputs(case):
  """Draws fp8 rows, weights and three scales per row."""
  rng, weights = np.random.default_rng(1), case.weights()
  lead = weights.shape[:-1]
  rows = rng.integers(0, 256, (*lead, HIDDEN)).astype(np.uint8)
  scales = rng.normal(size=(*lead, 3)).astype(np.float32)
  return rows.view(jnp.float8_e4m3fn), weights, scales


def test_scales_on_a_mesh():
  """Dropped rows have no scales."""
  options = dict(alignment=1, overflow="drop", recv_capacity_per_rank=8)
  case = case_of(None, "skewed", mesh="dp2_ep2", **options)

  def moved(ops, *args):
    return Moved(dispatch(ops, *args))

  case.check(moved, *scaled_inputs(case), view=local_view)


def test_derivatives_beside_scales():
  """Weights have the oracle's gradient; scales have a zero gradient."""
  case = case_of(None)
  rows, weights, scales = scaled_inputs(case)
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
