# SPDX-License-Identifier: Apache-2.0
"""The MoE layers of published models, as configurations.

    cfg = ep.presets.MIXTRAL_8X7B
    small = ep.presets.scaled(cfg, 16)  # a 16th of the widths, for a laptop

A preset holds what the layer computes: its sizes, its router and its experts.
Attention, norms and the number of layers belong to the model around it. The
comment at each preset says where its numbers come from.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp

from ep._src.moe.config import MoEConfig

__all__ = [
  "BY_NAME",
  "DEEPSEEK_V3",
  "GPT_OSS_120B",
  "MIXTRAL_8X7B",
  "OLMOE_1B_7B",
  "QWEN3_30B_A3B",
  "scaled",
]

# The configuration: config.json of mistralai/Mixtral-8x7B-Instruct-v0.1 on
# Hugging Face, revision eba92302. The softmax over the chosen logits, which is
# what normalizing the scores means, and SwiGLU: Jiang et al., "Mixtral of
# Experts", arXiv 2401.04088, section 2.1, and modeling_mixtral.py of
# transformers.
MIXTRAL_8X7B = MoEConfig(hidden=4096, inner=14336, num_experts=8, top_k=2)

# The configuration: its own config.json could not be read. The sizes are the
# defaults of Qwen3MoeConfig in transformers, whose example is
# Qwen3-30B-A3B-Base. The sizes, and norm_topk_prob = true, are also in
# qwen3_30b_a3b.yaml of Ascend/MindSpeed-RL. It has no shared experts:
# modeling_qwen3_moe.py has none.
QWEN3_30B_A3B = MoEConfig(hidden=2048, inner=768, num_experts=128, top_k=8)

# The configuration: inference/configs/config_671B.json of
# github.com/deepseek-ai/DeepSeek-V3, at 9b4e978. The router (groups by the sum
# of their best two, weights without the bias of the choice) and the shared
# expert: inference/model.py there, and DeepSeek-AI, "DeepSeek-V3 Technical
# Report", arXiv 2412.19437, section 2.1.2. The bias of the choice is in the
# `ep.moe.State`, since gradients do not train it.
DEEPSEEK_V3 = MoEConfig(
  hidden=7168,
  inner=2048,
  num_experts=256,
  top_k=8,
  shared_inner=2048,  # n_shared_experts = 1, of moe_inter_dim
  score="sigmoid",
  scale=2.5,
  num_groups=8,
  top_groups=4,
)


def _clamped_swish(x: jax.Array) -> jax.Array:
  x = jnp.minimum(x, 7.0)
  return x * jax.nn.sigmoid(1.702 * x)


def _clamped_plus_one(x: jax.Array) -> jax.Array:
  return jnp.clip(x, -7.0, 7.0) + 1.0


# The configuration, the clamped SwiGLU, the biases and the softmax over the
# chosen logits: gpt_oss/torch/model.py of github.com/openai/gpt-oss, at
# 0568dfc, whose defaults describe the 120b model (ModelConfig, swiglu,
# MLPBlock).
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

# The configuration: config.json of allenai/OLMoE-1B-7B-0924 on Hugging Face,
# revision c1b31da0. SwiGLU, and softmax over all logits without normalization:
# Muennighoff et al., "OLMoE", arXiv 2409.02060, and modeling_olmoe.py of
# transformers.
OLMOE_1B_7B = MoEConfig(
  hidden=2048, inner=1024, num_experts=64, top_k=8, normalize=False
)

BY_NAME = types.MappingProxyType(
  {
    "mixtral_8x7b": MIXTRAL_8X7B,
    "qwen3_30b_a3b": QWEN3_30B_A3B,
    "deepseek_v3": DEEPSEEK_V3,
    "gpt_oss_120b": GPT_OSS_120B,
    "olmoe_1b_7b": OLMOE_1B_7B,
  }
)


def scaled(cfg: MoEConfig, divisor: int) -> MoEConfig:
  """Returns a configuration with a part of the widths, and the same router.

  Args:
    cfg: any configuration.
    divisor: `hidden`, `inner` and `shared_inner` are divided by it.

  Raises:
    ValueError: it does not divide one of them.
  """
  widths = {
    name: getattr(cfg, name) for name in ("hidden", "inner", "shared_inner")
  }
  if divisor < 1 or any(width % divisor for width in widths.values()):
    raise ValueError(
      f"presets.scaled: {divisor} does not divide"
      f" {', '.join(f'{k} = {v}' for k, v in widths.items())}; choose a divisor"
      " of all of them."
    )
  return dataclasses.replace(
    cfg, **{name: width // divisor for name, width in widths.items()}
  )
