# SPDX-License-Identifier: Apache-2.0
"""moe_layer and its gradients agree with a dense layer.

The dense layer applies every expert to every token. Results are close, not
equal, because XLA computes the matmuls in another order.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
import numpy as np
import pytest

from cases import assert_same, Case, rounded
from conftest import assert_shards_close, to_global
import ep
from groups import E, group, H, K, layer, of_one_process, ranks, spec, T
from layer_steps import (
  assert_close,
  assert_same_bits,
  put_moe,
  run_moe_step,
  whole,
)
from op_functions import Ops

F = 9  # inner size of an expert


def _matrices(gated=True, hidden=H):
  rng = np.random.default_rng(1)
  shapes = {"w_up": (E, hidden, F), "w_down": (E, F, hidden)}
  if gated:
    shapes["w_gate"] = shapes["w_up"]
  return {n: np.float32(rng.normal(size=s)) for n, s in shapes.items()}


def _dense(topk_idx, tokens, weights, matrices, activation=jax.nn.silu):
  """Applies all experts to all tokens, and sums the chosen outputs."""
  hidden = jnp.einsum("...h,ehf->...ef", tokens, matrices["w_up"])
  if "w_gate" in matrices:
    gates = jnp.einsum("...h,ehf->...ef", tokens, matrices["w_gate"])
    hidden = activation(gates) * hidden
  else:
    hidden = activation(hidden)
  out = jnp.einsum("...ef,efh->...eh", hidden, matrices["w_down"])
  chosen = jax.nn.one_hot(topk_idx, E)  # zeros where an id is -1
  return jnp.einsum("...k,...ke,...eh->...h", weights, chosen, out)


@functools.partial(jax.jit, static_argnames="activation")
def _dense_step(topk_idx, tokens, weights, matrices, ct, **options):
  dense = functools.partial(_dense, topk_idx, **options)
  out, vjp = jax.vjp(dense, tokens, weights, matrices)
  return out, *vjp(ct)


def _arrays(case, **options):
  return case.topk_idx, case.tokens(), case.weights(), _matrices(**options)


def _check(case, *arrays, view="global", rtol=1e-5, **options):
  args = *arrays, case.tokens()
  got = run_moe_step(case.layer, *args, view=view, **options)
  expected = _dense_step(*args, **options)
  assert_close(got, jax.tree.map(np.asarray, expected), rtol, 1e-4)


def _moe(layer, **options):
  def call(topk_idx, tokens, weights, matrices):
    return ep.moe_layer(layer, tokens, topk_idx, weights, **matrices, **options)

  return call


def test_output_and_gradients_equal_the_dense_layer():
  case = Case(layer(), "with_unused_choices")
  _check(case, *_arrays(case), view="local_unchecked")


@of_one_process
@pytest.mark.parametrize("routing", ["to_one_expert", "idle"])
def test_experts_and_ranks_may_be_idle(routing):
  case = Case(layer("dp2_ep2", alignment=4), routing)
  _check(case, *_arrays(case, gated=False))


@of_one_process
def test_tokens_may_have_any_leading_dims():
  """`handle.token_shape` is the leading dims of one rank's tokens."""
  case = Case(layer(), lead=(1, T))
  arrays = _arrays(case)
  moe = jax.jit(_moe(case.layer, return_handle=True))
  out, handle = moe(*put_moe(case.layer, *arrays))
  assert_shards_close(out, np.asarray(_dense(*arrays)), 1e-5, 1e-4)
  assert_same(Ops(handle).sizes(), case.oracle.sizes())
  assert (handle.layer, handle.token_shape) == (case.layer, (1, T))


@of_one_process
def test_an_activation_may_have_a_learned_parameter():
  case = Case(layer())
  topk_idx, tokens, weights, matrices = arrays = _arrays(case, gated=False)

  def loss(factor, *arrays):
    out = _moe(case.layer, activation=lambda x: factor * x)(*arrays)
    return out.sum(), out

  placed = put_moe(case.layer, *arrays)
  with jax.checking_leaks():
    grad, got = jax.jit(jax.grad(loss, has_aux=True))(2.0, *placed)
  products = 2 * matrices["w_up"] @ matrices["w_down"]
  out = np.einsum("th,ehg->teg", tokens, products)
  expected = np.einsum("tk,tke,teh->th", weights, np.eye(E)[topk_idx], out)
  assert_shards_close(got, expected, 1e-4, 1e-4)
  assert_shards_close(grad, expected.sum() / 2, 1e-3, 1e-3)


