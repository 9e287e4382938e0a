# SPDX-License-Identifier: Apache-2.0
"""route_topk and topk_from_map agree with NumPy, on one rank and on four."""

import functools
import itertools
import warnings

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from cases import jit_quickly
from conftest import (
  assert_shards_close,
  assert_shards_equal,
  make_mesh,
  to_global,
)
import ep
from ep._src.moe import router
from groups import E, failing, K, layer, of_one_process, spec, T
from parameters import logits_of

SCORES = "softmax", "sigmoid", "sqrtsoftplus"


def _route(logits, *args, **options):
  route = functools.partial(ep.route_topk, **options)
  return jit_quickly(lambda x: route(x, *args))(logits)


def _scores(logits, score):
  x = np.asarray(logits, np.float64)
  if score == "sigmoid":
    return 1 / (1 + np.exp(-x))
  if score == "sqrtsoftplus":
    return np.sqrt(np.log1p(np.exp(x)))
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_ids_and_weights_agree_with_the_formula(dtype):
  logits, bias = logits_of(2, 5, dtype=dtype), jnp.linspace(0.5, -0.5, E)
  keys = "score", "normalize", "selection_bias"
  values = itertools.product(SCORES, [False, True], [None, bias])
  every = [dict(zip(keys, x, strict=True)) for x in values]

  @jit_quickly
  def routes(x):
    return [ep.route_topk(x, K, scale=2.5, **options) for options in every]

  for (idx, weights), options in zip(routes(logits), every, strict=True):
    scores = _scores(logits, options["score"])
    order = scores
    if options["selection_bias"] is not None:
      order = scores + np.asarray(bias)
    expected = np.argsort(-order, axis=-1, kind="stable")[..., :K]
    chosen = np.take_along_axis(scores, expected, -1)
    if options["normalize"]:
      chosen /= chosen.sum(-1, keepdims=True)
    assert idx.dtype == jnp.int32 and weights.dtype == jnp.float32
    np.testing.assert_array_equal(idx, expected, str(options))
    np.testing.assert_allclose(
      weights, chosen * 2.5, rtol=1e-5, err_msg=str(options)
    )
    if order is not scores:  # The bias must be large enough to matter.
      unbiased = np.argsort(-scores, axis=-1, kind="stable")[..., :K]
      assert (unbiased != expected).any()


def test_large_logits_neither_tie_nor_overflow():
  logits = jnp.array([[1e4, 2e4, 3e4, -1e4, -2e4, -3e4, 0, 0]])
  for score in SCORES:
    idx, weights = _route(logits, K, score=score)
    np.testing.assert_array_equal(idx, [[2, 1, 0]])
    assert np.isfinite(weights).all()
    np.testing.assert_allclose(weights.sum(), 1.0, rtol=1e-6)
  underflowing = jnp.where(jnp.arange(E) == 0, 0.0, -1e4)[None]
  bias = jnp.where(jnp.arange(E) == 0, -2.0, 0.0)
  _, weights = _route(underflowing, 2, selection_bias=bias)
  np.testing.assert_allclose(weights, [[0.5, 0.5]])


def test_small_sqrtsoftplus_scores_keep_their_ratios():
  @jit_quickly
  def route_and_gradient(logits):
    route = functools.partial(ep.route_topk, top_k=E, score="sqrtsoftplus")
    gradient = jax.grad(lambda x: jnp.log(route(x)[1][0]))(logits)
    return route(logits)[1], gradient

  for at in -14, -16, -18, -90, -2e4:
    logits = np.float32(at) + np.linspace(-1.75, 1.75, E, dtype=np.float32)
    weights, gradient = route_and_gradient(logits)
    expected = np.sqrt(np.exp(np.float64(logits - logits[-1])))[::-1]
    expected /= expected.sum()
    np.testing.assert_allclose(weights, expected, rtol=2e-6)
    expected = -0.5 * expected[::-1] + 0.5 * np.eye(E)[-1]
    np.testing.assert_allclose(gradient, expected, rtol=4e-6)


def test_one_choice_whose_weight_never_changes_gives_a_warning():
  """The router has a gradient if K = 2, or if K = 1 and normalize=False."""

  def gradient(top_k, **options):
    def loss(x):
      return ep.route_topk(x, top_k, **options)[1][:, 0].sum()

    return jax.grad(loss)(logits_of(3))

  with pytest.warns(UserWarning, match="top_k = 1.*pass normalize=Fal") as seen:
    assert not gradient(1).any()
  assert {w.filename for w in seen} == {__file__}
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    assert gradient(1, normalize=False).any() and gradient(2).any()
    ep.route_topk(jnp.zeros((3, 1)), 1)  # there is nothing to route


def test_equal_groups_are_ordered_by_id():
  """A token prefers experts with -inf in its groups to any in other groups."""
  low = -jnp.inf
  logits = jnp.array([[0.0] * 8, [low, low, 0, low, 1, 1, low, low]])
  idx, _ = _route(logits, 4, num_groups=4, top_groups=2)
  np.testing.assert_array_equal(idx, [[0, 1, 2, 3], [4, 5, 2, 3]])


