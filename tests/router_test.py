# SPDX-License-Identifier: Apache-2.0
"""route_topk and the auxiliary losses agree with their formulas in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ep._src import router, router_losses

E, K = 8, 3


def _logits(*lead, dtype=jnp.float32, seed=0):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.normal(size=(*lead, E)) * 2, dtype)


def _scores(logits, score):
  x = np.asarray(logits, np.float64)
  if score == "sigmoid":
    return 1 / (1 + np.exp(-x))
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_ids_and_weights_are_those_of_the_formula(
  score, normalize, biased, dtype
):
  logits = _logits(2, 5, dtype=dtype)
  bias = jnp.linspace(0.5, -0.5, E) if biased else None
  idx, weights = jax.jit(
    lambda x: router.route_topk(
      x, K, score=score, normalize=normalize, scale=2.5, selection_bias=bias
    )
  )(logits)
  scores = _scores(logits, score)
  order = scores if bias is None else scores + np.asarray(bias)
  expected = np.argsort(-order, axis=-1, kind="stable")[..., :K]
  chosen = np.take_along_axis(scores, expected, -1)
  if normalize:
    chosen /= chosen.sum(-1, keepdims=True)
  assert idx.dtype == jnp.int32 and weights.dtype == jnp.float32
  np.testing.assert_array_equal(idx, expected)
  np.testing.assert_allclose(weights, chosen * 2.5, rtol=1e-5)
  if biased:  # checks that the bias is large enough to matter
    unbiased = np.argsort(-scores, axis=-1, kind="stable")[..., :K]
    assert (unbiased != expected).any()


def test_equal_scores_are_ordered_by_id():
  logits = jnp.array([[0.0] * E, [0, 1, 0, 1, 0, 1, 1, 0]])
  idx, _ = router.route_topk(logits, K)
  np.testing.assert_array_equal(idx, [[0, 1, 2], [1, 3, 5]])


def test_large_logits_neither_tie_nor_overflow():
  logits = jnp.array([[1e4, 2e4, 3e4, -1e4, -2e4, -3e4, 0, 0]])
  for score in ("softmax", "sigmoid"):
    idx, weights = router.route_topk(logits, K, score=score)
    np.testing.assert_array_equal(idx, [[2, 1, 0]])
    assert np.isfinite(weights).all()
    np.testing.assert_allclose(weights.sum(), 1.0, rtol=1e-6)
  underflowing = jnp.where(jnp.arange(E) == 0, 0.0, -1e4)[None]
  bias = jnp.where(jnp.arange(E) == 0, -2.0, 0.0)
  _, weights = router.route_topk(underflowing, 2, selection_bias=bias)
  np.testing.assert_allclose(weights, [[0.5, 0.5]])


def test_masked_tokens_choose_no_expert():
  logits = _logits(4)
  mask = jnp.array([True, False, True, False])
  idx, weights = router.route_topk(logits, K, mask=mask)
  all_idx, all_weights = router.route_topk(logits, K)
  np.testing.assert_array_equal(idx, np.where(mask[:, None], all_idx, -1))
  np.testing.assert_array_equal(
    weights, np.where(mask[:, None], all_weights, 0)
  )


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_weights_are_differentiable_and_the_bias_is_not(score, normalize):
  # Differences are in float64; the steps are too small to change the choice.
  logits = np.asarray(_logits(3), np.float64)
  cotangent = np.random.default_rng(1).normal(size=(3, K))
  bias = jnp.linspace(0.5, -0.5, E)

  def loss(x, bias):
    _, weights = router.route_topk(
      x, K, score=score, normalize=normalize, selection_bias=bias
    )
    return jnp.sum(weights * cotangent)

  def formula(x):
    scores = _scores(x, score)
    order = np.argsort(-(scores + np.asarray(bias)), -1, kind="stable")
    chosen = np.take_along_axis(scores, order[..., :K], -1)
    if normalize:
      chosen = chosen / chosen.sum(-1, keepdims=True)
    return np.sum(chosen * cotangent)

  got, got_bias = jax.grad(loss, (0, 1))(jnp.float32(logits), bias)
  step, expected = 1e-6, np.zeros_like(logits)
  for at in np.ndindex(logits.shape):
    up, down = logits.copy(), logits.copy()
    up[at] += step
    down[at] -= step
    expected[at] = (formula(up) - formula(down)) / (2 * step)
  np.testing.assert_allclose(got, expected, atol=1e-5)
  np.testing.assert_array_equal(got_bias, np.zeros(E))


def test_load_balancing_loss_is_one_when_even_and_e_at_worst():
  # Token t's best expert is t % E, so all are chosen equally often.
  even = jnp.eye(E) * 3.0
  idx, _ = router.route_topk(even, 1)
  np.testing.assert_allclose(router_losses.load_balancing_loss(even, idx), 1.0, 1e-6)
  worst = jnp.tile(jnp.eye(E)[2] * 50.0, (6, 1))
  idx, _ = router.route_topk(worst, 1)
  np.testing.assert_allclose(router_losses.load_balancing_loss(worst, idx), E, 1e-6)


def test_load_balancing_loss_is_the_formula_of_the_whole_batch():
  logits = _logits(4, 6)
  idx, _ = router.route_topk(logits, K)
  idx = idx.at[1, 2, 0].set(-1)
  f = np.bincount(np.asarray(idx)[idx >= 0], minlength=E)
  p = _scores(logits, "softmax").reshape(-1, E).mean(0)
  expected = E * np.sum(f / f.sum() * p)
  whole = router_losses.load_balancing_loss(logits, idx)
  ranks = jax.vmap(
    lambda x, i: router_losses.load_balancing_loss(x, i, axis_name="ranks"),
    axis_name="ranks",
  )(logits, idx)
  np.testing.assert_allclose(whole, expected, rtol=1e-5)
  np.testing.assert_allclose(ranks, np.full(4, expected), rtol=1e-5)
  # Descent along the gradient lowers the logits of the most chosen expert.
  gradient = jax.grad(router_losses.load_balancing_loss)(logits, idx)
  assert gradient.sum((0, 1))[f.argmax()] > 0


def test_z_loss():
  logits = _logits(3, 4)
  expected = np.mean(np.log(np.exp(np.asarray(logits, float)).sum(-1)) ** 2)
  np.testing.assert_allclose(router_losses.router_z_loss(logits), expected, rtol=1e-5)


@pytest.mark.parametrize(
  "options, message",
  [
    (dict(top_k=0), "choose between 1 and 8"),
    (dict(top_k=9), "choose between 1 and 8"),
    (dict(top_k=2.0), "route_topk: top_k = 2.0 is a float"),
    (dict(top_k=True), "route_topk: top_k = True is a bool"),
    (dict(top_k=2, score="relu"), r"one of \['softmax', 'sigmoid'\]"),
    (dict(top_k=2, selection_bias=jnp.zeros(7)), r"shape \(8,\)"),
    (dict(top_k=2, mask=jnp.ones((3, 1), bool)), r"shape \(3,\)"),
  ],
)
def test_bad_arguments_are_named(options, message):
  with pytest.raises((ValueError, TypeError), match=message):
    router.route_topk(_logits(3), **options)