@of_one_process
def test_a_program_belongs_to_one_implementation():
  """Functions are compared by identity: JAX traces each of them once."""
  case = Case(layer())
  arrays = _arrays(case, gated=False)
  placed = put_moe(case.layer, *arrays)
  calls = []

  def implementation():
    def dot(lhs, rhs, group_sizes):
      calls.append(dot)
      return lax.ragged_dot(lhs, rhs, group_sizes)

    return dot

  first, second = implementation(), implementation()
  for dot in first, first, second:
    got = _moe(case.layer, implementation=dot)(*placed)
    assert_shards_close(got, np.asarray(_dense(*arrays)), 1e-5, 1e-4)
  assert calls.count(first) == calls.count(second) > 0


@of_one_process
def test_an_activation_may_have_an_infinite_derivative_at_zero():
  """The zero rows that pad a segment give no NaN gradient."""
  case = Case(layer("dp2_ep2", alignment=4), "idle_rank")
  _check(case, *_arrays(case), activation=jnp.cbrt, rtol=1e-4)


@of_one_process
def test_dropped_choices_add_nothing_and_have_no_gradient():
  dropping = layer().replace(recv_capacity_per_rank=4, overflow="drop")
  weights = Case(dropping, "skewed").weights()
  case = Case(dropping, "skewed", routing_weights=weights)  # drop_by is "fair".
  # The gradient of a weight is 1 where the oracle does not drop the choice.
  tokens, ones = case.tokens(), np.ones_like(weights)
  rows = np.zeros((ranks(dropping), dropping.capacity, H), np.float32)
  _, kept = case.oracle.dispatch_bwd(
    (tokens, ones), (rows, np.ones(rows.shape[:2], np.float32))
  )
  assert 0 < kept.sum() < kept.size
  kept_idx = np.where(np.asarray(kept) > 0, case.topk_idx, -1)
  args = tokens, weights, _matrices(), case.tokens()
  got = run_moe_step(dropping, case.topk_idx, *args)
  expected = jax.tree.map(np.asarray, _dense_step(kept_idx, *args))
  assert_close(got, expected, 1e-5, 1e-4)


def test_matrices_are_passed_by_name():
  case = Case(layer("ep4"))
  routed = case.tokens(), case.topk_idx, case.weights()
  for matrices in [(), (case.tokens(), case.tokens())]:
    with pytest.raises(TypeError, match=r'"moe"\): .*by name: w_up=\.\.\.'):
      ep.moe_layer(case.layer, *routed, *matrices)


@pytest.mark.parametrize(
  "change, error, message",
  [
    (dict(w_up=np.zeros((E, H + 1, F), np.float32)), ValueError, "w_up has"),
    (dict(w_down=np.zeros((E, H, F), np.float32)), ValueError, "w_down has"),
    (dict(w_gate=np.zeros((E, H, F - 1), np.float32)), ValueError, "w_gate"),
    (dict(w_up=np.zeros((1, H, F), np.float32)), ValueError, "all experts"),
    (dict(w_down=np.zeros((E, F, H), np.float16)), TypeError, "w_down is"),
  ],
)
def test_matrices_that_do_not_fit(change, error, message):
  case = Case(layer(name="moe_3"))
  matrices = {**_matrices(), **change}
  with pytest.raises(
    error, match=rf"moe_layer\(layer \"moe_3\"\): .*{message}"
  ):
    ep.moe_layer(
      case.layer, case.tokens(), case.topk_idx, case.weights(), **matrices
    )


@of_one_process
def test_the_tail_does_not_affect_results():
  """Results have the same bits with zeros and with NaN in unused rows.

  `jax_debug_nans` finds no NaN of a layer whose received rows are mostly tail.
  """
  case = Case(layer(), "one_token")
  args = *_arrays(case), case.tokens()
  with jax.debug_nans(True), ep.checked():  # makes the tail zero
    expected = run_moe_step(case.layer, *args)
  with ep.checked():  # makes the tail NaN
    actual = run_moe_step(case.layer.replace(name="checked"), *args)
  assert_same_bits(actual, expected)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(actual))


