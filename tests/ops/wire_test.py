# SPDX-License-Identifier: Apache-2.0
"""The fp8 transport rounds the rows of dispatch and the gradient of combine.

The expected results use ep.quant, which quantizers_test tests, for rounding.
"""

import collections
import functools
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
from groups import group, layer
from op_functions import combine, dispatch, Moved

HIDDEN = 256


def case_of(
  wire, routing="with_unused_choices", *, mesh="ep4", specials=False, **options
):
  options = dict(alignment=4) | options
  wide = group(mesh, hidden_dim=HIDDEN)
  config = ep.EpLayerConfig(wide, wire=wire, **options)
  return Case(config, routing, hidden=HIDDEN, specials=specials)


@pytest.mark.parametrize(
  "wire, dtype, view, mesh",
  [
    ("mxfp8", jnp.float32, global_view, "ep4"),
    ("fp8_block128", jnp.float16, local_view, "ep4"),
    # A rank also rounds the rows for its own experts.
    ("fp8_block128", jnp.bfloat16, global_view, "dp4_ep1"),
  ],
)
def test_dispatch(wire, dtype, view, mesh):
  """Received rows equal rows that ep.quant rounds, also with special values.

  In checked mode, rows that the op leaves unwritten are NaN.
  """
  case = case_of(wire, mesh=mesh, specials=True)
  tokens, weights = case.tokens(dtype), case.weights()
  want = expected(case, dispatch, rounded(wire, tokens), weights)
  with ep.checked():
    assert_same(case.run(dispatch, tokens, weights, view=view), want)


@pytest.mark.parametrize(
  "wire, dtype", [("mxfp8", jnp.float16), ("fp8_block128", jnp.bfloat16)]
)
def test_backward_of_combine(wire, dtype):
  """ep_combine rounds the gradients that it sends, but not the forward sums."""
  case = case_of(wire)
  rows, g = case.rows(dtype), case.tokens(dtype)

  def combine_and_back(ops, rows, g):
    return ops.combine(rows), Moved(ops.combine_bwd((rows,), g))

  out, _ = expected(case, combine_and_back, rows, g)
  _, grad = expected(case, combine_and_back, rows, rounded(wire, g))
  assert_same(case.run(combine_and_back, rows, g), (out, grad))


def test_backward_of_weighted_combine():
  """The op rounds the cotangent and then computes both gradients exactly."""
  case = case_of("mxfp8")
  rows, weights, g = case.rows(), case.row_weights(), case.tokens()

  def back(ops, rows, weights, g):
    return ops.combine_bwd((rows, weights), g)

  exact = Case(case_of(None).layer, case.topk_idx, hidden=HIDDEN)
  want = exact.run(back, rows, weights, rounded("mxfp8", g))
  assert_alike(case.run(back, rows, weights, g), want)


def test_backward_of_dispatch():
  """The gradient of dispatch is exact, as if forward had not rounded."""
  case = case_of("fp8_block128")
  rows, row_weights = case.rows(), case.row_weights()
  primals = case.tokens(), case.weights()

  def back(ops, *arrays):
    return ops.dispatch_bwd(arrays[:2], arrays[2:])

  case.check(back, *primals, rows, row_weights)


def test_tangents_are_sent_as_fp8_rows():
  case = case_of("mxfp8")
  tokens, weights = case.tokens(), case.weights()
  tangents = tokens[::-1].copy(), weights[::-1].copy()

  def tangent(ops, *arrays):
    return jax.jvp(ops.dispatch, arrays[:2], arrays[2:])[1]

  actual = case.run(tangent, tokens, weights, *tangents)
  tangents = rounded("mxfp8", tangents[0]), tangents[1]
  assert_same(actual, expected(case, dispatch, *tangents))


def test_unspecified_tail():
  """An unspecified tail does not change the expert segments."""
  case = case_of("mxfp8", "skewed", tail="unspecified")

  def segments(ops, tokens, weights):
    used = jnp.arange(case.layer.capacity) < ops.sizes().total_recv_tokens
    recv, recv_weights = ops.dispatch(tokens, weights)
    return jnp.where(used[..., None], recv, 0), jnp.where(used, recv_weights, 0)

  tokens, weights = case.tokens(), case.weights()
  want = expected(case, dispatch, rounded("mxfp8", tokens), weights)
  assert_same(case.run(segments, tokens, weights), want)


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


def test_vmap():
  case = case_of("mxfp8")
  tokens, weights = case.tokens(), case.weights()
  batches = [(tokens + i, weights + i) for i in range(2)]
  want = [expected(case, dispatch, rounded("mxfp8", x), w) for x, w in batches]

  def examples(ops, *stacked):
    fn = functools.partial(dispatch, ops)
    return jax.vmap(fn, in_axes=-1, out_axes=-1)(*stacked)

  stacked = [np.stack(x, -1) for x in zip(*batches, strict=True)]
  actual = case.run(examples, *stacked, view=local_view)
  assert_same(actual, jax.tree.map(lambda *x: np.stack(x, -1), *want))


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


def test_errors():
  with pytest.raises(ValueError, match="wire = 'fp8'.*'mxfp8'"):
    layer(wire="fp8")
  case = Case(layer(wire="mxfp8"))
  for fn, arrays in [
    (dispatch, (case.tokens(), case.weights())),
    (combine, (case.rows(),)),
  ]:
    with pytest.raises(ValueError, match="multiple of 32"):
      case.run(fn, *arrays)
