# SPDX-License-Identifier: Apache-2.0
"""A layer's wire rounds what dispatch sends, and the gradient of combine.

The oracle rounds by ep.quant, which quantizers_test.py tests, and moves all
bits.
"""

import collections
import functools
import json

import jax
from jax import export, lax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import assert_same, Case, expected, global_view, local_view
from conftest import assert_alike
import ep
from ep._src.base.backend import OPS
from groups import group, layer
from op_functions import combine, dispatch, Moved

HIDDEN = 256
WIRES = pytest.mark.parametrize("wire", ["mxfp8", "fp8_block128"])
VIEWS = pytest.mark.parametrize("view", [global_view, local_view])
DTYPES = pytest.mark.parametrize(
  "dtype", [jnp.float32, jnp.bfloat16, jnp.float16]
)


def case_of(wire, routing="with_unused_choices", *, mesh="ep4", **options):
  options = dict(alignment=4) | options
  wide = group(mesh, hidden_dim=HIDDEN)
  config = ep.EpLayerConfig(wide, wire=wire, **options)
  return Case(config, routing, hidden=HIDDEN)


def rounded(wire, rows):
  """Returns rows as a wire brings them."""
  parts = ep.quant.quantize(rows, wire)
  return np.asarray(ep.quant.dequantize(*parts, rows.dtype))


@WIRES
@DTYPES
def test_dispatch(wire, dtype):
  case = case_of(wire)
  tokens, weights = case.tokens(dtype), case.weights()
  want = expected(case, dispatch, rounded(wire, tokens), weights)
  assert_same(case.run(dispatch, tokens, weights), want)


@WIRES
def test_local_view(wire):
  case = case_of(wire)
  tokens, weights = case.tokens(), case.weights()
  want = expected(case, dispatch, rounded(wire, tokens), weights)
  assert_same(case.run(dispatch, tokens, weights, view=local_view), want)


@WIRES
def test_special_numbers(wire):
  """They come as the quantizer rounds them, whatever is beside them."""
  case = Case(case_of(wire).layer, "skewed", hidden=HIDDEN, specials=True)
  tokens, weights = case.tokens(jnp.bfloat16), case.weights()
  want = expected(case, dispatch, rounded(wire, tokens), weights)
  assert_same(case.run(dispatch, tokens, weights), want)


@WIRES
@DTYPES
def test_backward_of_combine(wire, dtype):
  """The gradient is rounded; the sum of combine itself is not."""
  case = case_of(wire)
  rows, g = case.rows(dtype), case.tokens(dtype)
  case.check(combine, rows)

  def back(ops, rows, g):
    return Moved(ops.combine_bwd((rows,), g))

  want = expected(case, back, rows, rounded(wire, g))
  assert_same(case.run(back, rows, g), want)


@WIRES
def test_backward_of_weighted_combine(wire):
  """Both gradients are those of the rounded cotangent, bit for bit."""
  case = case_of(wire)
  rows, weights, g = case.rows(), case.row_weights(), case.tokens()

  def back(ops, rows, weights, g):
    return ops.combine_bwd((rows, weights), g)

  exact = Case(case_of(None).layer, case.topk_idx, hidden=HIDDEN)
  want = exact.run(back, rows, weights, rounded(wire, g))
  assert_alike(case.run(back, rows, weights, g), want)


@WIRES
def test_backward_of_dispatch(wire):
  """It is exact, and straight through: as if nothing had been rounded."""
  case = case_of(wire)
  rows, row_weights = case.rows(), case.row_weights()
  primals = case.tokens(), case.weights()

  def back(ops, *arrays):
    return ops.dispatch_bwd(arrays[:2], arrays[2:])

  case.check(back, *primals, rows, row_weights)


@WIRES
def test_tangents_travel_as_rows_do(wire):
  case = case_of(wire)
  tokens, weights = case.tokens(), case.weights()
  moves = tokens[::-1].copy(), weights[::-1].copy()

  def tangent(ops, *arrays):
    return jax.jvp(ops.dispatch, arrays[:2], arrays[2:])[1]

  actual = case.run(tangent, tokens, weights, *moves)
  moves = rounded(wire, moves[0]), moves[1]
  assert_same(actual, expected(case, dispatch, *moves))


