# SPDX-License-Identifier: Apache-2.0
"""The presets have the sizes of the models that they are named after."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ep

# The layers with experts of each model, and how many billions of parameters the
# model has and a token uses: Mixtral, arXiv 2401.04088, abstract and table 1;
# Qwen3-30B-A3B, its model card; DeepSeek-V3, arXiv 2412.19437, abstract, and 61
# layers of which 3 are dense; gpt-oss, arXiv 2508.10925, table 1; OLMoE, arXiv
# 2409.02060, abstract and table 1.
PUBLISHED = {
  "mixtral_8x7b": (32, 47.0, 13.0),
  "qwen3_30b_a3b": (48, 30.5, 3.3),
  "deepseek_v3": (58, 671.0, 37.0),
  "gpt_oss_120b": (36, 116.8, 5.1),
  "olmoe_1b_7b": (16, 6.9, 1.3),
}


def test_public_names_are_those_of_presets():
  others = {"by_name", "scaled"}
  assert {n.lower() for n in ep.presets.__all__} == {
    *ep.presets.BY_NAME
  } | others


@pytest.mark.parametrize("name", ep.presets.BY_NAME)
def test_most_parameters_of_a_model_are_in_its_experts(name):
  """What remains is attention, embeddings and dense layers."""
  cfg = ep.presets.BY_NAME[name]
  layers, total, active = PUBLISHED[name]
  shapes = jax.eval_shape(lambda key: ep.moe.init(key, cfg), jax.random.key(0))
  sizes = {name: math.prod(x.shape) for name, x in shapes.items()}
  routed = sum(size for name, size in sizes.items() if name[:2] in ("w_", "b_"))
  whole = layers * sum(sizes.values()) / 1e9
  used = whole - layers * routed * (1 - cfg.top_k / cfg.num_experts) / 1e9
  assert 0.92 < whole / total < 0.99
  assert 0.5 < used / active < 0.95


def test_a_config_prints_what_differs_from_the_defaults():
  text = repr(ep.presets.QWEN3_30B_A3B)
  assert eval(text, vars(ep)) == ep.presets.QWEN3_30B_A3B
  assert "None" not in text and "tp_axis" not in text


def test_the_experts_of_gpt_oss_clamp_their_activations():
  experts = ep.presets.GPT_OSS_120B.experts
  gate = jnp.array([-9.0, -1.0, 0.5, 7.0, 8.0, 0.5, 0.5])
  up = jnp.array([2.0, 2.0, 2.0, 2.0, 2.0, -9.0, 9.0])
  got = experts.hidden(up, gate)
  bounded = np.minimum(gate, 7)
  swish = bounded / (1 + np.exp(-1.702 * np.float64(bounded)))
  want = swish * np.array([3, 3, 3, 3, 3, -6, 8])
  np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_scaled_preset_keeps_its_router_and_divides_its_widths():
  cfg = ep.presets.DEEPSEEK_V3
  small = ep.presets.scaled(cfg, 64)
  widths = small.hidden, small.inner, small.shared_inner
  assert widths == (7168 // 64, 2048 // 64, 2048 // 64)
  names = "hidden", "inner", "shared_inner"
  back = {name: getattr(cfg, name) for name in names}
  assert dataclasses.replace(small, **back) == cfg
  with pytest.raises(ValueError, match="7 does not divide hidden = 4096"):
    ep.presets.scaled(ep.presets.MIXTRAL_8X7B, 7)
  with pytest.raises(ValueError, match="0 does not divide"):
    ep.presets.scaled(cfg, 0)
