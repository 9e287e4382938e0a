# SPDX-License-Identifier: Apache-2.0
"""token_chunks gives what one exchange gives, in less memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ep
from groups import E, group, H, has_no_limits, K
from layer_steps import draw_params, put, run_forward, step_of, whole

F = 6  # inner size of an expert
R = 4  # ranks
CONFIG = ep.MoEConfig(
  H, F, E, K, activation=jnp.tanh, gated=False, shared_inner=3
)


def arrays(config, *lead):
  """Returns whole parameters and tokens, which are small whole numbers."""
  rng = np.random.default_rng(0)
  params = draw_params(config, lambda shape: rng.integers(-1, 2, shape))
  x = rng.integers(-1, 2, (R * lead[0], *lead[1:], config.hidden))
  return params, x.astype(np.float32)


def test_each_part_has_its_own_capacity():
  """Drops are those of a layer that gets each part by itself."""
  config = dataclasses.replace(CONFIG, overflow="drop", shared_inner=0)
  mesh_group = group(
    "dp2_ep2", recv_capacity_per_rank=11, max_tokens_per_rank=8
  )
  params, x = arrays(config, 8)
  parts = ep.MoE(dataclasses.replace(config, token_chunks=2), mesh_group)
  y, metrics = run_forward(parts, params, x)
  assert metrics.dropped > 0

  alone = ep.MoE(config, mesh_group)
  of_ranks = x.reshape(R, 2, 4, H)
  halves = [
    run_forward(alone, params, of_ranks[:, i].reshape(-1, H)) for i in range(2)
  ]
  ys = [y.reshape(R, 4, H) for y, _ in halves]
  np.testing.assert_array_equal(y, np.stack(ys, axis=1).reshape(x.shape))
  first, second = (metrics for _, metrics in halves)
  np.testing.assert_array_equal(metrics.drops, first.drops + second.drops)


@has_no_limits
def test_a_rank_has_room_for_a_part():
  """XLA's own figure of a step with gradients falls, and the capacity."""
  config = ep.MoEConfig(hidden=64, inner=64, num_experts=E, top_k=K)
  limited, unlimited = (
    group("ep4", max_tokens_per_rank=limit, hidden_dim=64)
    for limit in (64, None)
  )
  params, x = arrays(config, 64)
  peaks = []
  for num in 1, 8:
    of_parts = dataclasses.replace(config, token_chunks=num)
    for here in limited, unlimited:
      layer = ep.MoE(of_parts, here)
      assert layer.ep_layer.capacity_for(64 // num) == 64 * 2 * R // num
    args = *put(layer, params, x, x), None, None
    compiled = step_of(layer).lower(*args).compile()
    peaks.append(compiled.memory_analysis().temp_size_in_bytes)
  assert peaks[1] < 0.49 * peaks[0]


@functools.partial(jax.jit, static_argnums=0)
def transformed(layer, params, x):
  """Returns derivatives in both modes, and the output in several ways."""

  def output(x):
    return layer(params, x)[0]

  def loss(x):
    y = output(x)
    return (y * y).sum(), y

  grad = jax.grad(loss, has_aux=True)
  derivatives = jax.jvp(grad, (x,), (jnp.ones_like(x),))
  if layer.config.token_chunks == 1:
    return derivatives
  of_layers = jax.lax.scan(lambda x, _: (output(x), ()), x, length=2)[0]
  return derivatives, jax.vmap(output)(x), of_layers


def test_transformations():
  """vmap, scan over layers, and derivatives in both modes are the same."""
  params, x = arrays(CONFIG, 2, 2)

  def run(x, num):
    config = dataclasses.replace(CONFIG, token_chunks=num)
    layer = ep.MoE(config, group("ep4"))
    return whole(transformed(layer, *put(layer, params, x)))

  derivatives = run(x, num=1)
  (_, y), _ = derivatives
  (_, two_layers), _ = run(y, num=1)
  results = run(x, num=3), (derivatives, y, two_layers)
  for got, expected in zip(*map(jax.tree.leaves, results), strict=True):
    tolerance = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(got, expected, 1e-5, tolerance)


def test_what_cannot_be_in_parts_is_refused():
  with pytest.raises(ValueError, match="token_chunks = 0, but it must be at"):
    dataclasses.replace(CONFIG, token_chunks=0)
  with pytest.raises(ValueError, match="token_chunks = 2, but deterministic"):
    dataclasses.replace(CONFIG, token_chunks=2, deterministic=True)
  config = dataclasses.replace(
    CONFIG, token_chunks=2, capacity_factor=1.5, overflow="chunk"
  )
  with pytest.raises(ValueError, match="token_chunks = 2 splits the tokens of"):
    ep.MoE(config, group("ep4"))
