# SPDX-License-Identifier: Apache-2.0
"""Converts the MoE layers of Hugging Face models to and from our parameters.

`_MODELS` has a table per model type: the keys of its weights, and our names.
One table drives both directions, so they cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import dataclasses
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ep import presets
from ep._src.base import arguments
from ep._src.moe import parameters
from ep._src.moe.config import MoEConfig
from ep._src.moe.parameters import State

_Array: TypeAlias = jax.Array | np.ndarray[Any, Any]


class _Weight(NamedTuple):
  """A weight of a checkpoint, and our parameters in it.

  Attributes:
    key: without the layer's prefix. A key with "{e}" has one matrix per expert.
    ours: the names of our parameters; several are joined along their last axis.
    transposed: whether the weight is [..., out, in], as in torch.nn.Linear.
    axis: where `ours` are stacked before the last two axes are merged: -2 for
      one after another, -1 for alternating columns.
  """

  key: str
  ours: tuple[str, ...]
  transposed: bool = True
  axis: int = -2

  def keys(self, prefix: str, num_experts: int) -> Iterator[str]:
    count = num_experts if "{e}" in self.key else 1
    return (prefix + self.key.format(e=e) for e in range(count))

  def split(self, parts: list[Any]) -> dict[str, Any]:
    """Returns our parameters, given the values of all keys."""
    x = _numpy(parts[0]).stack(parts) if "{e}" in self.key else parts[0]
    if self.transposed:
      x = x.swapaxes(-1, -2)
    sizes = (len(self.ours), -1) if self.axis == -2 else (-1, len(self.ours))
    x = x.reshape(*x.shape[:-1], *sizes)
    return dict(
      zip(self.ours, _numpy(x).moveaxis(x, self.axis, 0), strict=True)
    )

  def join(self, params: Mapping[str, Any]) -> list[Any]:
    """Returns the values of all keys; the inverse of `split`."""
    parts = [params[name] for name in self.ours]
    x = _numpy(parts[0]).stack(parts, self.axis)
    x = x.reshape(*x.shape[:-2], -1)
    if self.transposed:
      x = x.swapaxes(-1, -2)
    return list(x) if "{e}" in self.key else [x]

  def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Returns the shape of each value, for parameters of these shapes."""
    *lead, last = shapes[self.ours[0]]
    shape = *lead, last * len(self.ours)
    if self.transposed:
      shape = *shape[:-2], shape[-1], shape[-2]
    return shape[1:] if "{e}" in self.key else shape


class _Model(NamedTuple):
  """The MoE layers of a model type.

  Attributes:
    preset: a layer of such a model.
    fields: the fields of `MoEConfig` that a model's config sets, besides
      `_FIELDS`, and the keys of their values.
    files: the weights of published files.
    fused: the weights of modules of transformers 5.
  """

  preset: MoEConfig
  fields: dict[str, str]
  files: tuple[_Weight, ...]
  fused: tuple[_Weight, ...]


def _mlp(path: str, kind: str, *names: str) -> tuple[_Weight, ...]:
  return tuple(
    _Weight(f"{path}.{name}.weight", (f"{kind}_{ours}",))
    for name, ours in zip(names, ("gate", "up", "down"), strict=True)
  )


_PROJ = "gate_proj", "up_proj", "down_proj"
_GATED = "w_gate", "w_up"
_FUSED = (
  _Weight("experts.gate_up_proj", _GATED),
  _Weight("experts.down_proj", ("w_down",)),
)
_SHARED = _mlp("shared_experts", "shared", *_PROJ)
_BIAS = _Weight("gate.e_score_correction_bias", ("bias",), transposed=False)


def _model(
  preset: MoEConfig,
  fields: dict[str, str],
  names: tuple[str, ...] = _PROJ,
  more: tuple[_Weight, ...] = (),
) -> _Model:
  more = _Weight("gate.weight", ("router",)), *more
  each = _mlp("experts.{e}", "w", *names)
  return _Model(preset, fields, (*more, *each), (*more, *_FUSED))


