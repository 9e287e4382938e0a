# SPDX-License-Identifier: Apache-2.0
"""The presets have the published sizes and formulas of their models."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import jit_quickly
from conftest import make_mesh
import ep
from layer_steps import draw_params

# The number of MoE layers of each model, and its total and active parameters in
# billions. Sources: Mixtral, arXiv 2401.04088, abstract and table 1;
# Qwen3-30B-A3B, its model card; DeepSeek-V3, arXiv 2412.19437, abstract, and 61
# layers of which 3 are dense; gpt-oss, arXiv 2508.10925, table 1; OLMoE, arXiv
# 2409.02060, abstract and table 1; Kimi K2, arXiv 2507.20534, table 2; GLM-4.5,
# arXiv 2508.06471, table 1; DeepSeek-V4, the abstract of its report; Llama 4,
# its model card.
PUBLISHED = {
  "mixtral_8x7b": (32, 47.0, 13.0),
  "qwen3_30b_a3b": (48, 30.5, 3.3),
  "deepseek_v3": (58, 671.0, 37.0),
  "gpt_oss_120b": (36, 116.8, 5.1),
  "olmoe_1b_7b": (16, 6.9, 1.3),
  "kimi_k2": (60, 1040.0, 32.6),
  "glm_4_5": (89, 355.0, 32.0),
  "deepseek_v4_flash": (43, 284.0, 13.0),
  "deepseek_v4_pro": (61, 1600.0, 49.0),
  "llama_4_scout": (48, 109.0, 17.0),
  "llama_4_maverick": (24, 400.0, 17.0),
}


@pytest.mark.parametrize("name", ep.presets.BY_NAME)
def test_most_parameters_of_a_model_are_in_its_experts(name):
  """The other parameters are attention, embeddings and dense layers."""
  cfg = ep.presets.BY_NAME[name]
  layers, total, active = PUBLISHED[name]
  shapes = jax.eval_shape(lambda key: ep.moe.init(key, cfg), jax.random.key(0))
  sizes = {name: math.prod(x.shape) for name, x in shapes.items()}
  routed = sum(size for name, size in sizes.items() if name[:2] in ("w_", "b_"))
  whole = layers * sum(sizes.values()) / 1e9
  used = whole - layers * routed * (1 - cfg.top_k / cfg.num_experts) / 1e9
  assert 0.92 < whole / total < 0.99
  assert 0.35 < used / active < 0.95


def test_the_experts_of_gpt_oss_clamp_their_activations():
  experts = ep.presets.GPT_OSS_120B.experts
  gate = jnp.array([-9.0, -1.0, 0.5, 7.0, 8.0, 0.5, 0.5])
  up = jnp.array([2.0, 2.0, 2.0, 2.0, 2.0, -9.0, 9.0])
  got = experts.hidden(up, gate)
  bounded = np.minimum(gate, 7)
  swish = bounded / (1 + np.exp(-1.702 * np.float64(bounded)))
  want = swish * np.array([3, 3, 3, 3, 3, -6, 8])
  np.testing.assert_allclose(got, want, rtol=1e-6)


def _swiglu(x, gate, up, down, limit=np.inf):
  gate, up = np.minimum(x @ gate, limit), np.clip(x @ up, -limit, limit)
  return (gate / (1 + np.exp(-gate)) * up) @ down


def _of(params, kind, *expert):
  return [params[kind + n][expert] for n in ("gate", "up", "down")]


def _sigmoid(x):
  return 1 / (1 + np.exp(-x))


def _llama_4(params, x, bias):
  """Multiplies the inputs of experts by scores. Llama 4 has no router bias."""
  scores = _sigmoid(x @ params["router"])
  expert = (scores + bias).argmax()
  y = _swiglu(scores[expert] * x, *_of(params, "w_", expert))
  return y + _swiglu(x, *_of(params, "shared_"))


def _deepseek(params, x, bias, *, top_k, scale, score=_sigmoid, limit=np.inf):
  """Multiplies outputs by scores, and chooses by scores plus a bias."""
  scores = score(x @ params["router"])
  chosen = np.argsort(-(scores + bias))[:top_k]
  weights = scale * scores[chosen] / scores[chosen].sum()
  y = _swiglu(x, *_of(params, "shared_"), limit)
  for weight, expert in zip(weights, chosen, strict=True):
    y = y + weight * _swiglu(x, *_of(params, "w_", expert), limit)
  return y


def _deepseek_v4(params, x, bias):
  def score(x):
    return np.sqrt(np.log1p(np.exp(x)))

  options = dict(top_k=6, scale=1.5, score=score, limit=10)
  return _deepseek(params, x, bias, **options)


@pytest.mark.parametrize(
  "name, of_token",
  [
    ("llama_4_scout", _llama_4),
    ("deepseek_v4_flash", _deepseek_v4),
    ("kimi_k2", functools.partial(_deepseek, top_k=8, scale=2.827)),
    ("glm_4_5", functools.partial(_deepseek, top_k=8, scale=2.5)),
  ],
)
def test_a_layer_agrees_with_the_code_of_its_authors(name, of_token):
  """The NumPy formula for one token follows the authors' code."""
  cfg = ep.presets.scaled(ep.presets.BY_NAME[name], 256)
  rng = np.random.default_rng(0)
  params = draw_params(cfg, lambda shape: rng.normal(size=shape))
  params["router"] *= 0.3
  x = rng.normal(size=(16, cfg.hidden)).astype(np.float32)
  bias = rng.normal(size=cfg.num_experts).astype(np.float32) * 0.2
  layer = ep.MoE(cfg, make_mesh({"ep": 4}))
  with layer.group:
    got, _ = jit_quickly(layer)(params, x, ep.moe.State(bias))
  wide = {n: np.float64(p) for n, p in params.items()}
  expected = np.stack([of_token(wide, np.float64(t), bias) for t in x])
  np.testing.assert_allclose(got, expected, 1e-4, 1e-4 * np.abs(expected).max())
