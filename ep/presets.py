# SPDX-License-Identifier: Apache-2.0
"""Configurations of the MoE layers of published models.

    cfg = ep.presets.MIXTRAL_8X7B
    small = ep.presets.scaled(cfg, 16)  # 1/16 of the widths, for a laptop

A preset has the sizes, the router and the experts of one layer. Attention,
norms and the number of layers belong to the model around it. A comment above
each preset names the sources of its numbers.
"""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp

from ep._src.base import arguments as _arguments
from ep._src.moe.config import MoEConfig

# Sizes: config.json of mistralai/Mixtral-8x7B-Instruct-v0.1 on Hugging Face,
# revision eba92302. Router (a softmax over the chosen logits, which equals
# normalized scores) and SwiGLU: Jiang et al., "Mixtral of Experts", arXiv
# 2401.04088, section 2.1, and modeling_mixtral.py of transformers.
MIXTRAL_8X7B = MoEConfig(hidden=4096, inner=14336, num_experts=8, top_k=2)

# Sizes: the defaults of Qwen3MoeConfig in transformers, which names
# Qwen3-30B-A3B-Base as its example; we could not read the model's config.json.
# qwen3_30b_a3b.yaml of Ascend/MindSpeed-RL has the same sizes, and
# norm_topk_prob = true. modeling_qwen3_moe.py has no shared experts.
QWEN3_30B_A3B = MoEConfig(hidden=2048, inner=768, num_experts=128, top_k=8)

# Sizes: inference/configs/config_671B.json of
# github.com/deepseek-ai/DeepSeek-V3, at 9b4e978. Router (it ranks groups by the
# sum of their best two scores, and weights are scores without the selection
# bias) and shared expert: inference/model.py there, and DeepSeek-AI,
# "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 2.1.2. The selection
# bias is in `ep.moe.State`, because gradients do not train it.
DEEPSEEK_V3 = MoEConfig(
  hidden=7168,
  inner=2048,
  num_experts=256,
  top_k=8,
  shared_inner=2048,  # one shared expert of size moe_inter_dim
  score="sigmoid",
  scale=2.5,
  num_groups=8,
  top_groups=4,
)

# Sizes: README.md of github.com/MoonshotAI/Kimi-K2, at 11062d1. Router (as in
# DeepSeek-V3, but without groups): kimi-k2-1t.yml of
# github.com/AI-Hypercomputer/maxtext, at 7c7f628. That file quotes config.json
# of moonshotai/Kimi-K2-Instruct on Hugging Face, which we could not read.
KIMI_K2 = dataclasses.replace(
  DEEPSEEK_V3, num_experts=384, scale=2.827, num_groups=1, top_groups=1
)

# Sizes: GLM-4.5 Team, "GLM-4.5", arXiv 2508.06471, table 1. Router (as in
# DeepSeek-V3, but without groups): modeling_glm4_moe.py of transformers. Scale:
# glm4.5-355B-A32B.sh of github.com/THUDM/slime, because we could not read the
# model's config.json.
GLM_4_5 = MoEConfig(
  hidden=5120,
  inner=1536,
  num_experts=160,
  top_k=8,
  shared_inner=1536,
  score="sigmoid",
  scale=2.5,
)


def _silu_up_to_10(x: jax.Array) -> jax.Array:
  return jax.nn.silu(jnp.minimum(x, 10.0))


def _clipped_to_10(x: jax.Array) -> jax.Array:
  return jnp.clip(x, -10.0, 10.0)


# Sizes: configuration_deepseek_v4.py of transformers, whose defaults describe
# DeepSeek-V4-Flash, and deepseek4-284b.yml of MaxText, at 00a1eaa. Router and
# experts: inference/model.py of deepseek-ai/DeepSeek-V4-Flash on Hugging Face,
# revision 60d8d707, which we read in a derived repository. This revision also
# clamps the shared expert; the previous revision and transformers do not. The
# first three layers of the model choose experts by token id: pass the experts
# of these layers as `forced_idx`.
DEEPSEEK_V4_FLASH = MoEConfig(
  hidden=4096,
  inner=2048,
  num_experts=256,
  top_k=6,
  activation=_silu_up_to_10,
  up_activation=_clipped_to_10,
  shared_inner=2048,
  score="sqrtsoftplus",
  scale=1.5,
)