_INNER = {"inner": "intermediate_size"}
_MOE_INNER = {"inner": "moe_intermediate_size"}
_NORMALIZE = {"normalize": "norm_topk_prob"}
_DEEPSEEK = dict(
  **_MOE_INNER,
  **_NORMALIZE,
  shared_inner="n_shared_experts",  # times `inner`
  scale="routed_scaling_factor",
  num_groups="n_group",
  top_groups="topk_group",
)
_GPT_OSS = (
  _Weight("router.weight", ("router",)),
  _Weight("router.bias", ("router_bias",), transposed=False),
  _Weight("experts.gate_up_proj", _GATED, transposed=False, axis=-1),
  _Weight("experts.gate_up_proj_bias", ("b_gate", "b_up"), False, axis=-1),
  _Weight("experts.down_proj", ("w_down",), transposed=False),
  _Weight("experts.down_proj_bias", ("b_down",), transposed=False),
)
_MODELS = {
  "mixtral": _model(presets.MIXTRAL_8X7B, _INNER, ("w1", "w3", "w2")),
  "qwen3_moe": _model(presets.QWEN3_30B_A3B, _MOE_INNER | _NORMALIZE),
  "olmoe": _model(presets.OLMOE_1B_7B, _INNER | _NORMALIZE),
  "deepseek_v3": _model(presets.DEEPSEEK_V3, _DEEPSEEK, more=(_BIAS, *_SHARED)),
  "glm4_moe": _model(presets.GLM_4_5, _DEEPSEEK, more=(_BIAS, *_SHARED)),
  "gpt_oss": _Model(presets.GPT_OSS_120B, _INNER, _GPT_OSS, _GPT_OSS),
}
# The fields that each config sets. The key of the number of experts depends on
# the model, and for Qwen3-MoE on the version of transformers.
_FIELDS = dict(
  hidden="hidden_size",
  top_k="num_experts_per_tok",
  num_experts="num_experts num_local_experts n_routed_experts",
)
# The only values that the presets implement. A missing key has this value.
_IMPLEMENTED = dict(
  hidden_act="silu",
  scoring_func="sigmoid",
  topk_method="noaux_tc",
  router_jitter_noise=0.0,  # multiplies the tokens, not the logits
  swiglu_alpha=1.702,
  swiglu_limit=7.0,
)
_QUANTIZED = "_blocks", "_scales", "_scale_inv"
_DEQUANTIZE = (
  "convert the checkpoint to bfloat16 first, such as by transformers with"
  " Mxfp4Config(dequantize=True) or FineGrainedFP8Config(dequantize=True)"
)


def config_from_hf(config: Any) -> MoEConfig:
  """Returns the `ep.MoEConfig` of the MoE layers of a Hugging Face model.

      config = json.loads(pathlib.Path("config.json").read_text())
      cfg = ep.moe.config_from_hf(config)

  The config's `model_type` is "mixtral", "qwen3_moe", "olmoe", "deepseek_v3",
  "glm4_moe" or "gpt_oss". Fields that the config does not describe, such as
  `capacity_factor`, have their defaults; set them by `dataclasses.replace`.

  Args:
    config: the dictionary in config.json, or a config of transformers.

  Raises:
    ValueError: the model type is another one, a key is missing, or `ep.MoE`
      does not implement its value.
    TypeError: `config` is something else.
  """
  return _layer("ep.moe.config_from_hf", config).config


