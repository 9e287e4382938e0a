# SPDX-License-Identifier: Apache-2.0
"""The router's losses agree with published formulas, on one and four ranks."""

import functools

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from cases import jit_quickly
from conftest import assert_shards_close, make_mesh, to_global
import ep
from groups import E, K
from parameters import logits_of

LOSSES = {
  "load": ep.load_balancing_loss,
  "load_sigmoid": functools.partial(ep.load_balancing_loss, score="sigmoid"),
  "load_sqrtsoftplus": functools.partial(
    ep.load_balancing_loss, score="sqrtsoftplus"
  ),
  "sequence": functools.partial(ep.sequence_balancing_loss, score="sigmoid"),
  "z": lambda logits, _, **options: ep.router_z_loss(logits, **options),
}


def batch():
  """Returns logits, choices and mask of 8 sequences, one of them empty.

  Masked tokens have choices, and logits that are NaN or large.
  """
  logits = logits_of(8, 6)
  idx = np.argsort(-logits, axis=-1)[..., :K]
  idx[1, 2, 0] = -1
  mask = np.random.default_rng(1).random((8, 6)) < 0.7
  mask[3] = False
  logits[~mask] = 50.0
  logits[3] = np.nan
  return logits, idx, mask


def all_with_gradients(logits, idx, mask, axis_name=()):
  options = dict(mask=mask, axis_name=axis_name)
  return {
    name: jax.value_and_grad(loss)(logits, idx, **options)
    for name, loss in LOSSES.items()
  }


def _softmax(x):
  x = np.asarray(x, np.float64)
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def _imbalance(scores, idx):
  """Computes the load-balancing loss of one batch by its published formula."""
  f = np.bincount(idx[idx >= 0], minlength=E)
  p = (scores / scores.sum(-1, keepdims=True)).mean(0)
  return E * np.sum(f / f.sum() * p)


def _expected(logits, idx, mask):
  """Computes each loss from the unmasked tokens only."""
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
    "load_sqrtsoftplus": _imbalance(np.sqrt(np.log1p(np.exp(kept))), idx[mask]),
    "sequence": np.mean(sequences),
    "z": np.mean(np.log(np.exp(kept).sum(-1)) ** 2),
  }


@functools.cache
def _whole():
  return jit_quickly(all_with_gradients)(*batch())


def test_padding_counts_for_nothing():
  logits, idx, mask = batch()
  expected = _expected(logits, idx, mask)
  for name, (value, gradient) in _whole().items():
    np.testing.assert_allclose(value, expected[name], rtol=1e-5, err_msg=name)
    gradient = np.asarray(gradient)
    np.testing.assert_array_equal(gradient[~mask], 0.0, err_msg=name)
    assert np.isfinite(gradient).all() and gradient[mask].any(), name
  # Descent along the gradient lowers the logits of the most chosen expert.
  chosen = np.bincount(idx[mask][idx[mask] >= 0])
  assert np.asarray(_whole()["load"][1]).sum((0, 1))[chosen.argmax()] > 0


def test_a_batch_of_padding_has_no_loss_and_no_gradient():
  logits, idx, mask = batch()
  nothing = jit_quickly(all_with_gradients)(logits, idx, np.zeros_like(mask))
  for leaf in jax.tree.leaves(nothing):
    np.testing.assert_array_equal(leaf, np.zeros_like(leaf))


def test_every_rank_has_the_value_and_gradient_of_the_whole_batch():
  mesh = make_mesh({"ep": 4})

  def ranks(logits, idx, mask):
    # Each rank returns its value, so that the test sees all ranks' values.
    results = all_with_gradients(logits, idx, mask, "ep")
    return {
      name: (jax.lax.pcast(value, "ep", to="varying")[None], gradient)
      for name, (value, gradient) in results.items()
    }

  program = jit_quickly(
    jax.shard_map(ranks, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
  )
  got = program(*(to_global(x, mesh, P("ep")) for x in batch()))
  for name, (value, gradient) in got.items():
    expected, expected_gradient = _whole()[name]
    assert_shards_close(value, np.full(4, expected), rtol=1e-6)
    assert_shards_close(gradient, expected_gradient, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
  "axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name
)
def test_losses_of_the_global_view_communicate_sums_only(axis_type):
  mesh = make_mesh({"dp": 2, "ep": 2}, (axis_type,) * 2)
  args = [to_global(x, mesh, P("dp", "ep")) for x in batch()]
  with jax.set_mesh(mesh):
    program = jax.jit(all_with_gradients).lower(*args).compile()
    got = program(*args)
  ep.assert_no_hidden_collectives(program, allow=["all-reduce"])
  for name, (value, gradient) in got.items():
    assert_shards_close(value, _whole()[name][0], rtol=1e-5)
    assert_shards_close(gradient, _whole()[name][1], rtol=1e-5, atol=1e-7)
