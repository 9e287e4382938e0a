# SPDX-License-Identifier: Apache-2.0
"""token_chunks gives what one exchange gives, in less memory.

Where gradients of parameters are compared, numbers are whole and small, so that
sums have the same bits in any order.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from cases import GPU
from conftest import assert_shards_close, assert_shards_equal, to_global
import ep
from groups import E, group, H, has_no_limits, K, T

F = 6  # inner size of an expert
R = 4  # ranks

CONFIG = ep.MoEConfig(
  H,
  F,
  E,
  K,
  activation=jax.nn.relu,
  gated=False,
  biases=True,
  shared_inner=3,
  normalize=False,
)


def arrays(mesh_group, config, seed=0, lead=(T,)):
  """Returns parameters and tokens of small whole numbers, on the mesh."""
  rng = np.random.default_rng(seed)
  mesh = mesh_group.mesh
  specs = ep.moe.partition_specs(config, mesh_group.axis_name)
  shapes = jax.eval_shape(
    lambda key: ep.moe.init(key, config), jax.random.key(0)
  )

  def whole(shape):
    return rng.integers(-1, 2, shape).astype(np.float32)

  params = {
    n: to_global(whole(shape.shape), mesh, specs[n])
    for n, shape in shapes.items()
  }
  spec = PartitionSpec(mesh_group.token_axes)
  x = whole((R * lead[0], *lead[1:], config.hidden))
  return params, to_global(x, mesh, spec)


def outputs(layer):
  """Returns a function to the output, the metrics, and gradients of both."""

  def loss(params, x):
    y, metrics = layer(params, x)
    return (y * jnp.round(x)).sum() + metrics.z_loss, (y, metrics)

  return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))


@pytest.mark.parametrize("num", [2, 3, 99])
@pytest.mark.parametrize("mesh", ["ep4", "dp2_ep2"])
def test_results_are_those_of_one_exchange(mesh, num):
  mesh_group = group(mesh)
  whole = ep.MoE(CONFIG, mesh_group)
  parts = ep.MoE(dataclasses.replace(CONFIG, token_chunks=num), mesh_group)
  args = arrays(mesh_group, CONFIG)
  (grads, g_x), (y, metrics) = outputs(whole)(*args)
  got_grads, (got_y, got_metrics) = outputs(parts)(*args)
  compare = assert_shards_equal if not GPU else assert_shards_close
  host = jax.experimental.multihost_utils.process_allgather
  everything = functools.partial(host, tiled=True)
  compare(got_y, everything(y))
  compare(got_grads[1], everything(g_x))
  jax.tree.map(lambda a, b: compare(a, everything(b)), got_metrics, metrics)
  for name, grad in grads.items():
    assert_shards_close(got_grads[0][name], everything(grad), 1e-6, 1e-5)


def test_each_part_has_its_own_capacity():
  """Drops and moves are those of a layer that gets each part by itself."""
  config = dataclasses.replace(
    CONFIG, overflow="drop", num_candidates=K + 2, shared_inner=0
  )
  mesh_group = group(
    "dp2_ep2", recv_capacity_per_rank=11, max_tokens_per_rank=8
  )
  lead = (8,)
  params, x = arrays(mesh_group, config, lead=lead)
  layer = ep.MoE(dataclasses.replace(config, token_chunks=2), mesh_group)
  y, metrics = jax.jit(layer)(params, x)
  assert metrics.dropped > 0
  assert metrics.moved > 0

  @jax.jit
  def one_by_one(params, x):
    whole = ep.MoE(config, mesh_group)
    of_ranks = x.reshape(R, 2, 4, H)
    halves = [whole(params, of_ranks[:, i].reshape(-1, H)) for i in range(2)]
    ys = [y.reshape(R, 4, H) for y, _ in halves]
    drops = sum(metrics.drops for _, metrics in halves)
    moved = sum(metrics.moved for _, metrics in halves)
    return jnp.stack(ys, axis=1).reshape(x.shape), drops, moved

  host = jax.experimental.multihost_utils.process_allgather
  expected, drops, moved = one_by_one(params, x)
  assert_shards_equal(y, host(expected, tiled=True))
  np.testing.assert_array_equal(metrics.drops, drops)
  assert metrics.moved == moved


@has_no_limits
@pytest.mark.parametrize("limit", [None, 64])
def test_a_rank_has_room_for_a_part(limit):
  """XLA's own figure of a step with gradients falls, and the capacity."""
  config = ep.MoEConfig(hidden=64, inner=64, num_experts=E, top_k=K)
  mesh_group = group("ep4", max_tokens_per_rank=limit, hidden_dim=64)
  params, x = arrays(mesh_group, config, lead=(64,))
  peaks, capacities = [], []
  for num in 1, 2, 4, 8:
    layer = ep.MoE(dataclasses.replace(config, token_chunks=num), mesh_group)
    compiled = outputs(layer).lower(params, x).compile()
    peaks.append(compiled.memory_analysis().temp_size_in_bytes)
    capacities.append(layer.ep_layer.capacity_for(64 // num))
  assert capacities == [64 * 2 * R // num for num in (1, 2, 4, 8)]
  print(peaks)
  assert peaks[1] < 0.7 * peaks[0]
  assert peaks[2] < 0.7 * peaks[1]
  assert peaks[3] < peaks[2]


def test_transformations():
  """vmap, scan over layers, and derivatives in both modes are the same."""
  mesh_group = group()
  config = dataclasses.replace(CONFIG, activation=jnp.tanh)
  whole = ep.MoE(config, mesh_group)
  parts = ep.MoE(dataclasses.replace(config, token_chunks=2), mesh_group)
  params, x = arrays(mesh_group, config, lead=(2, 2))

  def run(layer, params, x):
    def both(x):
      return layer(params, x)[0]

    def two_layers(x):
      return jax.lax.scan(lambda x, _: (both(x), ()), x, length=2)[0]

    y, tangent = jax.jvp(both, (x,), (jnp.ones_like(x),))
    grad = jax.grad(lambda x: both(x).sum())
    again = jax.grad(lambda x: (grad(x) ** 2).sum())
    return y, tangent, again(x), jax.vmap(both)(x), two_layers(x)

  host = jax.experimental.multihost_utils.process_allgather
  got = jax.jit(functools.partial(run, parts))(params, x)
  expected = jax.jit(functools.partial(run, whole))(params, x)
  for a, b in zip(got, expected, strict=True):
    b = host(b, tiled=True)
    assert_shards_close(a, b, 1e-5, 1e-5 * np.abs(b).max())


def test_what_cannot_be_in_parts_is_refused():
  with pytest.raises(ValueError, match="token_chunks = 0, but it must be at"):
    dataclasses.replace(CONFIG, token_chunks=0)
  with pytest.raises(ValueError, match="token_chunks = 2, but deterministic"):
    dataclasses.replace(CONFIG, token_chunks=2, deterministic=True)
  config = dataclasses.replace(
    CONFIG, token_chunks=2, capacity_factor=1.5, overflow="chunk"
  )
  with pytest.raises(ValueError, match="token_chunks = 2 splits the tokens of"):
    ep.MoE(config, group())
