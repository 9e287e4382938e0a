# SPDX-License-Identifier: Apache-2.0
"""Configurations, layers and their calls refuse bad arguments with a reason."""

import copy
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ep
from groups import E, failing, group, H, K
from layer_steps import draw_params

R = 4  # ranks
PLAIN = ep.MoEConfig(H, 6, E, K, gated=False, activation=jax.nn.gelu)


def test_a_bias_and_a_load_of_different_shapes():
  with pytest.raises(ValueError, match=r"bias has shape \(3,\), but load \(4,"):
    ep.moe.State(jnp.zeros(3)).after(jnp.zeros(4))


def test_the_bias_rises_for_experts_below_the_mean_load():
  load = jnp.array([[4.0, 2.0, 0.0], [1.0, 1.0, 1.0]])
  state = ep.moe.State(jnp.zeros((2, 3))).after(load, rate=0.5)
  np.testing.assert_array_equal(state.bias, [[-0.5, 0, 0.5], [0, 0, 0]])


@pytest.mark.parametrize("experts", [7, 60, 384])
@pytest.mark.parametrize("load", [0, 3, 1_000_003, 2**24 - 1, 2**26 + 8, 0.1])
def test_equal_loads_change_no_bias(experts, load):
  state = ep.moe.State(jnp.zeros(experts))
  after = jax.jit(ep.moe.State.after)(state, np.full(experts, load))
  np.testing.assert_array_equal(after.bias, state.bias)


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


@pytest.mark.parametrize("entry", [np.nan, np.inf])
def test_a_bias_that_every_token_would_choose_is_refused(entry):
  """With known entries in each call, with traced entries in checked mode."""
  layer, params = ep.MoE(PLAIN, group("ep4")), draw_params(PLAIN, np.zeros)
  bias, x = np.zeros(E, np.float32), np.zeros((R, H), np.float32)
  bias[:2] = -np.inf, entry
  words = rf"bias\[1\] = {entry}, so every token would choose expert 1"
  for kind in np.asarray, jnp.asarray:
    with pytest.raises(ValueError, match=words):
      layer(params, x, ep.moe.State(kind(bias)))
    with pytest.raises(ValueError, match=words):
      ep.route_topk(np.zeros((2, E), np.float32), K, selection_bias=kind(bias))

  def run(bias):
    return layer(params, x, ep.moe.State(bias))

  jax.block_until_ready(jax.jit(run)(bias))
  with ep.checked(), failing(layer.group) as error:
    jax.block_until_ready(jax.jit(run)(bias))
  assert re.search(words, str(error.value))
  bias[1] = -1
  with ep.checked():
    jax.block_until_ready(jax.jit(run)(bias))


@pytest.mark.parametrize("rate", [1e-3, np.inf, np.nan])
@pytest.mark.parametrize("entry", [0.0, np.inf, np.nan])
def test_an_update_keeps_a_bias_finite(rate, entry):
  before = np.array([0.5, -1, 3e38, -np.inf], np.float32)
  load = np.array([entry, 1, 2, 3], np.float32)
  after = jax.jit(ep.moe.State.after)(ep.moe.State(before), load, rate).bias
  np.testing.assert_array_equal(np.isfinite(after), np.isfinite(before))
  assert after[3] == -np.inf


