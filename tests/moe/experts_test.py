# SPDX-License-Identifier: Apache-2.0
"""`ep.moe_layer` applies matrices, or experts that a user writes.

The row "experts" of layer_test.py has LoRA experts that also call a kernel of
JAX with `segments.group_sizes`.
"""

import dataclasses
import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from cases import Case
import ep
from ep.testing import _dense
from groups import E, H, layer, of_one_process
from layer_steps import (
  assert_close,
  assert_same_bits,
  moe_step_of,
  put_moe,
  run_moe_step,
  whole,
)
from layer_table import unit

F = 9  # inner size of an expert


def draw():
  rng = np.random.default_rng(1)
  shapes = {"w_gate": (E, H, F), "w_up": (E, H, F), "w_down": (E, F, H)}
  return {n: np.float32(rng.normal(size=s)) for n, s in shapes.items()}


def swiglu(params, rows):
  hidden = jax.nn.silu(rows @ params["w_gate"]) * (rows @ params["w_up"])
  return hidden @ params["w_down"]


def dense_step(expert, topk_idx, *args):
  """Returns the output and gradients of a dense layer in float64."""

  def step(topk_idx, *args):
    def dense(tokens, weights, params):
      outs = jax.vmap(expert, (0, None))(params, tokens.reshape(-1, H))
      args = (x.reshape(-1, x.shape[-1]) for x in (topk_idx, weights))
      return _dense.dense(outs, *args).reshape(tokens.shape)

    *floats, ct = args
    out, vjp = jax.vjp(dense, *floats)
    return out, *vjp(ct)

  return _dense.in_float64(step)(topk_idx, *args)


def arrays_of(case, params):
  tokens = case.tokens()
  return case.topk_idx, tokens, case.weights(), params, tokens


@pytest.mark.parametrize(
  "routing", ["with_unused_choices", "to_one_expert", "idle"]
)
def test_experts_and_ranks_may_be_idle(routing):
  """Also in a shard_map without `check_vma`."""
  case = Case(layer("ep4", alignment=4), routing)
  args = arrays_of(case, draw())
  got = run_moe_step(case.layer, *args, is_local=True)
  assert_close(got, dense_step(swiglu, *args), 1e-5, 1e-4)


@of_one_process
def test_an_activation_may_have_a_learned_parameter():
  """Its gradient is a sum over all rows of the capacity, padding included."""
  case = Case(layer("ep4", alignment=4), "idle_rank")
  topk_idx, tokens, weights, params, _ = arrays_of(case, draw())

  def loss(factor, topk_idx, tokens, weights, matrices):
    args = case.layer, tokens, topk_idx, weights

    def activation(x):
      return unit(factor * x) * factor

    return ep.moe_layer(*args, **matrices, activation=activation).sum()

  def dense(factor, topk_idx, tokens, weights, params):
    def expert(p):
      hidden = unit(factor * tokens @ p["w_gate"]) * factor
      return hidden * (tokens @ p["w_up"]) @ p["w_down"]

    return _dense.dense(jax.vmap(expert)(params), topk_idx, weights).sum()

  args = topk_idx, tokens, weights, params
  with jax.checking_leaks():
    got = jax.jit(jax.grad(loss))(2.0, *put_moe(case.layer, *args))
  expected = _dense.in_float64(jax.grad(dense))(2.0, *args)
  np.testing.assert_allclose(whole(got), expected, 1e-4)


def ours(segments, params, rows):
  """Computes the same as the experts of `moe_layer`, and saves as little."""

  @jax.checkpoint
  def leave(up, gate):
    hidden = segments.map(lambda g, u: jax.nn.silu(g) * u, gate, up)
    return segments.matmul(hidden, params["w_down"])

  return leave(*segments.matmul(rows, [params["w_up"], params["w_gate"]]))


def test_a_function_like_ours_has_the_bits_of_ours():
  """Also the rows that pad segments, and all gradients, have the same bits."""
  case = Case(layer("dp2_ep2", alignment=4), "with_unused_choices")
  args = arrays_of(case, draw())
  expected = run_moe_step(case.layer, *args)
  assert_same_bits(run_moe_step(case.layer, *args, experts=ours), expected)


@of_one_process
def test_fp8_weights():
  """The function of the experts multiplies fp8 weights by their scales."""
  case = Case(layer())

  def quantized(w):
    scales = np.abs(w).max(1, keepdims=True) / 100
    return np.asarray(w / scales, jnp.float8_e4m3fn), scales

  def dequantizing(segments, params, rows):
    matrices = {n: q.astype(rows.dtype) * s for n, (q, s) in params.items()}
    return ours(segments, matrices, rows)

  small = {n: quantized(w) for n, w in draw().items()}
  matrices = {n: np.float32(q) * scales for n, (q, scales) in small.items()}
  routed = map(case.put, (case.tokens(), case.topk_idx, case.weights()))
  call = functools.partial(ep.moe_layer, case.layer, *routed)
  got = call(experts=dequantizing, params=small)
  assert_close(got, call(**matrices), 1e-5, 1e-4)


@of_one_process
def test_unused_rows_do_not_affect_results():
  """Results have the same bits with zeros and with NaN in unused rows.

  `jax_debug_nans` finds no NaN of a layer that uses few of its rows.
  """
  case = Case(layer(), "one_token")
  args = arrays_of(case, draw())
  with jax.debug_nans(True), ep.checked():  # makes the tail zero
    expected = run_moe_step(case.layer, *args, experts=ours)
  with ep.checked():  # makes the tail NaN
    checked = dataclasses.replace(case.layer, name="checked")
    got = run_moe_step(checked, *args, experts=ours)
  assert_same_bits(got, expected)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))


def equations(jaxpr):
  for eqn in jaxpr.eqns:
    inner = list(jax.extend.core.jaxprs_in_params(eqn.params))
    yield from (e for j in inner for e in equations(j))
    if not inner:
      yield eqn


def test_no_operation_of_jax_computes_all_rows():
  """Only primitives of ep, which skip unused rows, return blocks of C rows."""
  case = Case(layer("ep4"))
  args = arrays_of(case, draw())
  traced = moe_step_of(case.layer, experts=ours).trace(*args)
  names = {
    eqn.primitive.name
    for eqn in equations(traced.jaxpr.jaxpr)
    for x in eqn.outvars
    if x.aval.shape[:1] == (case.layer.capacity,)
    and x.aval.shape[1:] not in ((), (1,))
  }
  assert {"ep_map_used_rows", "ep_grouped_matmul"} <= names
  assert not {n for n in names if not n.startswith("ep_")}
