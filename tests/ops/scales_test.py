# SPDX-License-Identifier: Apache-2.0
"""Rows of one byte and their scales go where the oracle says, bit for bit."""

import functools

import jax
from jax import export, lax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import assert_same, Case, expected, global_view, local_view
from conftest import make_mesh
import ep
from ep._src.base.backend import OPS
from groups import bootstrap, H, K, layer
from op_functions import dispatch, Moved, Ops
from parameters import EVERY_ROUTING, LAYERS, LEADING_DIMS

VIEWS = pytest.mark.parametrize("view", [global_view, local_view])


def any_bits(shape, dtype, seed):
  """Returns an array of any bits, so also of NaNs of all kinds."""
  rng, dtype = np.random.default_rng(seed), jnp.dtype(dtype)
  bits = rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize))
  return bits.astype(np.uint8).view(dtype)


def inputs(case, row_dtype="float8_e4m3fn", scale_dtype="float32", count=3):
  """Returns rows, weights and `count` scales of each row."""
  weights = case.weights()
  lead = weights.shape[:-1]
  rows = any_bits((*lead, H), row_dtype, 1)
  return rows, weights, any_bits((*lead, count), scale_dtype, 2)


def moved(ops, *args):
  return Moved(dispatch(ops, *args))


# All rows are of one byte, so where scales begin depends on the scales alone.
@pytest.mark.parametrize(
  "row_dtype, scale_dtype",
  [
    ("float8_e4m3fn", "float32"),
    ("float8_e5m2", "bfloat16"),
    ("int8", "float8_e8m0fnu"),
    ("uint8", "float32"),
  ],
)
def test_dtypes(row_dtype, scale_dtype):
  case = Case(layer(alignment=4), "with_unused_choices")
  case.check(moved, *inputs(case, row_dtype, scale_dtype))


@VIEWS
@EVERY_ROUTING
def test_every_routing_in_both_views(routing, view):
  case = Case(layer(alignment=2), routing)
  case.check(moved, *inputs(case), view=view)


@LAYERS
def test_meshes_alignments_and_top_k(options):
  case = Case(layer(**options), "skewed")
  case.check(moved, *inputs(case, "int8", "bfloat16", count=1))


@LEADING_DIMS
def test_leading_dims_of_tokens(lead):
  case = Case(layer(), lead=lead)
  case.check(moved, *inputs(case, scale_dtype="float8_e8m0fnu"))


def test_no_tokens():
  """Each rank receives zeros alone."""
  case = Case(layer(), np.zeros((0, K), np.int32), lead=(0,))
  found = case.run(dispatch, *inputs(case))
  for part, width in zip(found, [(H,), (), (3,)], strict=True):
    zeros = np.zeros((*part.shape[:2], *width), part.dtype)
    assert_same(part, zeros)


@pytest.mark.parametrize("drop_by", ["slot", "weight", "fair"])
def test_drops(drop_by):
  """A row that finds no room has no scales either."""
  options = dict(overflow="drop", drop_by=drop_by, recv_capacity_per_rank=8)
  config = layer(**options)
  weights = Case(config, "skewed").weights()
  case = Case(config, "skewed", routing_weights=weights)
  case.check(moved, *inputs(case))


def test_padding_and_tail_are_zero():
  """The test reads this from the result itself, not from the oracle."""
  case = Case(layer(alignment=4), "skewed")
  rows, weights, scales = inputs(case, "uint8", "float8_e8m0fnu")
  scales = scales.view(np.uint8) | 1
  found = case.run(dispatch, rows | 1, weights, scales.view("float8_e8m0fnu"))
  for row, weight, scale in zip(
    *(x.addressable_shards for x in found), strict=True
  ):
    held = np.asarray(weight.data) != 0
    assert held.any() and not held.all()
    for part in row, scale:
      found = np.asarray(part.data).view(np.uint8) != 0
      np.testing.assert_array_equal(
        found, np.broadcast_to(held[..., None], found.shape)
      )


def test_checked_mode_marks_the_tail():
  """Bytes past the last slab are ones: NaN in every type of floats."""
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


# --- Transformations ---------------------------------------------------------


def in_program(config, fn):
  """Returns a program of `fn(ops, rows, weights, scales)`."""

  def program(topk_idx, *args):
    return fn(Ops(ep.ep_prepare(config, topk_idx)), *args)

  return program


def put(case, *arrays):
  return [case.put(x) for x in (case.topk_idx, *arrays)]