@pytest.mark.parametrize(
  "change, message",
  [
    (dict(top_k=E + 1), "top_k = 9, but it must be in 1..num_experts = 8"),
    (dict(inner=0), "inner = 0, but it must be at least 1"),
    (dict(score="relu"), "score = 'relu', but it must be one of"),
    (dict(capacity_factor=-1.0), "capacity_factor = -1.0"),
    (dict(up_activation=jnp.tanh), "gated = False"),
    (dict(num_groups=3), "num_groups = 3 does not divide"),
    (dict(jitter=2.0), "jitter = 2.0"),
    (dict(drop_by="first"), "drop_by = 'first'"),
    (dict(scale=np.nan), "scale = nan, but it must be a finite number"),
    (dict(jitter=np.nan), "jitter = nan"),
    (dict(capacity_factor=np.inf), "capacity_factor = inf"),
    (dict(name="moe\0"), r"name = 'moe\\x00'"),
    (dict(tp_axis="x", fsdp_axis="x"), "tp_axis and fsdp_axis are both 'x'"),
    (dict(wire="fp8"), "wire = 'fp8'"),
    (dict(implementation="cutlass"), "implementation = 'cutlass', but it must"),
    (
      dict(implementation="tiles", deterministic=True),
      "implementation = 'tiles', but deterministic = True",
    ),
    (dict(wire="mxfp8", hidden=48), "rows have 48 elements"),
    (dict(wire="fp8_block128", hidden=64), "rows have 64 elements"),
  ],
)
def test_bad_values_of_a_config(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(PLAIN, **{"name": "moe_3", **change})


def test_ranks_with_different_tokens_cannot_split_inner_sizes():
  """With such a tp_axis, the layer would add outputs of different tokens."""
  config = dataclasses.replace(PLAIN, tp_axis="dp")
  with pytest.raises(ValueError, match=r"splits tokens.*data_axes=\(\)"):
    ep.MoE(config, group("dp2_ep2"))


def test_a_layer_is_on_a_mesh_or_a_group():
  with pytest.raises(TypeError, match="MoE: where = 4 is a int, but a mesh or"):
    ep.MoE(PLAIN, 4)


def test_a_copy_of_a_config_is_the_config():
  config = dataclasses.replace(PLAIN, up_activation=jnp.tanh, gated=True)
  assert copy.deepcopy([config])[0] is config


@pytest.mark.parametrize(
  "change",
  [
    *[{f.name: "no"} for f in dataclasses.fields(PLAIN) if f.type == "bool"],
    dict(biases=np.array([1, 0])),
    dict(deterministic=1),
    dict(scale="2"),
    dict(jitter=True),
    dict(num_groups="1"),
    dict(tp_axis=1),
    dict(capacity_factor="1.25"),
  ],
)
def test_bad_types_of_a_config(change):
  (name,) = change
  with pytest.raises(TypeError, match=f"MoEConfig.*: {name} = .* is expected"):
    dataclasses.replace(PLAIN, **change)


def test_a_layer_of_one_normalized_choice_warns_where_it_is_called():
  config = dataclasses.replace(PLAIN, top_k=1)
  layer = ep.MoE(config, group("ep4", top_k=1))
  params = draw_params(config, np.zeros)
  with pytest.warns(UserWarning, match="normalize=False") as seen:
    jax.eval_shape(layer, params, np.zeros((R, H), np.float32))
  assert {w.filename for w in seen} == {__file__}


def test_an_activation_is_a_function():
  with pytest.raises(TypeError, match="'gelu' is a str.*jax.nn.gelu"):
    dataclasses.replace(PLAIN, activation="gelu")


@pytest.mark.parametrize("dtype", ["int8", bool, "no dtype"])
def test_parameters_are_floats(dtype):
  with pytest.raises(TypeError, match="ep.moe.init: dtype = "):
    ep.moe.init(jax.random.key(0), PLAIN, dtype)


def test_each_expert_has_a_slot():
  with pytest.raises(ValueError, match="ep.moe.init: num_slots = 1"):
    ep.moe.init(jax.random.key(0), PLAIN, num_slots=1)


@pytest.mark.parametrize(
  "change, message",
  [
    (dict(x=np.zeros((R, H + 1), np.float32)), r"x has shape \(4, 8\)"),
    (dict(params={}), r"params holds \[\], but the config has"),
    (dict(router=np.zeros((H, E - 1))), r"params\['router'\] has shape"),
    (dict(router=np.zeros((H, E), int)), r"params\['router'\] is int64, but"),
    (dict(mask=np.ones(R + 1, bool)), r"mask has shape \(5,\)"),
    (dict(captured_idx=np.zeros((R, K))), "captured_idx is float32, but"),
    (dict(captured_idx=np.zeros(R, int)), r"captured_idx has shape \(4,\)"),
    (dict(state=np.zeros(E)), "state is a ndarray, but an ep.moe.State"),
    (
      dict(config=dataclasses.replace(PLAIN, balance="sequence")),
      "balance = 'sequence' needs",
    ),
  ],
)
def test_bad_arguments_of_a_call(change, message):
  mesh_group = group("ep4")
  params = draw_params(PLAIN, np.zeros)
  args = dict(params=params, x=np.zeros((R, H), np.float32))
  change = dict(change)
  layer = ep.MoE(change.pop("config", PLAIN), mesh_group)
  if "router" in change:
    change = dict(params={**params, **change})
  with pytest.raises((ValueError, TypeError), match=message):
    layer(**{**args, **change})


@pytest.mark.parametrize(
  "change, message",
  [
    (dict(num_experts=4), "num_experts = 4, but the group has 8"),
    (dict(hidden=H + 1), "but the group's rows have hidden_dim"),
    (dict(tp_axis="ep"), "tp_axis = 'ep', but it must be one of the mesh axes"),
    (
      dict(drop_by="fair", overflow="drop"),
      "drop_by = 'fair', but capacity_factor = None leaves room",
    ),
    (dict(drop_by="fair", capacity_factor=1.0), 'pass overflow="drop" as well'),
  ],
)
def test_a_config_that_does_not_fit_the_group(change, message):
  with pytest.raises(ValueError, match=message):
    ep.MoE(dataclasses.replace(PLAIN, **change), group("ep4"))


def test_parameters_that_are_no_arrays_are_named():
  layer, params = ep.MoE(PLAIN, group("ep4")), draw_params(PLAIN, np.zeros)
  x = np.zeros((R, H), np.float32)
  with pytest.raises(TypeError, match=r"params\['w_up'\] = None is a NoneType"):
    layer(params | dict(w_up=None), x)


def test_parameters_without_empty_slots_need_with_slots():
  config = dataclasses.replace(PLAIN, num_experts=7)
  layer, params = ep.MoE(config, group("ep4")), draw_params(config, np.zeros)
  with pytest.raises(ValueError, match="empty slots with ep.moe.with_slots"):
    layer(params, np.zeros((R, H), np.float32))