def from_hf(
  config: Any, state_dict: Mapping[str, _Array], *, prefix: str = ""
) -> tuple[dict[str, _Array], State | None]:
  """Returns the parameters and the state of a layer of a Hugging Face model.

      weights = safetensors.numpy.load_file("model.safetensors")
      params, state = ep.moe.from_hf(
        config, weights, prefix="model.layers.0.mlp."
      )

  Accepts the keys of published files, which have one matrix per expert, and the
  keys of modules of transformers 5, which have one array for all experts. The
  parameters have the names and shapes of `ep.moe.init`. NumPy arrays give NumPy
  arrays, which stay on the host; JAX arrays give JAX arrays. The router and the
  state are float32; other parameters keep their dtype.

  Args:
    config: as in `config_from_hf`.
    state_dict: the weights. Keys without the prefix are ignored.
    prefix: the beginning of the layer's keys, including the last dot.

  Returns:
    The parameters, and the state. The state has the selection bias of
    DeepSeek-V3 and GLM-4.5; for other models it is None.

  Raises:
    ValueError: a key is missing, unknown or of a quantized weight, or a shape
      or a dtype does not fit. The message names the key.
    TypeError: a weight is no array of NumPy or JAX, such as a torch tensor.
  """
  what = "ep.moe.from_hf"
  layer = _layer(what, config)
  is_fused = any(prefix + weight.key in state_dict for weight in _FUSED)
  weights = layer.weights(is_fused)
  _check_weights(what, state_dict, prefix, layer, weights)
  params: dict[str, Any] = {}
  for weight in weights:
    keys = weight.keys(prefix, layer.config.num_experts)
    params |= weight.split([state_dict[key] for key in keys])
  for name in {"router", "router_bias", "bias"} & params.keys():
    params[name] = params[name].astype(jnp.float32)
  bias = params.pop("bias", None)
  return params, None if bias is None else State(bias)


def to_hf(
  config: Any,
  params: Mapping[str, _Array],
  state: State | None = None,
  *,
  prefix: str = "",
  fused: bool = False,
) -> dict[str, _Array]:
  """Returns the weights of a layer by their keys; the inverse of `from_hf`.

  A weight has the dtype of the parameters in it.

  Args:
    config: as in `config_from_hf`.
    params: the whole parameters of one layer, as NumPy or JAX arrays.
    state: the state, for the models for which `from_hf` returns one.
    prefix: as in `from_hf`.
    fused: whether to return the keys of modules of transformers 5, instead of
      the keys of published files. For gpt-oss they are the same.

  Raises:
    ValueError: a parameter is missing, unknown or has another shape or dtype,
      or the state is missing or has no key. The message names it.
    TypeError: a parameter is no array of NumPy or JAX.
  """
  what = "ep.moe.to_hf"
  layer = _layer(what, config)
  named: dict[str, Any] = {**params}
  if state is not None:
    named["bias"] = state.bias
  if others := named.keys() ^ layer.shapes.keys():
    name = min(others)
    where = "a state" if name == "bias" else f"params[{name!r}]"
    raise ValueError(
      f"{what}: {where} is {'not ' if name in layer.shapes else ''}given, but"
      f" {layer.kind} has {sorted(layer.shapes)}; pass the parameters and the"
      " state as from_hf returns them."
    )
  for name, shape in layer.shapes.items():
    _check_array(what, name, named[name], shape, "of stacked layers, pass one")
  result: dict[str, _Array] = {}
  for weight in layer.weights(fused):
    keys = weight.keys(prefix, layer.config.num_experts)
    values = map(_contiguous, weight.join(named))
    result |= zip(keys, values, strict=True)
  return result


class _Layer(NamedTuple):
  """A layer of a model, and the shapes of its parameters and its bias."""

  kind: str
  model: _Model
  config: MoEConfig
  shapes: dict[str, tuple[int, ...]]

  def weights(self, fused: bool) -> list[_Weight]:
    """Returns the weights of the model that this layer has."""
    weights = self.model.fused if fused else self.model.files
    return [weight for weight in weights if weight.ours[0] in self.shapes]


