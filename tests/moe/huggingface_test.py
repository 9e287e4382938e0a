# SPDX-License-Identifier: Apache-2.0
"""Layers of Hugging Face models compute the same as in transformers.

CI does not install torch: huggingface.json has numbers of modules with small
random weights. This command recorded the numbers, in versions that the file
names (safetensors comes with transformers):

    pip install torch transformers
    PYTHONPATH=.:tests python tests/moe/huggingface_test.py
"""

import functools
import json
import pathlib
import tempfile
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import jit_quickly
from conftest import make_mesh, refused
import ep

RECORD = pathlib.Path(__file__).with_name("huggingface.json")
T, H = 8, 12
_SIZES = dict(
  **dict(hidden_size=H, intermediate_size=6, num_experts_per_tok=3),
  **dict(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2),
  **dict(vocab_size=8, pad_token_id=0),
)
_DEEPSEEK = dict(
  **dict(moe_intermediate_size=5, norm_topk_prob=True),
  **dict(n_routed_experts=8, n_shared_experts=2, n_group=4, topk_group=2),
  **dict(first_k_dense_replace=0, routed_scaling_factor=1.5),
)
MODELS = {
  "mixtral": dict(num_local_experts=8),
  "qwen3_moe": dict(num_experts=8, moe_intermediate_size=5),
  "olmoe": dict(num_experts=8, norm_topk_prob=True),  # false in OLMoE's
  "deepseek_v3": dict(
    **dict(kv_lora_rank=4, q_lora_rank=4, qk_rope_head_dim=4, v_head_dim=4),
    **dict(qk_nope_head_dim=4, **_DEEPSEEK),
  ),
  "glm4_moe": dict(_DEEPSEEK, n_shared_experts=1, n_group=1, topk_group=1),
  "gpt_oss": dict(num_local_experts=8),
}


def draw(name, shape):
  """Returns numbers that depend on the name and the shape only."""
  rng = np.random.RandomState(zlib.crc32(name.encode()))
  scale = 0.3 if name.startswith(("gate.", "router.")) else 1.5
  return (scale * rng.standard_normal(shape)).astype(np.float32)


def digest(x):
  """Returns a random sum of an array, which changes if its elements move."""
  return float((draw("digest", x.shape) * np.float64(x)).sum())


def record():
  """Writes huggingface.json."""
  import safetensors.numpy
  import torch
  import transformers

  def numbers_of(kind, folder):
    config = transformers.AutoConfig.for_model(kind, **_SIZES, **MODELS[kind])
    model = transformers.AutoModelForCausalLM.from_config(
      config, experts_implementation="eager"
    )
    block = model.model.layers[0].mlp
    shapes = {k: list(v.shape) for k, v in block.state_dict().items()}
    block.load_state_dict(
      {k: torch.tensor(draw(k, s)) for k, s in shapes.items()}
    )
    x = torch.tensor(draw("x", (1, T, H)), requires_grad=True)
    y = block(x)[0].reshape(T, H)
    (y * torch.tensor(draw("ct", (T, H)))).sum().backward()
    grads = {k: p.grad for k, p in block.named_parameters()} | {"x": x.grad[0]}
    model.save_pretrained(folder)
    files = safetensors.numpy.load_file(f"{folder}/model.safetensors")
    return dict(
      config=json.loads(pathlib.Path(folder, "config.json").read_text()),
      shapes=shapes,
      files={
        k: digest(v) for k, v in files.items() if ".mlp." in k or "moe." in k
      },
      grads={k: digest(v.numpy()) for k, v in grads.items()},
      y=y.tolist(),
    )

  numbers = dict(torch=torch.__version__, transformers=transformers.__version__)
  for kind in MODELS:
    with tempfile.TemporaryDirectory() as folder:
      text = json.dumps(numbers_of(kind, folder))
    numbers[kind] = json.loads(
      text, parse_float=lambda x: float(f"{float(x):.7g}")
    )
  lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in numbers.items()]
  RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


@functools.cache
def recorded():
  return json.loads(RECORD.read_text())


def published(kind):
  """Returns a config, and weights by the keys of published files."""
  config, weights = recorded()[kind]["config"], modules(kind)
  params, state = ep.moe.from_hf(config, weights)
  return config, ep.moe.to_hf(config, params, state)