@WIRES
@pytest.mark.parametrize("mesh", ["dp2_ep2", "dp4_ep1"])
def test_every_mesh_rounds_alike(wire, mesh):
  """A rank that keeps its own rows rounds them, too."""
  case = case_of(wire, "skewed", mesh=mesh)
  tokens, weights = case.tokens(jnp.bfloat16), case.weights()
  want = expected(case, dispatch, rounded(wire, tokens), weights)
  assert_same(case.run(dispatch, tokens, weights), want)


@WIRES
def test_unspecified_tail(wire):
  """Slabs are those of a tail of zeros."""
  case = case_of(wire, "skewed", tail="unspecified")

  def slabs(ops, tokens, weights):
    used = jnp.arange(case.layer.capacity) < ops.sizes().total_recv_tokens
    recv, recv_weights = ops.dispatch(tokens, weights)
    return jnp.where(used[..., None], recv, 0), jnp.where(used, recv_weights, 0)

  tokens, weights = case.tokens(), case.weights()
  want = expected(case, dispatch, rounded(wire, tokens), weights)
  assert_same(case.run(slabs, tokens, weights), want)


@WIRES
def test_bytes_per_row(wire, folder):
  """Dispatch and the backward of combine move 0.53 of bfloat16 at most."""

  def there_and_back(ops, tokens, weights):
    def of_tokens(tokens):
      return ops.combine(*ops.dispatch(tokens, weights))

    out, vjp = jax.vjp(of_tokens, tokens)
    return vjp(out)

  moved = {}
  for name in None, wire:
    case = case_of(name)
    path = folder / f"{name}.json"
    with ep.trace(case.layer.group, path):
      arrays = case.tokens(jnp.bfloat16), case.weights()
      jax.block_until_ready(case.run(there_and_back, *arrays))
    moved[name] = bytes_by_op(path)
  exact, narrow = moved[None], moved[wire]
  assert exact.keys() == narrow.keys() == set(OPS[1:])
  for op, count in exact.items():
    if op in ("ep_dispatch", "ep_combine_bwd"):
      assert 0.5 * count < narrow[op] <= 0.53 * count
    else:
      assert narrow[op] == count


@VIEWS
def test_vmap(view):
  case = case_of("mxfp8")
  tokens, weights = case.tokens(), case.weights()
  batches = [(tokens + i, weights + i) for i in range(2)]
  want = [expected(case, dispatch, rounded("mxfp8", x), w) for x, w in batches]

  def examples(ops, *stacked):
    fn = functools.partial(dispatch, ops)
    return jax.vmap(fn, in_axes=-1, out_axes=-1)(*stacked)

  stacked = [np.stack(x, -1) for x in zip(*batches, strict=True)]
  actual = case.run(examples, *stacked, view=view)
  assert_same(actual, jax.tree.map(lambda *x: np.stack(x, -1), *want))


@VIEWS
def test_scan_and_checkpoint(view):
  """A loop of checkpointed blocks is these blocks one after another."""

  def block(ops, weights, x, scale):
    return x + ops.combine(*ops.dispatch(scale * x, weights)), None

  def loop(ops, weights, x):
    fn = jax.checkpoint(functools.partial(block, ops, weights))
    return lax.scan(fn, x, jnp.array([1.0, 0.5]))[0]

  def blocks(ops, weights, x):
    for scale in 1.0, 0.5:
      x, _ = block(ops, weights, x, scale)
    return x

  def with_grads(fn, ops, g, *args):
    out, vjp = jax.vjp(functools.partial(fn, ops), *args)
    return out, vjp(g)

  case = case_of("mxfp8")
  args = case.tokens(), case.weights(), case.tokens()
  assert_alike(
    *(
      case.run(functools.partial(with_grads, fn), *args, view=view)
      for fn in (loop, blocks)
    )
  )


@VIEWS
def test_exported(view):
  case = case_of("mxfp8")
  tokens, weights = case.tokens(), case.weights()
  checks = [export.DisabledSafetyCheck.custom_call(op) for op in OPS]
  program = jax.jit(view(case.layer, dispatch))
  args = [case.put(x) for x in (case.topk_idx, tokens, weights)]
  exported = export.export(program, disabled_checks=checks)(*args)
  want = expected(case, dispatch, rounded("mxfp8", tokens), weights)
  assert_same(exported.call(*args), want)


def bytes_by_op(path):
  """Returns the bytes that all ranks moved in each op of a trace."""
  moved = collections.Counter()
  for exchange in json.loads(path.read_text())["ep"]["exchanges"]:
    if count := sum(exchange["bytes"]):
      moved[exchange["op"]] += count
  return moved


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
