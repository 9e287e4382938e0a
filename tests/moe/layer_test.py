# SPDX-License-Identifier: Apache-2.0
"""moe_layer and its derivatives are close to those of a dense layer.

The dense layer applies every expert to every token. Results are close, not
equal, because XLA computes the matmuls.
"""

import dataclasses
import functools

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from cases import assert_same, Case, jit_quickly
from conftest import assert_shards_close, assert_shards_equal, to_global
import ep
from groups import E, H, layer, ranks, spec, T
from op_functions import Ops

F = 9  # inner size of an expert


def _matrices(gated=True, dtype=jnp.float32):
  rng = np.random.default_rng(1)
  shapes = {"w_up": (E, H, F), "w_down": (E, F, H)}
  if gated:
    shapes["w_gate"] = (E, H, F)
  return {n: rng.normal(size=s).astype(dtype) for n, s in shapes.items()}


def _dense(topk_idx, tokens, weights, matrices):
  """Applies all experts to all tokens in float32, and sums those chosen."""
  tokens, weights, matrices = jax.tree.map(
    lambda x: jnp.asarray(x, jnp.float32), (tokens, weights, matrices)
  )
  with jax.default_matmul_precision("highest"):
    hidden = jnp.einsum("...h,ehf->...ef", tokens, matrices["w_up"])
    if "w_gate" in matrices:
      gates = jnp.einsum("...h,ehf->...ef", tokens, matrices["w_gate"])
      hidden = jax.nn.silu(gates) * hidden
    else:
      hidden = jax.nn.silu(hidden)
    out = jnp.einsum("...ef,efh->...eh", hidden, matrices["w_down"])
    chosen = jax.nn.one_hot(topk_idx, E)  # zeros where an id is -1
    return jnp.einsum("...k,...ke,...eh->...h", weights, chosen, out)


def _moe(layer, moe_layer=ep.moe_layer):
  def call(topk_idx, tokens, weights, matrices):
    return moe_layer(layer, tokens, topk_idx, weights, **matrices)

  return call


def _local_moe(layer, check_vma):
  tokens, experts = spec(layer), PartitionSpec(layer.group.axis_name)
  return jax.shard_map(
    _moe(layer),
    mesh=layer.group.mesh,
    in_specs=(tokens, tokens, tokens, experts),
    out_specs=tokens,
    check_vma=check_vma,
  )


VIEWS = {
  "global": _moe,
  "local": lambda layer: _local_moe(layer, True),
  "local_unchecked": lambda layer: _local_moe(layer, False),
}


def _put(case, topk_idx, tokens, weights, matrices):
  mesh = case.layer.group.mesh
  experts = PartitionSpec(case.layer.group.axis_name)
  return (
    *(case.put(x) for x in (topk_idx, tokens, weights)),
    {n: to_global(x, mesh, experts) for n, x in matrices.items()},
  )


def _check(fn, expected_fn, case, *arrays, rtol=1e-5, atol=1e-4):
  """Checks that `fn` of sharded arrays is near `expected_fn` of whole ones."""
  got = jax.jit(fn)(*_put(case, case.topk_idx, *arrays))
  expected = jit_quickly(expected_fn)(case.topk_idx, *arrays)
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    assert_shards_close(a, np.asarray(b), rtol, atol)


def _with_grads(fn):
  """Returns the output, and gradients of a loss of all its elements."""

  def call(topk_idx, *arrays):
    def loss(*arrays):
      out = fn(topk_idx, *arrays)
      return jnp.sum(jnp.tanh(out)), out

    grads, out = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(*arrays)
    return out, grads

  return call


_DENSE_WITH_GRADS = _with_grads(_dense)


@pytest.mark.parametrize(
  "mesh, view",
  [("ep4", "global"), ("dp2_ep2", "local"), ("ep4", "local_unchecked")],
)
def test_output_and_gradients_are_those_of_the_dense_layer(mesh, view):
  case = Case(layer(mesh), "with_unused_choices")
  arrays = case.tokens(), case.weights(), _matrices()
  moe = VIEWS[view](case.layer)
  _check(_with_grads(moe), _DENSE_WITH_GRADS, case, *arrays)


