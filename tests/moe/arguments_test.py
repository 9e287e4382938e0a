# SPDX-License-Identifier: Apache-2.0
"""Configurations, layers and their calls refuse bad arguments with a reason."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np
import pytest

from cases import jit_quickly
from conftest import assert_shards_equal, make_mesh, TIMEOUT_S
import ep
from groups import BACKEND, E, failing, group, H, K, of_one_process, T
from layer_steps import (
  assert_close,
  draw_params,
  put,
  run_forward,
  whole,
)

R = 4  # ranks
PLAIN = ep.MoEConfig(H, 6, E, K, gated=False, activation=jax.nn.gelu)


def test_a_bias_and_a_load_of_different_shapes():
  with pytest.raises(ValueError, match=r"bias has shape \(3,\), but load \(4,"):
    ep.moe.State(jnp.zeros(3)).after(jnp.zeros(4))


@pytest.mark.parametrize("experts", [7, 60, 384])
def test_loads_next_to_the_mean_move_the_bias(experts):
  """float32 cannot represent the sum of these loads, nor E times a load."""
  rng = np.random.default_rng(experts)
  load = rng.integers(0, 2_000_000, (200, experts))
  mean = load.mean(axis=1).astype(int)
  load[:, 1:4] = mean[:, None] + [-1, 0, 1]
  load[:, 0] += experts * mean - load.sum(axis=1)  # makes `mean` exact
  load = load[(load[:, 0] >= 0) & (load[:, 0] < 2**24)]
  assert len(load) > 20 and (load.sum(axis=1) == experts * load[:, 2]).all()
  state = ep.moe.State(jnp.zeros(load.shape))
  after = jax.jit(ep.moe.State.after)(state, load, rate=1.0)
  expected = np.sign(load.sum(axis=1, keepdims=True) - experts * load)
  np.testing.assert_array_equal(after.bias, expected)


def test_a_narrow_bias_is_refused():
  """In bfloat16, 100 steps of -0.001 from 0.5 end at 0.305 instead of 0.4."""
  state = ep.moe.State(jnp.full(E, 0.5, jnp.bfloat16))
  with pytest.raises(TypeError, match="bias is bfloat16, but float32 is exp"):
    state.after(jnp.zeros(E))
  layer, params = ep.MoE(PLAIN, group("ep4")), draw_params(PLAIN, np.zeros)
  with pytest.raises(TypeError, match="state.bias is bfloat16, but float32"):
    layer(params, np.zeros((R, H), np.float32), state)


@pytest.mark.parametrize(
  "rate, entry", [(1e-3, np.inf), (1e-3, np.nan), (np.inf, 0.0)]
)
def test_an_update_keeps_a_bias_finite(rate, entry):
  before = np.array([0.5, -1, 3e38, -np.inf], np.float32)
  load = np.array([entry, 1, 2, 3], np.float32)
  after = jax.jit(ep.moe.State.after)(ep.moe.State(before), load, rate).bias
  np.testing.assert_array_equal(np.isfinite(after), np.isfinite(before))
  assert after[3] == -np.inf


PLACED = ep.Placement(np.roll(np.arange(E), 3))


@of_one_process
def test_errors_name_wrong_choices_as_the_caller_wrote_them():
  """Errors name neither the slot of an expert nor the token of a chunk.

  Engines that capture ids clear their buffers to 0, an expert's id, before.
  """
  layer = ep.MoE(dataclasses.replace(PLAIN, token_chunks=T), group("ep4"))
  ids = np.tile(np.arange(K, dtype=np.int32), (R * T, 1))
  x = np.zeros((R * T, H), np.float32)
  program = jax.jit(functools.partial(layer, placement=PLACED))

  def run(ids):
    params, *tokens = put(layer, draw_params(PLAIN, np.zeros), x, ids)
    jax.block_until_ready(program(params, tokens[0], captured_idx=tokens[1]))

  run(ids)
  for choices, fault in [
    ([3, 2, 3], "topk_idx[3, 2] = 3 repeats an expert of token 3;"),
    ([0, 0, 0], "topk_idx[3, 1] = 0 repeats an expert of token 3;"),
    ([0, E, 1], "topk_idx[3, 1] = 8, but num_experts = 8;"),
    ([-2, 0, 1], "topk_idx[3, 0] = -2, but num_experts = 8;"),
  ]:
    ids[2 * T + 3] = choices
    with failing(layer.group) as error:
      run(ids)
    assert f'ep_prepare(layer "moe"), rank 2: {fault}' in str(error.value)


@of_one_process
def test_padded_batches_take_ids_of_unsigned_dtypes():
  """vLLM stores ids in the narrowest unsigned dtype, which has no -1."""
  layer = ep.MoE(PLAIN, group("dp2_ep2"))
  rng = np.random.default_rng(0)
  params = draw_params(PLAIN, lambda shape: rng.normal(size=shape))
  ids, x = np.tile(np.array([6, 1, 3], np.uint8), (2, 3, 1)), np.ones((2, 3, H))
  run = functools.partial(layer, put(layer, params)[0], np.float32(x))
  y, metrics = run(pad=True, captured_idx=ids)
  np.testing.assert_array_equal(metrics.load, np.isin(range(E), ids) * 6)
  np.testing.assert_array_equal(y, run(pad=True, forced_idx=ids)[0])


def test_a_tensor_parallel_layer_makes_its_group_and_parameters():
  """An axis whose ranks hold the same tokens splits the experts' inner sizes.

  The layer places parameters and state on the given mesh.
  """
  mesh = make_mesh({"ep": 2, "tp": 2})
  config = dataclasses.replace(PLAIN, tp_axis="tp", shared_inner=4)
  options = dict(timeout_s=TIMEOUT_S, backend=BACKEND, max_tokens_per_rank=T)
  layer = ep.MoE(config, mesh, **options)
  with layer.group as here:
    assert here.data_axes == ()
    assert (here.hidden_dim, here.top_k) == (config.hidden, K)
    params, state = layer.init(jax.random.key(0)), layer.init_state()
    for name, spec in layer.specs().items():
      assert params[name].sharding == NamedSharding(mesh, spec)
    first = jit_quickly(functools.partial(ep.moe.init, config=config))
    expected = whole(first(jax.random.key(0)))
    assert_close(whole(params), expected, 1e-6, 1e-6)
    load = np.arange(E, dtype=np.float32)
    state = jax.jit(ep.moe.State.after)(state, load)
    bias = np.float32(1e-3) * np.sign(load.mean() - load)
    assert_shards_equal(state.bias, bias)


@of_one_process
def test_metrics_count_rows_of_the_busiest_rank_of_any_capacity():
  config = dataclasses.replace(PLAIN, capacity_factor=1.0, overflow="drop")
  layer = ep.MoE(config, group("ep4"))
  ids = np.tile(np.int32([0, 1, 2]), (R * T, 1))
  x = np.ones((R * T, H), np.float32)
  _, metrics = run_forward(layer, draw_params(PLAIN, np.ones), x, ids)
  assert metrics.max_rank_rows == 2 * R * T  # the first rank has two experts
  assert metrics.dropped == 3 * R * T - 2 * T * K
