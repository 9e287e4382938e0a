# SPDX-License-Identifier: Apache-2.0
"""`ep.moe_layer` applies experts that a user writes."""

import functools

import jax
from jax import lax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from cases import Case
import ep
from groups import E, H, layer, of_one_process, spec
from layer_steps import (
  assert_close,
  assert_same_bits,
  moe_step_of,
  run_moe_step,
)

F, RANK = 9, 2
SHAPES = {
  "w_gate": (E, H, F),
  "w_up": (E, H, F),
  "w_down": (E, F, H),
  "a_up": (E, H, RANK),
  "b_up": (E, RANK, F),
  "a_down": (E, F, RANK),
  "b_down": (E, RANK, H),
  "slope": (E, F),
}


def _params(*names):
  rng = np.random.default_rng(1)
  all_params = {n: rng.normal(size=s) for n, s in SHAPES.items()}
  return {n: np.float32(all_params[n]) for n in names or SHAPES}


def _gated(gate, up):
  return jax.nn.silu(gate) * up


def ours(segments, params, rows):
  """Computes the same as the experts of `moe_layer`, and saves as little."""

  @jax.checkpoint
  def leave(up, gate):
    return segments.matmul(segments.map(_gated, gate, up), params["w_down"])

  up_gate = [params["w_up"], params["w_gate"]]
  return leave(*segments.matmul(rows, up_gate))


def _hidden(gate, up, low, slope):
  return slope * jax.nn.silu(gate) * (up + low)


def lora(segments, params, rows):
  gate, up, low = segments.matmul(
    rows, [params[n] for n in ("w_gate", "w_up", "a_up")]
  )
  low = segments.matmul(low, params["b_up"])
  hidden = segments.map(
    _hidden, gate, up, low, segments.spread(params["slope"])
  )
  out = segments.matmul(hidden, dict(w=params["w_down"], a=params["a_down"]))
  low = segments.matmul(out["a"], params["b_down"])
  return segments.map(jnp.add, out["w"], low)


@functools.partial(jax.jit, static_argnames="hidden")
def _dense_step(topk_idx, *args, hidden=_hidden):
  """Applies all experts of `lora` to all tokens, and sums chosen outputs."""

  def dense(x, weights, params):
    def of_expert(p):
      low = x @ p["a_up"] @ p["b_up"]
      h = hidden(x @ p["w_gate"], x @ p["w_up"], low, p["slope"])
      return h @ p["w_down"] + h @ p["a_down"] @ p["b_down"]

    chosen = jax.nn.one_hot(topk_idx, E)
    out = jax.vmap(of_expert)(params)
    return jnp.einsum("tk,tke,eth->th", weights, chosen, out)

  *floats, ct = args
  out, vjp = jax.vjp(dense, *floats)
  return out, *vjp(ct)


def _args(case, *names):
  tokens = case.tokens()
  return case.topk_idx, tokens, case.weights(), _params(*names), tokens


@pytest.mark.parametrize("alignment", [1, 4])
def test_a_function_like_ours_has_the_bits_of_ours(alignment):
  """Also the rows that pad segments, and all gradients, have the same bits."""
  case = Case(layer("dp2_ep2", alignment=alignment), "with_unused_choices")
  args = _args(case, "w_gate", "w_up", "w_down")
  expected = run_moe_step(case.layer, *args)
  assert_same_bits(run_moe_step(case.layer, *args, experts=ours), expected)


_UPS = "w_gate", "w_up"


def by_ragged_dot(segments, params, rows):
  sizes = segments.group_sizes
  gate, up = (lax.ragged_dot(rows, params[n], sizes) for n in _UPS)
  return lax.ragged_dot(_gated(gate, up), params["w_down"], sizes)


@pytest.mark.parametrize("alignment", [1, 4])
def test_kernels_of_others_take_the_group_sizes(alignment):
  case = Case(layer("dp2_ep2", alignment=alignment), "with_unused_choices")
  args = _args(case, "w_gate", "w_up", "w_down")
  got = run_moe_step(case.layer, *args, experts=by_ragged_dot)
  assert_close(got, run_moe_step(case.layer, *args), 1e-5, 1e-4)


def _quantized(w, dtype, most):
  """Returns [L, F, G] in a small dtype, and the scale of each column."""
  scales = np.abs(w).max(1, keepdims=True) / most
  return np.asarray(jnp.asarray(w / scales).round().astype(dtype)), scales


def _dequantizing(segments, params, rows):
  gate, up, down = (
    q.astype(rows.dtype) * scales
    for q, scales in (params[n] for n in (*_UPS, "w_down"))
  )
  gate, up = segments.matmul(rows, [gate, up])
  return segments.matmul(segments.map(_gated, gate, up), down)


@of_one_process
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_quantized_weights(dtype):
  """fp8 arrays are `params`; a function in the local view closes over int8."""
  case = Case(layer())
  small = {
    n: _quantized(w, dtype, 100) for n, w in _params(*_UPS, "w_down").items()
  }
  whole = {n: np.float32(q) * scales for n, (q, scales) in small.items()}
  routed = case.tokens(), case.topk_idx, case.weights()
  expected = ep.moe_layer(case.layer, *map(case.put, routed), **whole)

  def moe(params, *routed, view):
    if view == "global":
      options = dict(experts=_dequantizing, params=params)
    else:
      options = dict(experts=lambda s, _, x: _dequantizing(s, params, x))
    return ep.moe_layer(case.layer, *routed, **options)

  local = jax.jit(
    jax.shard_map(
      functools.partial(moe, view="local"),
      mesh=case.layer.group.mesh,
      in_specs=(jax.P("ep"), *[spec(case.layer)] * 3),
      out_specs=spec(case.layer),
    )
  )
  calls = [local]
  if dtype != jnp.int8:
    calls.append(functools.partial(moe, view="global"))
  for call in calls:
    got = call(small, *map(case.put, routed))
    assert_close(got, expected, 1e-5, 1e-4)