@pytest.mark.parametrize("routing", ["to_one_expert", "idle"])
def test_experts_and_ranks_may_be_idle(routing):
  case = Case(layer("dp2_ep2", alignment=4), routing)
  arrays = case.tokens(), case.weights(), _matrices(gated=False)
  moe = _moe(case.layer)
  _check(_with_grads(moe), _DENSE_WITH_GRADS, case, *arrays)


def test_tokens_may_have_any_leading_dims():
  """The handle has those of a rank, and the routing of all tokens."""
  case = Case(layer(), lead=(1, T))
  arrays = case.tokens(), case.weights(), _matrices()
  moe = functools.partial(ep.moe_layer, return_handle=True)
  placed = _put(case, case.topk_idx, *arrays)
  out, handle = jax.jit(_moe(case.layer, moe))(*placed)
  expected = jit_quickly(_dense)(case.topk_idx, *arrays)
  assert_shards_close(out, np.asarray(expected), 1e-5, 1e-4)
  assert_same(Ops(handle).sizes(), case.oracle.sizes())
  assert (handle.layer, handle.token_shape) == (case.layer, (1, T))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision(dtype):
  case = Case(layer())
  arrays = case.tokens(dtype), case.weights(), _matrices(dtype=dtype)
  got = jax.jit(_moe(case.layer))(*_put(case, case.topk_idx, *arrays))
  assert got.dtype == dtype
  expected = np.asarray(jit_quickly(_dense)(case.topk_idx, *arrays))
  eps = float(jnp.finfo(dtype).eps)
  assert_shards_close(got, expected, 4 * eps, 4 * eps * abs(expected).max())


def test_callers_choose_the_activation_which_may_be_learned():
  case = Case(layer())
  tokens, weights, matrices = arrays = (
    case.tokens(),
    case.weights(),
    _matrices(gated=False),
  )

  def loss(factor, *arrays):
    scale = functools.partial(ep.moe_layer, activation=lambda x: factor * x)
    out = _moe(case.layer, scale)(*arrays)
    return out.sum(), out

  placed = _put(case, case.topk_idx, *arrays)
  with jax.checking_leaks():
    grad, got = jax.jit(jax.grad(loss, has_aux=True))(2.0, *placed)
  products = 2 * matrices["w_up"] @ matrices["w_down"]
  out = np.einsum("th,ehg->teg", tokens, products)
  chosen = np.eye(E)[case.topk_idx]
  expected = np.einsum("tk,tke,teh->th", weights, chosen, out)
  assert_shards_close(got, expected, 1e-4, 1e-4)
  assert_shards_close(grad, expected.sum() / 2, 1e-3, 1e-3)


def test_an_activation_may_have_an_infinite_derivative_at_zero():
  """No NaN comes from the rows that pad a slab, which hold zeros."""
  cases = [Case(layer("dp2_ep2", alignment=n), "idle_rank") for n in (1, 4)]
  arrays = cases[0].tokens(), cases[0].weights(), _matrices()
  moe = functools.partial(ep.moe_layer, activation=jnp.cbrt)
  exact, padded = (
    jax.jit(_with_grads(_moe(c.layer, moe)))(*_put(c, c.topk_idx, *arrays))
    for c in cases
  )
  jax.tree.map(
    lambda a, b: [
      np.testing.assert_allclose(s.data, t.data, 1e-4, 1e-4)
      for s, t in zip(a.addressable_shards, b.addressable_shards, strict=True)
    ],
    padded,
    exact,
  )


