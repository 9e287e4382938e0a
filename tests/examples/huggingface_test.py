# SPDX-License-Identifier: Apache-2.0
"""The recipe for Hugging Face checkpoints agrees with plain layers.

A plain layer follows the model's code in transformers, reads the checkpoint's
own keys, and applies every expert to every token.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import jit_quickly
from conftest import make_mesh, refused
import ep
from recipes import huggingface

T, H, F, E, K = 16, 12, 5, 8, 3
PREFIX = "model.layers.0.mlp."
_SIZES = dict(hidden_size=H, num_experts_per_tok=K)
_MOE_SIZES = dict(_SIZES, moe_intermediate_size=F)
_QWEN3 = dict(_MOE_SIZES, model_type="qwen3_moe")
_DEEPSEEK = dict(
  _MOE_SIZES,
  **dict(model_type="deepseek_v3", n_routed_experts=E, n_shared_experts=2),
  **dict(n_group=4, topk_group=2, routed_scaling_factor=1.5),
)
CONFIGS = {
  "mixtral": dict(
    _SIZES, model_type="mixtral", num_local_experts=E, intermediate_size=F
  ),
  "qwen3": dict(_QWEN3, num_experts=E, norm_topk_prob=True),
  "qwen3_unnormalized": dict(_QWEN3, num_local_experts=E, norm_topk_prob=False),
  "deepseek": dict(_DEEPSEEK, norm_topk_prob=True),
}


def draw_weights(config):
  """Returns random weights by the keys of published files."""
  rng = np.random.default_rng(0)
  weights = {}

  def draw(key, *shape, scale=0.5):
    x = scale * rng.standard_normal(shape)
    weights[f"{PREFIX}{key}"] = x.astype(np.float32)

  def draw_mlp(path, inner, gate="gate_proj", up="up_proj", down="down_proj"):
    draw(f"{path}.{gate}.weight", inner, H)
    draw(f"{path}.{up}.weight", inner, H)
    draw(f"{path}.{down}.weight", H, inner)

  names = ("w1", "w3", "w2") if config["model_type"] == "mixtral" else ()
  draw("gate.weight", E, H)
  for e in range(E):
    draw_mlp(f"experts.{e}", F, *names)
  if config["model_type"] == "deepseek_v3":
    draw("gate.e_score_correction_bias", E, scale=0.2)
  if config.get("n_shared_experts"):
    draw_mlp("shared_experts", 2 * F)
  return weights


def plain_layer(config, weights, x):
  w = {key.removeprefix(PREFIX): value for key, value in weights.items()}

  def mlp(path, gate="gate_proj", up="up_proj", down="down_proj"):
    gate, up, down = (w[f"{path}.{n}.weight"].T for n in (gate, up, down))
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down

  def among(chosen, values):
    return jnp.zeros_like(values).at[jnp.arange(T)[:, None], chosen].set(1)

  logits = x @ w["gate.weight"].T
  if config["model_type"] == "deepseek_v3":
    scores = jax.nn.sigmoid(logits)
    biased = scores + w["gate.e_score_correction_bias"]
    groups = biased.reshape(T, config["n_group"], -1)
    best = jax.lax.top_k(groups, 2)[0].sum(-1)
    _, top_groups = jax.lax.top_k(best, config["topk_group"])
    open_groups = among(top_groups, best)[..., None] == 1
    choosable = jnp.where(open_groups, groups, -jnp.inf).reshape(T, E)
  else:
    scores = choosable = jax.nn.softmax(logits)
  weights = scores * among(jax.lax.top_k(choosable, K)[1], scores)
  if config.get("norm_topk_prob", True):
    weights /= weights.sum(-1, keepdims=True)
  names = ("w1", "w3", "w2") if config["model_type"] == "mixtral" else ()
  outputs = jnp.stack([mlp(f"experts.{e}", *names) for e in range(E)])
  y = jnp.einsum("eth,te->th", outputs, weights)
  y *= config.get("routed_scaling_factor", 1)
  if config.get("n_shared_experts"):
    y += mlp("shared_experts")
  return y


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_layer_and_its_gradients_agree_with_a_plain_layer(config):
  weights = draw_weights(config)
  x = np.random.default_rng(1).normal(size=(T, H)).astype(np.float32)
  params, state = huggingface.from_checkpoint(config, weights, PREFIX)
  layer = ep.MoE(huggingface.layer_config(config), make_mesh({"ep": 4}))

  def pullback(layer, *args):
    y, vjp = jax.vjp(layer, *args)
    return y, *vjp(jnp.sin(y))

  def ours(params, x):
    return layer(params, x, state)[0]

  with layer.group:
    got = jit_quickly(lambda *args: pullback(ours, *args))(params, x)
  want = jax.jit(
    lambda *args: pullback(lambda w, x: plain_layer(config, w, x), *args)
  )(weights, x)
  grads = huggingface.to_checkpoint(
    config, got[1], state and ep.moe.State(np.zeros_like(state.bias)), PREFIX
  )
  assert grads.keys() == weights.keys()
  pairs = [(got[0], want[0]), (got[2], want[2])]
  for a, b in pairs + [(grads[key], want[1][key]) for key in weights]:
    np.testing.assert_allclose(a, b, 1e-4, 1e-5 * np.abs(b).max())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_both_directions_keep_the_bits_of_files(config):
  """safetensors saves the memory of an array, in whatever order it is."""
  weights = draw_weights(config)
  others = {"model.norm.weight": np.ones(H)}
  params, state = huggingface.from_checkpoint(config, weights | others, PREFIX)
  assert (state is None) == (config["model_type"] != "deepseek_v3")
  again = huggingface.to_checkpoint(config, params, state, PREFIX)
  assert again.keys() == weights.keys()
  for key, x in again.items():
    np.testing.assert_array_equal(x, weights[key], key)
    assert x.flags.c_contiguous, key


UP = PREFIX + "experts.3.up_proj.weight"


@pytest.mark.parametrize(
  "changes, words",
  [
    ({UP: None}, f"no '{UP}'; check files and prefix"),
    ({UP: np.ones((4, H))}, f"'{UP}' has shape (4, 12), but (5, 12)"),
    ({PREFIX + "gate.bias": 0}, f"no '{PREFIX}gate.bias'; check the config"),
    # Without their scales, quantized weights would be wrong.
    ({f"{UP}_scale_inv": 0}, f"no '{UP}_scale_inv'"),
    ({UP: np.ones((F, H), jnp.float8_e4m3fn)}, f"'{UP}' is float8_e4m3fn"),
  ],
  ids=str,
)
def test_weights_are_refused_by_their_key(changes, words):
  config = CONFIGS["qwen3"]
  files = draw_weights(config) | changes
  files = {k: v for k, v in files.items() if v is not None}
  with refused(words):
    huggingface.from_checkpoint(config, files, PREFIX)