def test_gradient_of_weights():
  """Weights have the oracle's gradient; rows and scales have none."""
  case = Case(layer(alignment=4), "with_unused_choices")
  rows, weights, scales = inputs(case)
  g = case.row_weights()

  def grads(ops, rows, weights, scales, g):
    def of_floats(weights, scales):
      return ops.dispatch(rows, weights, scales)[1]

    _, vjp = jax.vjp(of_floats, weights, scales)
    return vjp(g)

  _, want = case.oracle.dispatch_bwd((case.tokens(), weights), (case.rows(), g))
  actual = case.run(grads, rows, weights, scales, g)
  assert_same(actual, (want, np.zeros_like(scales)))


def test_tangent_of_weights():
  case = Case(layer(), "with_unused_choices")
  rows, weights, scales = inputs(case)

  def tangent(ops, rows, weights, scales):
    def of_weights(weights):
      return ops.dispatch(rows, weights, scales)[1]

    return jax.jvp(of_weights, (weights,), (2 * weights,))[1]

  actual = case.run(tangent, rows, weights, scales)
  _, want = expected(case, dispatch, rows, 2 * weights)
  assert_same(actual, want)


def test_without_jit():
  case = Case(layer(), "skewed")
  arrays = inputs(case)
  actual = in_program(case.layer, moved)(*put(case, *arrays))
  assert_same(actual, expected(case, moved, *arrays))


@VIEWS
def test_vmap(view):
  """One exchange for each example, each with scales of its own."""
  case = Case(layer(), "skewed")
  rows, weights, scales = inputs(case)
  batches = [
    (rows, weights + i, scales[..., ::-1] if i else scales) for i in (0, 1)
  ]
  want = [expected(case, moved, *batch) for batch in batches]

  def examples(ops, *stacked):
    return jax.vmap(functools.partial(moved, ops), in_axes=-1, out_axes=-1)(
      *stacked
    )

  stacked = [np.stack(x, -1) for x in zip(*batches, strict=True)]
  actual = case.run(examples, *stacked, view=view)
  assert_same(actual, jax.tree.map(lambda *x: np.stack(x, -1), *want))


@VIEWS
def test_scan_and_checkpoint(view):
  """In a loop of checkpointed blocks, whose rows are exact in float8."""

  def value(ops, x, weights):
    @jax.checkpoint
    def block(total, scale):
      rows, scales = ep.quant.quantize(x * scale, "mxfp8")
      recv, recv_weights, recv_scales = ops.dispatch(rows, weights, scales)
      recv = ep.quant.dequantize(recv, recv_scales, x.dtype)
      return total + ops.combine(recv, recv_weights), None

    return lax.scan(block, x, jnp.arange(1.0, 3.0))[0]

  def exact(ops, x, weights):
    recv, recv_weights = ops.dispatch(lax.stop_gradient(x), weights)
    return x + 3 * ops.combine(recv, recv_weights)

  with bootstrap(make_mesh({"ep": 4}), hidden_dim=32) as group:
    config = ep.EpLayerConfig(group)
    case = Case(config, "idle_rank", hidden=32, whole=True)
    x, weights = case.tokens(), np.ceil(4 * case.weights())
    run = functools.partial(_with_grads, value)
    actual = case.run(run, x, weights, view=view)
    want = expected(case, functools.partial(_with_grads, exact), x, weights)
    assert_same(actual, want)


def _with_grads(fn, ops, *args):
  out, vjp = jax.vjp(functools.partial(fn, ops), *args)
  return out, vjp(jnp.ones_like(out))


@VIEWS
def test_exported(view):
  config = layer()
  case = Case(config, "skewed")
  arrays = inputs(case)
  checks = [export.DisabledSafetyCheck.custom_call(op) for op in OPS]
  program = jax.jit(view(config, dispatch))
  args = put(case, *arrays)
  exported = export.export(program, disabled_checks=checks)(*args)
  assert_same(Moved(exported.call(*args)), expected(case, moved, *arrays))


# --- Errors ------------------------------------------------------------------


def test_errors():
  case = Case(layer(), "skewed")
  rows, weights, scales = inputs(case)
  for error, words, args in [
    (TypeError, "scales=", (rows, weights)),
    (TypeError, "tokens is float32", (case.tokens(), weights, scales)),
    (TypeError, "scales is int32", (rows, weights, scales.view(np.int32))),
    (ValueError, "at least one scale", (rows, weights, scales[..., :0])),
    (ValueError, "at least one scale", (rows, weights, scales[:4])),
    (ValueError, "hidden_dim", (np.repeat(rows, 2, -1), weights, scales)),
  ]:
    with pytest.raises(error, match=words):
      jax.eval_shape(in_program(case.layer, dispatch), case.topk_idx, *args)