@pytest.mark.parametrize("normalize", [False, True])
def test_a_forced_choice_gets_the_weights_of_its_scores(normalize):
  """Unused entries have weight 0, and normalization ignores their scores."""
  logits = logits_of(4)
  forced = np.array([[7, 0, 3], [5, -1, 2], [-1, -1, 6], [-1, -1, -1]])

  def route(x):
    return ep.route_topk(
      x, K, normalize=normalize, scale=2.5, forced_idx=forced
    )

  def route_and_pull_back(x):
    (idx, weights), vjp = jax.vjp(route, x)
    return idx, weights, *vjp((np.zeros(idx.shape, jax.dtypes.float0), weights))

  idx, weights, gradient = jit_quickly(route_and_pull_back)(logits)
  expected = np.take_along_axis(_scores(logits, "softmax"), forced, -1)
  expected *= forced >= 0
  if normalize:
    expected /= np.maximum(expected.sum(-1, keepdims=True), 1e-30)
  assert idx.dtype == jnp.int32
  np.testing.assert_array_equal(idx, forced)
  np.testing.assert_allclose(weights, expected * 2.5, rtol=1e-5)
  assert np.isfinite(gradient).all()
  np.testing.assert_array_equal(gradient[3], np.zeros(E))


def test_the_choice_equals_lax_top_k():
  """The order includes ties, signed zeros, denormals, infinities and NaNs."""
  rng = np.random.default_rng(0)
  special = np.array(
    [0x7FC00000, 0xFFC00000, 0x7F800001, 0x7F800000, 0xFF800000]
    + [0, 0x80000000, 1, 0x80000001, 0x3F800000, 0xBF800000],
    np.uint32,
  ).view(np.float32)
  values = np.concatenate(
    [
      rng.normal(size=(64, 33)).astype(np.float32),
      rng.integers(-2, 3, size=(64, 33)).astype(np.float32),
      rng.choice(special, size=(256, 33)),
      rng.integers(2**32, size=(64, 33), dtype=np.uint32).view(np.float32),
      np.full((1, 33), 0xFFFFFFFF, np.uint32).view(np.float32),
    ]
  )
  np.testing.assert_array_equal(
    jit_quickly(functools.partial(router._best, k=33))(values),
    jax.lax.top_k(values, 33)[1],
  )


def test_ids_are_distinct_whatever_the_logits_are():
  logits = jnp.full((1, E), jnp.nan)
  for score in SCORES:
    idx, weights = _route(logits, K, score=score, num_groups=4, top_groups=2)
    assert len(set(np.asarray(idx[0]))) == K
    assert np.isnan(weights).all()


def _sharded_route(x, mask, cotangent):
  """Returns choices, weights and the gradient of weights, with many options."""
  (weights, idx), vjp = jax.vjp(
    lambda x: ep.route_topk(
      x,
      K,
      score="sigmoid",
      selection_bias=jnp.linspace(0.5, -0.5, E),
      mask=mask,
      num_groups=4,
      top_groups=2,
    )[::-1],
    x,
  )
  no_tangent = np.zeros(idx.shape, jax.dtypes.float0)
  return idx, weights, *vjp((cotangent, no_tangent))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_routing_is_sharded_as_the_logits_are(axis_type):
  """In the global view, the router and its gradient do not communicate."""
  mesh, spec = make_mesh({"dp": 2, "ep": 2}, (axis_type,) * 2), P("dp", "ep")
  logits, mask = logits_of(4, 6), np.arange(24).reshape(4, 6) % 5 > 0
  args = logits, mask, np.asarray(logits_of(4, 6)[..., :K])
  sharded = [to_global(x, mesh, spec) for x in args]
  with jax.set_mesh(mesh):
    program = jax.jit(_sharded_route).lower(*sharded).compile()
    got = program(*sharded)
  ep.assert_no_hidden_collectives(program)
  expected = jit_quickly(_sharded_route)(*args)
  assert_shards_equal(got[0], expected[0])
  for got_, expected_ in zip(got[1:], expected[1:], strict=True):
    assert got_.sharding.is_equivalent_to(sharded[0].sharding, 3)
    assert_shards_close(got_, expected_, rtol=1e-5, atol=1e-6)