def modules(kind):
  """Returns the weights of a module of transformers."""
  return {k: draw(k, shape) for k, shape in recorded()[kind]["shapes"].items()}


def assert_saved(weights, expected):
  """Fails unless safetensors would save the expected arrays.

  safetensors saves the memory of an array, in whatever order it is.
  """
  assert weights.keys() == expected.keys()
  for name, x in weights.items():
    np.testing.assert_array_equal(x, expected[name], name)
    assert x.flags.c_contiguous, name


@pytest.mark.parametrize("kind", MODELS)
def test_a_layer_agrees_with_transformers(kind):
  """Outputs and gradients equal recorded results of transformers."""
  numbers = recorded()[kind]
  config = numbers["config"]
  layer = ep.MoE(ep.moe.config_from_hf(config), make_mesh({"ep": 4}))

  def loss(weights, x):
    params, state = ep.moe.from_hf(config, weights)
    y, _ = layer(params, x, state)
    return (y * draw("ct", (T, H))).sum(), y

  grad = jax.value_and_grad(loss, (0, 1), has_aux=True)
  with layer.group:
    args = modules(kind), draw("x", (1, T, H))[0]
    (_, y), (grads, dx) = jit_quickly(grad)(*args)
  atol = 1e-5 * np.abs(y).max()
  np.testing.assert_allclose(y, numbers["y"], 1e-4, atol)
  for name, expected in numbers["grads"].items():
    got = dx if name == "x" else grads[name]
    atol = 1e-5 * np.linalg.norm(got)
    np.testing.assert_allclose(digest(got), expected, 1e-4, atol, err_msg=name)


@pytest.mark.parametrize("kind", MODELS)
def test_keys_of_files_and_modules_convert_in_both_directions(kind):
  """transformers saved the same values by the keys of files."""
  numbers, fused = recorded()[kind], modules(kind)
  config = numbers["config"]
  prefix = next(iter(numbers["files"])).partition("experts.")[0]
  params, state = ep.moe.from_hf(config, fused)
  params = {name: np.array(x, order="C") for name, x in params.items()}
  assert_saved(ep.moe.to_hf(config, params, state, fused=True), fused)
  files = ep.moe.to_hf(config, params, state, prefix=prefix)
  assert files.keys() == numbers["files"].keys()
  for key, expected in numbers["files"].items():
    np.testing.assert_allclose(digest(files[key]), expected, 1e-5)
  others = {"model.norm.weight": np.ones(H)}
  again, state = ep.moe.from_hf(config, files | others, prefix=prefix)
  assert_saved(ep.moe.to_hf(config, again, state, prefix=prefix), files)
  assert (state is None) == (kind not in ("deepseek_v3", "glm4_moe"))


def test_dtypes_and_kinds_of_arrays_are_kept_except_of_routers():
  config, files = published("deepseek_v3")
  low = {k: jnp.asarray(v, jnp.bfloat16) for k, v in files.items()}
  params, state = ep.moe.from_hf(config, low)
  kinds = {n: p.dtype for n, p in params.items()}
  assert kinds.pop("router") == state.bias.dtype == jnp.float32
  assert set(kinds.values()) == {jnp.dtype("bfloat16")}
  for tree in params, ep.moe.to_hf(config, params, state):
    assert all(isinstance(x, jax.Array) for x in tree.values())


def test_a_preset_is_the_layer_of_a_published_config():
  """A config of transformers has a method `to_dict`."""
  deepseek = dict(
    **dict(model_type="deepseek_v3", hidden_size=7168, n_shared_experts=1),
    **dict(moe_intermediate_size=2048, n_routed_experts=256, topk_group=4),
    **dict(n_group=8, num_experts_per_tok=8, norm_topk_prob=True),
    **dict(routed_scaling_factor=2.5, scoring_func="sigmoid"),
  )

  class Config:
    def to_dict(self):
      return deepseek

  assert ep.moe.config_from_hf(Config()) == ep.presets.DEEPSEEK_V3