# DeepSeek-V4-Flash, but sizes from deepseek4-1600b.yml of MaxText, at bac1cfa.
DEEPSEEK_V4_PRO = dataclasses.replace(
  DEEPSEEK_V4_FLASH,
  hidden=7168,
  inner=3072,
  num_experts=384,
  shared_inner=3072,
  scale=2.5,
)

# Sizes: llama4-17b-16e.yml and llama4-17b-128e.yml of MaxText, at 5505348, and
# for Scout the defaults of Llama4TextConfig in transformers. Router (a sigmoid
# score multiplies the input of the expert) and shared expert (its input is the
# token itself): models/llama4/moe.py of github.com/meta-llama/llama-models, at
# 2b2e5b2. With top_k = 1 a normalized weight would always be 1, and the router
# would get no gradient. Scout has experts in every layer, Maverick in every
# second layer.
LLAMA_4_SCOUT = MoEConfig(
  hidden=5120,
  inner=8192,
  num_experts=16,
  top_k=1,
  shared_inner=8192,
  weigh="input",
  score="sigmoid",
  normalize=False,
)
LLAMA_4_MAVERICK = dataclasses.replace(LLAMA_4_SCOUT, num_experts=128)


def _clamped_swish(x: jax.Array) -> jax.Array:
  x = jnp.minimum(x, 7.0)
  return x * jax.nn.sigmoid(1.702 * x)


def _clamped_plus_one(x: jax.Array) -> jax.Array:
  return jnp.clip(x, -7.0, 7.0) + 1.0


# Sizes, clamped SwiGLU, biases, and softmax over the chosen logits:
# gpt_oss/torch/model.py of github.com/openai/gpt-oss, at 0568dfc, whose
# defaults describe the 120b model (ModelConfig, swiglu, MLPBlock).
GPT_OSS_120B = MoEConfig(
  hidden=2880,
  inner=2880,
  num_experts=128,
  top_k=4,
  activation=_clamped_swish,
  up_activation=_clamped_plus_one,
  biases=True,
  router_bias=True,
)

# Sizes: config.json of allenai/OLMoE-1B-7B-0924 on Hugging Face, revision
# c1b31da0. SwiGLU, and softmax over all logits without normalization:
# Muennighoff et al., "OLMoE", arXiv 2409.02060, and modeling_olmoe.py of
# transformers.
OLMOE_1B_7B = MoEConfig(
  hidden=2048, inner=1024, num_experts=64, top_k=8, normalize=False
)

_PRESETS = {k: v for k, v in globals().items() if isinstance(v, MoEConfig)}
BY_NAME = types.MappingProxyType({k.lower(): v for k, v in _PRESETS.items()})
__all__ = list(_PRESETS) + ["BY_NAME", "scaled"]


def scaled(cfg: MoEConfig, divisor: int) -> MoEConfig:
  """Divides the widths of a layer by a number, and keeps its router.

  Args:
    cfg: any configuration.
    divisor: divides `hidden`, `inner` and `shared_inner`.

  Raises:
    ValueError: the divisor does not divide one of these widths.
    TypeError: `cfg` is no `ep.MoEConfig`, or the divisor no integer.
  """
  what, cure = "ep.presets.scaled", "pass one of ep.presets"
  _arguments.check_type(what, "cfg", cfg, MoEConfig, cure)
  divisor = _arguments.integer(what, "divisor", divisor)
  widths = {
    name: getattr(cfg, name) for name in ("hidden", "inner", "shared_inner")
  }
  if divisor < 1 or any(width % divisor for width in widths.values()):
    raise ValueError(
      f"{what}: {divisor} does not divide"
      f" {', '.join(f'{k} = {v}' for k, v in widths.items())}; choose a divisor"
      " of all of them."
    )
  return dataclasses.replace(
    cfg, **{name: width // divisor for name, width in widths.items()}
  )