def test_gradients_reach_the_router():
  case = Case(layer())
  rng = np.random.default_rng(2)
  router = rng.normal(size=(H, E)).astype(np.float32)
  tokens, matrices = case.tokens(), _matrices()

  def grad(fn):
    def loss(router, tokens, matrices):
      logits = jnp.matmul(tokens, router, precision=lax.Precision.HIGHEST)
      topk_idx, weights = ep.route_topk(logits, case.layer.top_k)
      return jnp.sum(jnp.tanh(fn(topk_idx, tokens, weights, matrices)))

    return jax.jit(jax.grad(loss))

  _, tokens_, _, matrices_ = _put(case, case.topk_idx, tokens, tokens, matrices)
  router_ = to_global(router, case.layer.group.mesh)
  got = grad(_moe(case.layer))(router_, tokens_, matrices_)
  expected = np.asarray(grad(_dense)(router, tokens, matrices))
  assert abs(expected).max() > 0.1
  assert_shards_close(got, expected, 1e-4, 1e-4)


def test_dropped_choices_add_nothing_and_have_no_gradient():
  base = layer()
  dropping = dataclasses.replace(
    base, recv_capacity_per_rank=4, overflow="drop"
  )
  weights = Case(dropping, "skewed").weights()
  case = Case(dropping, "skewed", routing_weights=weights)  # it is fair
  arrays = case.tokens(), weights, _matrices()
  # The oracle decides what is kept: weights of ones come back from kept slots.
  ones = np.ones_like(arrays[1])
  rows = np.zeros((ranks(base), dropping.capacity, H), np.float32)
  _, kept = case.oracle.dispatch_bwd(
    (arrays[0], ones), (rows, np.ones(rows.shape[:2], np.float32))
  )
  assert 0 < kept.sum() < kept.size
  kept_idx = np.where(np.asarray(kept) > 0, case.topk_idx, -1)

  def expected(topk_idx, *arrays):
    del topk_idx
    return _dense(kept_idx, *arrays)

  moe = _moe(dropping)
  _check(_with_grads(moe), _with_grads(expected), case, *arrays)


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


@pytest.mark.parametrize(
  "mode, view",
  [
    pytest.param(
      "eager",
      "global",
      marks=pytest.mark.skipif(
        jax.process_count() > 1,
        reason="each process would compile each operation by itself",
      ),
    ),
    ("jit", "global"),
    ("jit", "local"),
  ],
)
def test_jax_debug_nans_finds_no_nan_of_ours(mode, view):
  """`jax.debug_nans` accepts a layer whose received rows are mostly tail."""
  case = Case(layer(), "one_token")
  moe = VIEWS[view](case.layer)

  def fn(topk_idx, tokens, *arrays):
    out, vjp = jax.vjp(lambda x: moe(topk_idx, x, *arrays), tokens)
    return out, vjp(out)

  # Eager mode compiles each operation, so it checks the forward pass only.
  fn = jax.jit(fn) if mode == "jit" else moe
  arrays = case.tokens(), case.weights(), _matrices(gated=False)
  arrays = _put(case, case.topk_idx, *arrays)
  with jax.debug_nans(True), ep.checked():
    jax.block_until_ready(fn(*arrays))


def test_the_tail_does_not_affect_results():
  """Results have the same bits, whether the tail is zero or NaN."""
  case = Case(layer(), "one_token")
  arrays = case.tokens(), case.weights(), _matrices()
  arrays = _put(case, case.topk_idx, *arrays)
  fn = _with_grads(_moe(case.layer))
  with jax.debug_nans(True):  # makes the tail zero
    expected = jax.jit(lambda *args: fn(*args))(*arrays)
  with ep.checked():  # makes the tail NaN
    actual = jax.jit(lambda *args: fn(*args))(*arrays)
  jax.tree.map(_assert_same_shards, actual, expected)


def _assert_same_shards(actual, expected):
  shards = zip(
    actual.addressable_shards, expected.addressable_shards, strict=True
  )
  for a, b in shards:
    assert not np.isnan(b.data).any()
    assert_shards_equal(a.data, np.asarray(b.data))