@pytest.mark.parametrize(
  "changes, words",
  [
    (dict(model_type="llama"), ["model_type = 'llama'", "ep.MoEConfig"]),
    (dict(hidden_size=None), ["config has no hidden_size", "config.json"]),
    (dict(n_routed_experts=None), ["num_experts or num_local_experts or"]),
    (dict(hidden_act="gelu"), ["hidden_act = 'gelu'", "'silu'"]),
    (dict(scoring_func="softmax"), ["scoring_func = 'softmax'", "'sigmoid'"]),
    (dict(router_jitter_noise=0.1), ["router_jitter_noise = 0.1", "only 0.0"]),
    (dict(swiglu_limit=10.0), ["swiglu_limit = 10.0", "only 7.0"]),
  ],
  ids=str,
)
def test_a_config_is_refused_by_its_key(changes, words):
  with refused("ep.moe.config_from_hf: ", *words):
    ep.moe.config_from_hf(recorded()["deepseek_v3"]["config"] | changes)


def test_another_object_is_no_config():
  with refused("config = MoEConfig(", "config.json"):
    ep.moe.config_from_hf(ep.presets.MIXTRAL_8X7B)


class Tensor:
  shape = (8, H)


UP = "mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
  "changes, prefix, words",
  [
    ({}, "", ["no 'gate.weight'", "prefix such as 'mlp.'"]),
    ({UP: None}, "mlp.", [f"no '{UP}'", "load all files"]),
    ({UP: np.ones((4, H))}, "mlp.", [f"['{UP}'] has shape (4, 12)", "(5, 12)"]),
    ({UP: Tensor()}, "mlp.", [f"['{UP}'] is a Tensor", "safetensors.numpy"]),
    ({"mlp.gate.bias": 0}, "mlp.", ["'mlp.gate.bias', which this layer does"]),
    ({f"{UP}_scale_inv": 0}, "mlp.", [f"'{UP}_scale_inv'", "dequantize=True"]),
    (  # without their scales, quantized weights would be wrong
      {UP: np.ones((5, H), jnp.float8_e4m3fn), f"{UP}_scale": 0},
      "mlp.",
      [f"['{UP}'] is float8_e4m3fn", "dequantize=True"],
    ),
    ({UP: np.ones((5, H), np.int8)}, "mlp.", ["is int8, but a float dtype"]),
  ],
  ids=str,
)
def test_weights_are_refused_by_their_key(changes, prefix, words):
  config, files = published("qwen3_moe")
  files = {f"mlp.{k}": v for k, v in files.items()} | changes
  files = {k: v for k, v in files.items() if v is not None}
  with refused("ep.moe.from_hf: ", *words):
    ep.moe.from_hf(config, files, prefix=prefix)


def test_a_config_of_many_experts_is_refused_early():
  """A config of 2^31 - 1 experts makes no list of their keys."""
  config, files = published("qwen3_moe")
  with refused("['gate.weight'] has shape (8, 12), but (2147483647, 12)"):
    ep.moe.from_hf(config | {"num_experts": 2**31 - 1}, files)


def test_a_deepseek_layer_may_have_no_shared_expert():
  config, files = published("deepseek_v3")
  config = config | {"n_shared_experts": 0}
  files = {k: v for k, v in files.items() if not k.startswith("shared")}
  params, state = ep.moe.from_hf(config, files)
  assert not [name for name in params if name.startswith("shared")]
  for name, x in ep.moe.to_hf(config, params, state).items():
    np.testing.assert_array_equal(x, files.pop(name))
  assert not files


def test_to_hf_loses_no_parameter():
  config = recorded()["qwen3_moe"]["config"]
  params, _ = ep.moe.from_hf(config, modules("qwen3_moe"))
  stacked = {name: x[None] for name, x in params.items()}
  with refused("router has shape (1, 12, 8)", "stacked layers"):
    ep.moe.to_hf(config, stacked)
  with pytest.raises(TypeError, match="router is a list, but an array"):
    ep.moe.to_hf(config, params | {"router": []})
  with refused("a state is given", "qwen3_moe"):
    ep.moe.to_hf(config, params, ep.moe.State(np.zeros(8, np.float32)))
  with refused("params['shared_up'] is given"):
    ep.moe.to_hf(config, params | {"shared_up": np.ones((H, 5))})
  with refused("a state is not given", "deepseek_v3"):
    other = recorded()["deepseek_v3"]["config"]
    params, _ = ep.moe.from_hf(other, modules("deepseek_v3"))
    ep.moe.to_hf(other, params)


if __name__ == "__main__":
  record()