@pytest.mark.parametrize("view", ["global", "local"])
def test_lora_experts_equal_a_dense_layer(view):
  case = Case(layer())
  args = _args(case)
  got = run_moe_step(case.layer, *args, experts=lora, view=view)
  expected = jax.tree.map(np.asarray, _dense_step(*args))
  assert_close(got, expected, 1e-4, 1e-3)


@of_one_process
def test_unused_rows_do_not_affect_results():
  """Chunks, and NaNs in unused rows, give the results of one exchange."""
  case = Case(layer(), "skewed")
  args = _args(case)
  expected = run_moe_step(case.layer, *args, experts=lora)
  with ep.checked():  # makes the tail NaN
    checked = case.layer.replace(name="checked")
    got = run_moe_step(checked, *args, experts=lora)
  assert_close(got, expected, 1e-4, 1e-3)
  chunked = case.layer.replace(overflow="chunk", recv_capacity_per_rank=16)
  got = run_moe_step(chunked, *args, experts=lora)
  assert_close(got, expected, 1e-4, 1e-3)


@of_one_process
def test_a_derivative_may_be_infinite_at_zero():
  """`map` gives rows that pad segments no gradient."""

  def hidden(gate, up, low, slope):
    return jnp.cbrt(gate) * (up + low) * slope

  def experts(segments, params, rows):
    names = "w_gate", "w_up", "a_up"
    gate, up, low = segments.matmul(rows, [params[n] for n in names])
    low = segments.matmul(low, params["b_up"])
    slope = segments.spread(params["slope"])
    h = segments.map(hidden, gate, up, low, slope)
    out, low = segments.matmul(h, [params["w_down"], params["a_down"]])
    low = segments.matmul(low, params["b_down"])
    return segments.map(jnp.add, out, low)

  case = Case(layer("dp2_ep2", alignment=4), "idle_rank")
  args = _args(case)
  got = run_moe_step(case.layer, *args, experts=experts)
  expected = jax.tree.map(np.asarray, _dense_step(*args, hidden=hidden))
  assert_close(got, expected, 1e-3, 1e-3)


def _equations(jaxpr):
  for eqn in jaxpr.eqns:
    inner = list(jax.extend.core.jaxprs_in_params(eqn.params))
    yield from (e for j in inner for e in _equations(j))
    if not inner:
      yield eqn


def test_no_operation_of_jax_computes_all_rows():
  """Only primitives of ep, which skip unused rows, return blocks of C rows."""
  case = Case(layer("ep4"))
  traced = moe_step_of(case.layer, experts=lora).trace(*_args(case))
  C = case.layer.capacity
  names = {
    eqn.primitive.name
    for eqn in _equations(traced.jaxpr.jaxpr)
    for x in eqn.outvars
    if x.aval.shape[:1] == (C,) and x.aval.shape[1:] not in ((), (1,))
  }
  assert {"ep_map_used_rows", "ep_grouped_matmul"} <= names
  assert not {n for n in names if not n.startswith("ep_")}


def test_params_are_a_pytree_and_may_be_none():
  case = Case(layer())
  topk_idx, tokens, weights, *_ = _args(case)

  def moe(experts, params):
    call = functools.partial(ep.moe_layer, case.layer, experts=experts)
    return jax.eval_shape(
      lambda p: call(tokens, topk_idx, weights, params=p), params
    )

  out = moe(lambda segments, params, rows: rows, None)
  assert out.shape == tokens.shape

  def product(segments, params, rows):
    return segments.matmul(rows, params[0][0])

  moe(product, ((np.zeros((E, H, H), np.float32),),))


@pytest.mark.parametrize(
  "change, error, message",
  [
    (dict(w_up=np.zeros((E, H, F))), TypeError, r"got experts and \['w_up'\]"),
    (dict(experts=1), TypeError, "experts = 1 is"),
    (dict(params=dict(w=np.zeros((E - 1, H)))), ValueError, r"params\['w'\]"),
    (dict(params=dict(w=np.zeros(E, int))), TypeError, "floats are expected"),
    (dict(experts=None), TypeError, "passed by name"),
    (dict(experts=lambda s, p, rows: rows[:, 1:]), ValueError, "like the rows"),
    (
      dict(experts=lambda s, p, rows: s.matmul(rows[:, 1:], p["w_up"])),
      ValueError,
      r"got rows \(\d+, 6\) and matrices \(\d, 7, 9\); expected",
    ),
    (
      dict(experts=lambda s, p, x: s.map(lambda x, _: x, x, p["w_up"][:, 0])),
      ValueError,
      r"got arrays of shapes \(\d+, 7\), \(\d, 9\); expected \[\d+, ...\]",
    ),
  ],
)
def test_arguments_that_do_not_fit(change, error, message):
  case = Case(layer())
  given = dict(experts=lambda s, p, rows: rows, params=_params("w_up")) | change
  arrays = case.tokens(), case.topk_idx, case.weights()
  with pytest.raises(error, match=message):
    ep.moe_layer(case.layer, *arrays, **given)