@of_one_process
@pytest.mark.parametrize(
  "wire, mesh, options",
  [
    ("fp8_block128", "dp2_ep2", dict(alignment=8)),
    ("mxfp8", "ep4", dict(overflow="chunk", recv_capacity_per_rank=24)),
  ],
)
def test_fp8_rows_equal_rounded_tokens_and_cotangents(wire, mesh, options):
  """A layer with fp8 transport equals a layer with inputs rounded to fp8."""
  hidden = 128
  plain = ep.EpLayerConfig(group(mesh, hidden_dim=hidden), **options)
  case = Case(plain, "skewed", hidden=hidden)
  x, ct = case.tokens(jnp.bfloat16), case.tokens(jnp.bfloat16)
  weights = case.weights()
  matrices = {n: w.astype(x.dtype) for n, w in _matrices(hidden=hidden).items()}

  def run(layer, x, ct):
    if layer.overflow != "chunk":
      return run_moe_step(layer, case.topk_idx, x, weights, matrices, ct)
    return [whole(_moe(layer)(case.topk_idx, x, weights, matrices))]

  actual = run(plain.replace(wire=wire), x, ct)
  assert_same_bits(actual, run(plain, rounded(wire, x), rounded(wire, ct)))
  assert not np.array_equal(actual[0], run(plain, x, ct)[0])


def _padded(config):
  return _moe(config, pad=True)


def _any_batch(*lead):
  rng = np.random.default_rng(0)
  idx = rng.permuted(np.tile(np.arange(E), (*lead, 1)), axis=-1)[..., :K]
  tokens = rng.normal(size=(*lead, H)).astype(np.float32)
  weights = rng.uniform(size=(*lead, K)).astype(np.float32)
  return idx.astype(np.int32), tokens, weights, _matrices(gated=False)


@pytest.mark.parametrize(
  "lead, axis_type",
  [
    ((1,), AxisType.Auto),
    pytest.param((2, 3), AxisType.Explicit, marks=of_one_process),
  ],
)
def test_any_batch_is_padded_when_asked(lead, axis_type):
  """A batch may have fewer tokens than ranks, and any leading axes."""
  config = layer("dp2_ep2", axis_type)
  *tokens, matrices = arrays = _any_batch(*lead)
  mesh = config.group.mesh
  experts = PartitionSpec(config.group.axis_name)
  args = [to_global(x, mesh) for x in (*tokens, tokens[1])]
  args.insert(3, {n: to_global(w, mesh, experts) for n, w in matrices.items()})

  def step(topk_idx, *args):
    *floats, ct = args
    fn = functools.partial(_padded(config), topk_idx)
    out, vjp = jax.vjp(fn, *floats)
    return out, *vjp(ct)

  got, expected = jax.jit(step)(*args), _dense_step(*arrays, tokens[1])
  for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
    assert_shards_close(a, np.asarray(b), 1e-4, 1e-4)


@of_one_process
def test_padded_examples_of_vmap():
  """`vmap` makes one batch of the examples, with the vmapped axis first."""
  arrays = _any_batch(2, 5)
  batched = jax.vmap(_padded(layer()), in_axes=(0, 0, 0, None))
  got = jax.jit(batched)(*arrays)
  assert_shards_close(got, np.asarray(_dense(*arrays)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_local", [False, True])
def test_pad_adds_nothing_where_no_padding_is_needed(is_local):
  """`pad` changes no program for a full batch, and no program in shard_map."""
  config = layer()
  fns = _padded(config), _moe(config)
  if is_local:
    sharded, experts = spec(config), PartitionSpec("ep")
    specs = dict(in_specs=(*[sharded] * 3, experts), out_specs=sharded)
    fns = [jax.shard_map(f, mesh=config.group.mesh, **specs) for f in fns]
  programs = [jax.make_jaxpr(f)(*_any_batch(12)) for f in fns]
  assert str(programs[0]) == str(programs[1])


def test_the_handle_describes_the_padded_tokens():
  config = layer()
  padded = _moe(config, pad=True, return_handle=True)
  out, handle = jax.eval_shape(padded, *_any_batch(6))
  assert out.shape == (6, H)
  assert handle.token_shape == (2,)
  assert handle.kept.shape == (ranks(config) * 2, K)


def test_more_padded_tokens_than_a_rank_may_have():
  config = layer()
  with pytest.raises(ValueError, match="max_tokens_per_rank"):
    jax.eval_shape(_padded(config), *_any_batch(ranks(config) * T + 1))
