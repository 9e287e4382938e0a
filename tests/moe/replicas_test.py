# SPDX-License-Identifier: Apache-2.0
"""A layer with replica slots has the bits of one without, on ranks alike full."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ep
from ep._src.moe.replicas import divide
from groups import E, group, H, K, T
from placement_test import in_slots, put, R, step_of, whole

F = 5
PLAIN = ep.MoEConfig(H, F, E, K, biases=True, shared_inner=3)
STATE = ep.moe.State(np.zeros(E, np.float32))


def odds(name):
  """Returns eight routings, from an even one to one of one rank's experts."""
  e = np.arange(E)
  return {
    "even": 0.0 * e,
    "noise": np.random.default_rng(1).normal(size=E) / 4,
    "zipf_half": -np.log(e + 1) / 2,
    "zipf": -np.log(e + 1),
    "halves": -1.0 * e * np.log(2),
    "one_hot": 9.0 * (e == 5),
    "one_rank": 9.0 * (e < 2),
    "one_idle_rank": -9.0 * (e > 5),
  }[name]


NAMES = [
  "even",
  "noise",
  "zipf_half",
  "zipf",
  "halves",
  "one_hot",
  "one_rank",
  "one_idle_rank",
]


def arrays(config, name):
  """Returns whole parameters, tokens, a cotangent and routed experts."""
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(lambda: ep.moe.init(jax.random.key(0), config))
  params = {
    n: rng.normal(size=s.shape).astype(np.float32) for n, s in shapes.items()
  }
  x, ct = rng.normal(size=(2, R * T, H)).astype(np.float32)
  keys = odds(name) + rng.gumbel(size=(R * T, E))
  params["router"] *= 0.1
  x[:, 0], params["router"][0] = 1, odds(name)
  del keys
  return params, x, ct


def layers(mesh, S, **options):
  ranks = 2 if mesh == "dp2_ep2" else 4
  config = dataclasses.replace(PLAIN, replica_slots=S, **options)
  wide = group(mesh, num_experts=E + ranks * S)
  return ep.MoE(PLAIN, group(mesh)), ep.MoE(config, wide), ranks


def run(layer, view, params, *tokens, placement=None):
  args, *others = put(layer, params, *tokens)
  return whole(step_of(layer, view)(args, *others, STATE, placement))


@pytest.mark.parametrize("name", NAMES)
def test_any_routing_fits_the_mean_and_has_the_same_bits(name):
  plain, layer, ranks = layers("ep4", E // 4)
  params, *tokens = arrays(PLAIN, name)
  expected = run(plain, "global", params, *tokens)
  y, metrics, grads, grad_x = run(layer, "global", params, *tokens)
  np.testing.assert_array_equal(y, expected[0])
  assert metrics.max_rank_rows == T * K
  jax.tree.map(
    np.testing.assert_array_equal,
    metrics._replace(max_rank_rows=None),
    expected[1]._replace(max_rank_rows=None),
  )
  np.testing.assert_array_equal(grad_x, expected[3])
  for n, grad in grads.items():
    np.testing.assert_allclose(grad, expected[2][n], 1e-4, 1e-4, err_msg=n)


@pytest.mark.parametrize("view", ["global", "local"])
def test_data_parallel_domains_have_copies_of_their_own(view):
  plain, layer, _ = layers("dp2_ep2", 1)
  params, *tokens = arrays(PLAIN, "one_rank")
  y, *_, grad_x = run(plain, view, params, *tokens)
  got, metrics, grads, got_x = run(layer, view, params, *tokens)
  np.testing.assert_array_equal(got, y)
  np.testing.assert_array_equal(got_x, grad_x)
  assert metrics.dropped == 0
