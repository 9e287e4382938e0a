# SPDX-License-Identifier: Apache-2.0
"""The losses of a router agree with their formulas; see router_ranks_test."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import jit_quickly
import ep
from router_cases import all_with_gradients, batch, E, K, logits_of, LOSSES


def _softmax(x):
  x = np.asarray(x, np.float64)
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def _imbalance(scores, idx):
  """Returns the formula of the papers for the tokens of one batch."""
  f = np.bincount(idx[idx >= 0], minlength=E)
  p = (scores / scores.sum(-1, keepdims=True)).mean(0)
  return E * np.sum(f / f.sum() * p)


def _expected(logits, idx, mask):
  """Returns each loss, computed from the tokens that count alone."""
  kept = np.float64(logits[mask])
  sigmoid = 1 / (1 + np.exp(-np.float64(logits)))
  soft = _softmax(kept)
  sequences = [
    _imbalance(s[m], i[m])
    for s, i, m in zip(sigmoid, idx, mask, strict=True)
    if m.any()
  ]
  return {
    "load": _imbalance(soft, idx[mask]),
    "load_sigmoid": _imbalance(sigmoid[mask], idx[mask]),
    "sequence": np.mean(sequences),
    "z": np.mean(np.log(np.exp(kept).sum(-1)) ** 2),
    "entropy": np.mean(-(soft * np.log(soft)).sum(-1)),
  }


@functools.cache
def _whole():
  return jit_quickly(all_with_gradients)(*batch())


def test_padding_counts_for_nothing():
  """Values are those of the other tokens alone; padding gets no gradient."""
  logits, idx, mask = batch()
  expected = _expected(logits, idx, mask)
  for name, (value, gradient) in _whole().items():
    np.testing.assert_allclose(value, expected[name], rtol=1e-5, err_msg=name)
    gradient = np.asarray(gradient)
    np.testing.assert_array_equal(gradient[~mask], 0.0, err_msg=name)
    assert np.isfinite(gradient).all() and gradient[mask].any(), name


def test_gradients_are_those_of_the_tokens_alone():
  """The kept tokens without any mask get the same gradient."""
  logits, idx, mask = batch()
  alone = jit_quickly(lambda x, i: all_with_gradients(x[None], i[None], None))(
    logits[mask], idx[mask]
  )
  for name in ("load", "load_sigmoid", "z", "entropy"):
    got = np.asarray(_whole()[name][1])[mask]
    np.testing.assert_allclose(got, alone[name][1][0], atol=1e-7, err_msg=name)


def test_a_batch_of_padding_has_no_loss_and_no_gradient():
  logits, idx, mask = batch()
  nothing = jit_quickly(all_with_gradients)(logits, idx, np.zeros_like(mask))
  for leaf in jax.tree.leaves(nothing):
    np.testing.assert_array_equal(leaf, np.zeros_like(leaf))


def test_entropy_is_zero_for_one_expert_and_log_e_for_all():
  one = jnp.where(jnp.arange(E) == 2, 0.0, -jnp.inf)[None]
  value, gradient = jit_quickly(jax.value_and_grad(ep.router_entropy))(one)
  assert value == 0 and np.isfinite(gradient).all()
  np.testing.assert_allclose(
    ep.router_entropy(jnp.ones((3, E))), np.log(E), rtol=1e-6
  )


@pytest.mark.parametrize(
  "call, message",
  [
    (lambda x, i: LOSSES["load"](x, i[1:], None), "must have the same tokens"),
    (lambda x, i: LOSSES["z"](x, i, jnp.ones(3, bool)), r"shape \(2, 4\)"),
    (lambda x, i: LOSSES["sequence"](x[0, 0], i[0, 0], None), "last two axes"),
    (lambda x, i: ep.load_balancing_loss(x, i, score="relu"), "one of"),
  ],
)
def test_bad_arguments_are_named(call, message):
  with pytest.raises(ValueError, match=message):
    call(jnp.zeros((2, 4, E)), jnp.zeros((2, 4, K), jnp.int32))


@jit_quickly
def _loss_of_best(logits):
  return ep.load_balancing_loss(logits, ep.route_topk(logits, 1)[0])


def test_load_balancing_loss_is_one_when_even_and_e_at_worst():
  # Token t's best expert is t % E, so all are chosen equally often.
  even, worst = np.eye(E) * 3.0, np.tile(np.eye(E)[2] * 50.0, (E, 1))
  for logits, expected in [(even, 1.0), (worst, E)]:
    loss = _loss_of_best(np.float32(logits))
    np.testing.assert_allclose(loss, expected, 1e-6)


def test_load_balancing_loss_is_the_formula_of_the_whole_batch():
  logits = logits_of(4, 6)
  idx = np.argsort(-logits, axis=-1)[..., :K]
  idx[1, 2, 0] = -1
  f = np.bincount(idx[idx >= 0], minlength=E)
  p = _softmax(logits).reshape(-1, E).mean(0)
  expected = E * np.sum(f / f.sum() * p)
  whole, gradient = jit_quickly(jax.value_and_grad(ep.load_balancing_loss))(
    logits, idx
  )
  ranks = jit_quickly(
    jax.vmap(
      lambda x, i: ep.load_balancing_loss(x, i, axis_name="ranks"),
      axis_name="ranks",
    )
  )(logits, idx)
  np.testing.assert_allclose(whole, expected, rtol=1e-5)
  np.testing.assert_allclose(ranks, np.full(4, expected), rtol=1e-5)
  # Descent along the gradient lowers the logits of the most chosen expert.
  assert gradient.sum((0, 1))[f.argmax()] > 0


def test_z_loss():
  logits = logits_of(3, 4)
  expected = np.mean(np.log(np.exp(np.asarray(logits, float)).sum(-1)) ** 2)
  np.testing.assert_allclose(ep.router_z_loss(logits), expected, rtol=1e-5)