def _layer(what: str, config: Any) -> _Layer:
  if hasattr(config, "to_dict"):
    config = config.to_dict()
  if not isinstance(config, Mapping):
    expected = "a config of transformers or the dictionary in config.json"
    raise arguments.wrong_type(what, "config", config, expected)
  kind = config.get("model_type", "")
  arguments.check(
    kind in [*_MODELS],  # the kind in a file may be unhashable
    what,
    f"model_type = {kind!r}, but it must be one of {[*_MODELS]}; describe"
    " layers of other models by an ep.MoEConfig.",
  )
  model = _MODELS[kind]
  for key, value in _IMPLEMENTED.items():
    arguments.check(
      config.get(key, value) == value,
      what,
      f"{key} = {config.get(key)!r}, but only {value!r} is converted; set this"
      " value, or describe the layer by an ep.MoEConfig.",
    )
  values = {}
  for field, keys in (_FIELDS | model.fields).items():
    found = [config[k] for k in keys.split() if config.get(k) is not None]
    arguments.check(
      bool(found),
      what,
      f"config has no {keys.replace(' ', ' or ')}; pass all of config.json.",
    )
    values[field] = found[0]
  if "shared_inner" in values:
    values["shared_inner"] *= values["inner"]
  layer = dataclasses.replace(model.preset, **values)
  shapes = parameters.shapes(layer)
  if _BIAS in model.files:
    shapes["bias"] = (layer.num_experts,)
  return _Layer(kind, model, layer, shapes)


def _check_weights(
  what: str,
  state_dict: Mapping[str, _Array],
  prefix: str,
  layer: _Layer,
  weights: list[_Weight],
) -> None:
  """Raises unless the layer has exactly the keys of the weights, and arrays."""
  mine = [key for key in state_dict if key.startswith(prefix)]
  for key in mine:
    arguments.check(
      not key.endswith(_QUANTIZED),
      what,
      f"state_dict has {key!r}, a scale or block of a quantized weight;"
      f" {_DEQUANTIZE}.",
    )
  known = set()
  for weight in weights:
    shape = weight.shape(layer.shapes)
    for key in weight.keys(prefix, layer.config.num_experts):
      if key not in state_dict:
        end = "." + key.removeprefix(prefix)
        others = [k.removesuffix(end) for k in state_dict if k.endswith(end)]
        other = [*others, "model.layers.0.mlp"][0] + "."
        raise ValueError(
          f"{what}: state_dict has no {key!r}; load all files of the"
          f" checkpoint, and pass a prefix such as {other!r}."
        )
      cure = "check that the config is of the same model"
      name = f"state_dict[{key!r}]"
      _check_array(what, name, state_dict[key], shape, cure)
      known.add(key)
  for key in mine:
    arguments.check(
      key in known,
      what,
      f"state_dict has {key!r}, which this layer does not have; check the"
      " config, or remove the key.",
    )


def _check_array(
  what: str, name: str, value: Any, shape: tuple[int, ...], cure: str
) -> None:
  """Raises unless a value is an array of a shape and of a float dtype."""
  if not isinstance(value, jax.Array | np.ndarray):
    raise TypeError(
      f"{what}: {name} is a {type(value).__name__}, but an array of NumPy or"
      " JAX is expected; load files by safetensors.numpy, or pass"
      " tensor.float().numpy()."
    )
  arguments.check(
    value.shape == shape,
    what,
    f"{name} has shape {value.shape}, but {shape} is expected; {cure}.",
  )
  arguments.check(
    jnp.issubdtype(value.dtype, jnp.floating) and value.dtype.itemsize > 1,
    what,
    f"{name} is {value.dtype}, but a float dtype of 16 bits or more is"
    f" expected; {_DEQUANTIZE}.",
  )


def _numpy(x: Any) -> Any:
  """Returns `numpy` or `jax.numpy`, the module of an array."""
  return x.__array_namespace__()


def _contiguous(x: Any) -> Any:
  """Copies a NumPy view, which safetensors would save in the wrong order."""
  return np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x