def test_captured_ids_replace_the_choices_of_their_tokens():
  """The router chooses for a token with an id of -1, and engines use int16."""
  logits, mask = logits_of(24), np.arange(24) % 5 > 0
  captured = np.random.default_rng(3).random((24, E)).argsort(axis=-1)[:, :K]
  captured = captured.astype(np.int16)
  captured[::3] = captured[13, 1] = -1
  bias = np.linspace(0.5, -0.5, E, dtype=np.float32)

  def route(logits, cotangent):
    (weights, idx), vjp = jax.vjp(
      lambda x: ep.route_topk(
        x, K, selection_bias=bias, mask=mask, captured_idx=captured
      )[::-1],
      logits,
    )
    no_tangent = np.zeros(idx.shape, jax.dtypes.float0)
    return idx, weights, *vjp((cotangent, no_tangent))

  cotangent = np.random.default_rng(4).normal(size=(24, K)).astype(np.float32)
  idx, weights, gradient = jit_quickly(route)(logits, cotangent)
  chosen = np.argsort(-(_scores(logits, "softmax") + bias), kind="stable")
  is_captured = (captured >= 0).all(axis=-1, keepdims=True)
  expected = np.where(is_captured, captured, chosen[:, :K])
  np.testing.assert_array_equal(idx, np.where(mask[:, None], expected, -1))
  of_chosen = np.exp(np.float64(np.take_along_axis(logits, expected, -1)))
  of_chosen *= mask[:, None]
  of_chosen /= np.maximum(of_chosen.sum(-1, keepdims=True), 1e-30)
  np.testing.assert_allclose(weights, of_chosen, rtol=1e-5)
  pulled = cotangent - (of_chosen * cotangent).sum(-1, keepdims=True)
  of_logits = np.zeros(logits.shape)
  np.put_along_axis(of_logits, expected, of_chosen * pulled, -1)
  np.testing.assert_allclose(gradient, of_logits, 1e-4, 1e-6)


# topk_from_map


def draw_map(lead):
  """Draws a map of at most K experts per token, and its probabilities.

  The probabilities of other experts are NaN.
  """
  rng = np.random.default_rng(0)
  experts = rng.random((*lead, E)).argsort(-1)
  routing_map = experts < rng.integers(0, K + 1, (*lead, 1))
  probs = np.where(routing_map, rng.random((*lead, E)), np.nan)
  return routing_map, probs.astype(np.float32)


def choices_of_map(routing_map, probs):
  idx = np.full((*routing_map.shape[:-1], K), -1, np.int32)
  weights = np.zeros(idx.shape, np.float32)
  for row in np.ndindex(idx.shape[:-1]):
    (experts,) = np.nonzero(routing_map[row])
    idx[row][: len(experts)] = experts
    weights[row][: len(experts)] = probs[row][experts]
  return idx, weights


@pytest.mark.parametrize(
  "axis_type",
  [AxisType.Auto, pytest.param(AxisType.Explicit, marks=of_one_process)],
  ids=lambda t: t.name,
)
def test_choices_and_gradients_agree_with_the_map(axis_type):
  """Results are sharded like the map, without communication between ranks."""
  a_layer = layer("dp2_ep2", axis_type)
  mesh, sharded = a_layer.group.mesh, spec(a_layer)
  lead = 4 * T, 2
  routing_map, probs = draw_map(lead)
  scale = np.random.default_rng(1).random((*lead, K)).astype(np.float32)

  def fn(routing_map, probs, scale):
    def weigh(probs):
      idx, weights = ep.topk_from_map(routing_map, probs, K)
      return (weights * scale).sum(), (idx, weights)

    return jax.grad(weigh, has_aux=True)(probs)

  args = [to_global(x, mesh, sharded) for x in (routing_map, probs, scale)]
  with jax.set_mesh(mesh):
    program = jax.jit(fn).lower(*args).compile()
  gradient, (idx, weights) = program(*args)
  ep.assert_no_hidden_collectives(program, allow=["all-reduce"])
  expected = choices_of_map(routing_map, probs)
  assert_shards_equal(idx, expected[0])
  assert_shards_equal(weights, expected[1])
  expected_gradient = np.zeros_like(probs)
  for row in np.ndindex(lead):
    n = routing_map[row].sum()
    expected_gradient[row][expected[0][row][:n]] = scale[row][:n]
  assert_shards_equal(gradient, expected_gradient)
  for array in idx, weights, gradient:
    assert array.sharding.is_equivalent_to(args[0].sharding, 3)


@of_one_process
@pytest.mark.parametrize("top_k", [np.uint8(K), np.array(K)])
def test_top_k_is_any_integer(top_k):
  routing_map, probs = draw_map((T,))
  with jax.numpy_dtype_promotion("strict"):
    for fn in ep.route_topk, functools.partial(ep.topk_from_map, routing_map):
      jax.tree.map(
        np.testing.assert_array_equal, fn(probs, top_k), fn(probs, K)
      )


@of_one_process
def test_a_row_with_too_many_experts():
  """Its ids are minus the number of experts, which ep_prepare refuses."""
  a_layer = layer()
  routing_map, probs = draw_map((4 * T,))
  row = 2 * T + 1
  routing_map[row] = np.arange(E) < K + 2

  def choose(routing_map, probs):
    return ep.topk_from_map(routing_map, probs, K)

  args = [
    to_global(x, a_layer.group.mesh, spec(a_layer))
    for x in (routing_map, probs)
  ]
  idx, weights = jax.jit(choose)(*args)
  expected = choices_of_map(*draw_map((4 * T,)))
  expected[0][row], expected[1][row] = -(K + 2), np.nan
  assert_shards_equal(idx, expected[0])
  assert_shards_equal(weights, expected[1])
  with failing(a_layer.group) as error:
    jax.block_until_ready(
      jax.jit(ep.ep_prepare, static_argnums=0)(a_layer, idx)
    )
  assert f", rank 2: topk_idx[1, 0] = -{K + 2}, but" in str(error.value)
