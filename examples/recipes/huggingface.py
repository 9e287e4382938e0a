# SPDX-License-Identifier: Apache-2.0
"""Converts MoE layers of Hugging Face checkpoints for `ep.MoE`, and back.

    config = json.loads(pathlib.Path("config.json").read_text())
    weights = safetensors.numpy.load_file("model.safetensors")
    prefix = "model.layers.0.mlp."  # Mixtral: "...block_sparse_moe."

    layer = ep.MoE(huggingface.layer_config(config), mesh)
    params, state = huggingface.from_checkpoint(config, weights, prefix)
    weights = huggingface.to_checkpoint(config, params, state, prefix)

The models are Mixtral, Qwen3-MoE and DeepSeek-V3, with the keys of published
files: one matrix per expert. `_MODELS` has one table for both directions.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

import ep

Config: TypeAlias = Mapping[str, Any]  # the dictionary in config.json


class _Model(NamedTuple):
  """The MoE layers of a model type.

  Attributes:
    preset: a layer of such a model.
    fields: fields of `ep.MoEConfig` and keys in config.json, besides `_FIELDS`.
    keys: our parameters, and their keys in the checkpoint. A key with "{e}" has
      one matrix per expert; "bias" is the bias of `ep.moe.State`.
  """

  preset: ep.MoEConfig
  fields: dict[str, str]
  keys: dict[str, str]


def _keys(kind: str, path: str, names: str) -> dict[str, str]:
  gate, up, down = (f"{path}.{name}.weight" for name in names.split())
  return {f"{kind}_gate": gate, f"{kind}_up": up, f"{kind}_down": down}


_FIELDS = {
  "hidden": "hidden_size",
  "top_k": "num_experts_per_tok",
  "num_experts": "num_experts num_local_experts n_routed_experts",
}
_ROUTER = {"router": "gate.weight"}
_PROJ = "gate_proj up_proj down_proj"
_MODELS = {
  "mixtral": _Model(
    ep.presets.MIXTRAL_8X7B,
    {"inner": "intermediate_size"},
    _ROUTER | _keys("w", "experts.{e}", "w1 w3 w2"),
  ),
  "qwen3_moe": _Model(
    ep.presets.QWEN3_30B_A3B,
    {"inner": "moe_intermediate_size", "normalize": "norm_topk_prob"},
    _ROUTER | _keys("w", "experts.{e}", _PROJ),
  ),
  "deepseek_v3": _Model(
    ep.presets.DEEPSEEK_V3,
    {
      **{"inner": "moe_intermediate_size", "normalize": "norm_topk_prob"},
      "shared_inner": "n_shared_experts",  # times `inner`
      "scale": "routed_scaling_factor",
      "num_groups": "n_group",
      "top_groups": "topk_group",
    },
    _ROUTER
    | {"bias": "gate.e_score_correction_bias"}
    | _keys("w", "experts.{e}", _PROJ)
    | _keys("shared", "shared_experts", _PROJ),
  ),
}
# The only values that the presets implement. A missing key has this value.
_IMPLEMENTED = {
  "hidden_act": "silu",
  "scoring_func": "sigmoid",
  "topk_method": "noaux_tc",
  "router_jitter_noise": 0.0,
}


def layer_config(config: Config) -> ep.MoEConfig:
  """Returns the configuration of a model's MoE layers.

  Raises:
    ValueError: the model type is another one, a key is missing, or `ep.MoE`
      does not implement its value.
  """
  kind = config.get("model_type")
  if kind not in _MODELS:
    raise ValueError(f"model_type = {kind!r} must be one of {[*_MODELS]}.")
  for key, value in _IMPLEMENTED.items():
    if config.get(key, value) != value:
      raise ValueError(f"{key} = {config[key]!r}, but only {value!r} works.")
  values = {}
  for field, keys in (_FIELDS | _MODELS[kind].fields).items():
    found = [config[k] for k in keys.split() if config.get(k) is not None]
    if not found:
      raise ValueError(f"config has no {keys}; pass all of config.json.")
    values[field] = found[0]
  values["shared_inner"] = values.get("shared_inner", 0) * values["inner"]
  return dataclasses.replace(_MODELS[kind].preset, **values)


def from_checkpoint(
  config: Config, weights: Mapping[str, Any], prefix: str
) -> tuple[dict[str, np.ndarray], ep.moe.State | None]:
  """Returns the parameters and the state of a layer.

  The parameters have the names and shapes of `ep.moe.init`, as NumPy arrays.
  The router and the state are float32; other parameters keep their dtype.

  Args:
    config: as in `layer_config`.
    weights: arrays by key. Keys without the prefix are ignored.
    prefix: the beginning of the layer's keys, including the last dot.

  Returns:
    The parameters, and for DeepSeek-V3 the state with the selection bias.

  Raises:
    ValueError: a key is missing or unknown, or its weight is quantized or has
      another shape.
  """
  mine = {key for key in weights if key.startswith(prefix)}
  params = {}
  for name, (keys, shape) in _parameters(config, prefix).items():
    matrices = [_read(weights, key, shape).T for key in keys]
    params[name] = np.stack(matrices).reshape(shape)
    mine -= {*keys}
  if mine:  # such as the scales of quantized weights
    raise ValueError(f"the layer has no {min(mine)!r}; check the config.")
  params["router"] = params["router"].astype(np.float32)
  bias = params.pop("bias", None)
  return params, None if bias is None else ep.moe.State(bias.astype(np.float32))


def to_checkpoint(
  config: Config,
  params: Mapping[str, Any],
  state: ep.moe.State | None,
  prefix: str,
) -> dict[str, np.ndarray]:
  """Returns the weights of a layer by key; the inverse of `from_checkpoint`.

  The parameters are whole arrays with E entries (`ep.moe.with_slots`).

  Raises:
    ValueError: a name is missing or unknown, or has another shape.
  """
  named = {**params} if state is None else {**params, "bias": state.bias}
  parameters = _parameters(config, prefix)
  if others := named.keys() ^ parameters.keys():
    raise ValueError(f"{min(others)!r} is missing or not in such a layer.")
  weights = {}
  for name, (keys, shape) in parameters.items():
    x = np.asarray(named[name])
    if x.shape != shape:
      raise ValueError(f"{name} has shape {x.shape}, but {shape} is expected.")
    for key, matrix in zip(keys, x.reshape(-1, *shape[-2:]), strict=True):
      # safetensors saves the memory of an array, whatever its strides.
      weights[key] = np.ascontiguousarray(matrix.T)
  return weights


def _parameters(
  config: Config, prefix: str
) -> dict[str, tuple[list[str], tuple[int, ...]]]:
  """Returns the keys and the shape of each parameter, and of the bias."""
  layer = layer_config(config)
  init = jax.eval_shape(lambda: ep.moe.init(jax.random.key(0), layer))
  shapes = {name: x.shape for name, x in init.items()}
  shapes["bias"] = (layer.num_experts,)
  parameters = {}
  for name, key in _MODELS[config["model_type"]].keys.items():
    if name in shapes:  # a layer may have no shared expert
      count = layer.num_experts if "{e}" in key else 1
      keys = [prefix + key.format(e=e) for e in range(count)]
      parameters[name] = keys, shapes[name]
  return parameters


def _read(weights: Mapping[str, Any], key: str, shape: tuple[int, ...]) -> Any:
  if key not in weights:
    raise ValueError(f"weights have no {key!r}; check files and prefix.")
  x, shape = np.asarray(weights[key]), shape[-2:][::-1]
  if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize == 1:
    raise ValueError(f"{key!r} is {x.dtype}; convert it to bfloat16 first.")
  if x.shape != shape:
    raise ValueError(f"{key!r} has shape {x.shape}, but {shape} is expected.")
  return x
