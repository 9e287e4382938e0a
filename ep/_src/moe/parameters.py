# SPDX-License-Identifier: Apache-2.0
"""The parameters and the state of a MoE layer."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
import numpy as np

from ep._src.base import arguments, arrays
from ep._src.moe.config import MoEConfig
from ep._src.ops import views

_Tree = TypeVar("_Tree")
_Shape = tuple[int, ...]
_Dims = tuple[str | None, ...]


def init(
  key: jax.Array,
  config: MoEConfig,
  dtype: DTypeLike = jnp.float32,
) -> dict[str, jax.Array]:
  """Returns new parameters of a MoE layer, as one flat dictionary.

      router       [H, E]      float32      w_gate w_up  [E, H, F]
      router_bias  [E]         float32      w_down       [E, F, H]
      shared_gate shared_up  [H, S]         b_gate b_up  [E, F]
      shared_down            [S, H]         b_down       [E, H]

  The result has only the parameters that `config` needs. Biases are zero.
  Matrices are normal, with a variance of 1 / (rows of the matrix), as LeCun
  initializes. The router is float32, so that rounding changes no choice.

  Under `jax.jit` with `out_shardings` made of `partition_specs`, each device
  creates only its part. `jax.vmap` over keys creates stacked layers.

  Args:
    key: a key of `jax.random`.
    config: the configuration of the layer.
    dtype: a float dtype, for all parameters but the router.

  Raises:
    TypeError: the dtype is no float dtype, or the config no `ep.MoEConfig`.
  """
  what = "ep.moe.init"
  check_config(what, config)
  dtype = arrays.dtype(what, "dtype", dtype)
  if not jnp.issubdtype(dtype, jnp.floating):
    raise TypeError(
      f"{what}: dtype = {dtype}, but parameters are drawn as floats; pass"
      " a dtype such as jnp.bfloat16."
    )
  params = {}
  for i, (name, (shape, _)) in enumerate(_parameters(config).items()):
    kind = jnp.float32 if name.startswith("router") else dtype
    if name.startswith(("b_", "router_bias")):
      params[name] = jnp.zeros(shape, kind)
      continue
    draw = jax.random.normal(jax.random.fold_in(key, i), shape, jnp.float32)
    params[name] = (draw / math.sqrt(shape[-2])).astype(kind)
  return params


def partition_specs(
  config: MoEConfig, axis_name: str = "ep", *, lead: int = 0
) -> dict[str, PartitionSpec]:
  """Returns the sharding of each parameter of `init`, by name.

  Experts are split over the EP axis, inner sizes over `config.tp_axis`, and
  hidden sizes of matrices over `config.fsdp_axis`. The router is replicated.

  Args:
    config: the configuration of the layer.
    axis_name: the EP axis.
    lead: the number of leading axes that are not split, such as 1 for layers
      that are stacked for `lax.scan`.

  Raises:
    ValueError, TypeError: an argument has a wrong type, or `lead` is negative.
  """
  what = "ep.moe.partition_specs"
  check_config(what, config)
  axis_name = arguments.string(what, "axis_name", axis_name)
  lead = arguments.at_least(0)(what, "lead", lead)
  return specs_of(config, axis_name, lead)


def specs_of(
  config: MoEConfig, axis_name: str, lead: int = 0
) -> dict[str, PartitionSpec]:
  """Does what `partition_specs` does, for arguments that are checked."""
  axes: dict[str | None, str | None] = {
    "experts": axis_name,
    "inner": config.tp_axis,
    "hidden": config.fsdp_axis,
  }
  return {
    name: PartitionSpec(*[None] * lead, *[axes.get(d) for d in dims])
    for name, (_, dims) in _parameters(config).items()
  }


def with_slots(
  arrays: _Tree, specs: Any, num_slots: int, axis_name: str = "ep"
) -> _Tree:
  """Cuts or extends the axis of experts to `num_slots` entries.

      specs, E = layer.specs(), layer.config.num_experts
      params = ep.moe.with_slots(params, specs, layer.num_expert_slots)
      saved = ep.moe.with_slots(params, specs, E)

  If P does not divide E, the parameters of a layer on P ranks have more entries
  than experts: P * L. The entries of empty slots, the last ones, are zero, and
  so are their gradients. `ep.moe.init` returns E entries, and `ep.MoE.init`
  returns P * L.

  On a mesh, call it under `jax.jit` with `out_shardings`. An Explicit EP axis
  does not split the result.

  Args:
    arrays: a pytree of NumPy or JAX arrays, whose experts have the order of
      their ids.
    specs: a `PartitionSpec` for each array, or a pytree of them that is a
      prefix of `arrays`. Arrays whose spec does not name the EP axis are
      returned unchanged.
    num_slots: the new number of entries.
    axis_name: the EP axis.

  Raises:
    ValueError, TypeError: an argument has a wrong type, there is no slot, or an
      array has fewer axes than its spec.
  """
  what = "ep.moe.with_slots"
  num_slots = arguments.at_least(1)(what, "num_slots", num_slots)
  axis_name = arguments.string(what, "axis_name", axis_name)

  def of(x: Any, spec: PartitionSpec) -> Any:
    at = split_axis(spec, axis_name)
    shape = np.shape(x)
    arguments.check(
      at is None or at < len(shape),
      what,
      f"an array of shape {shape} has the spec {spec}; pass the specs of these"
      " arrays, such as MoE.specs().",
    )
    if at is None or shape[at] == num_slots:
      return x
    if isinstance(x, jax.Array):  # JAX cannot split E entries over P ranks
      rest = PartitionSpec(*spec[:at], None, *spec[at + 1 :])
      x = views.resharded(jax.typeof(x).sharding.mesh, rest, x)
    x = x[(slice(None),) * at + (slice(num_slots),)]
    missing = [(0, 0)] * x.ndim
    missing[at] = (0, num_slots - x.shape[at])
    return x.__array_namespace__().pad(x, missing)

  fitted: _Tree = jax.tree.map(of, arrays, jax.tree.broadcast(specs, arrays))
  return fitted


def check_config(what: str, config: MoEConfig) -> None:
  cure = "pass ep.MoEConfig(...), or one of ep.presets"
  arguments.check_type(what, "config", config, MoEConfig, cure)


def split_axis(spec: PartitionSpec, axis_name: str) -> int | None:
  """Returns the array axis that a mesh axis splits, alone or with others."""
  for at, axes in enumerate(spec):
    if axis_name == axes or (isinstance(axes, tuple) and axis_name in axes):
      return at
  return None


def shapes(
  config: MoEConfig, num_slots: int | None = None
) -> dict[str, tuple[int, ...]]:
  """Returns the global shape of each parameter, with E or `num_slots` experts.

  `num_slots` counts the empty slots.
  """
  parameters = _parameters(config)
  num = config.num_experts if num_slots is None else num_slots
  return {
    name: (num, *shape[1:]) if dims[0] == "experts" else shape
    for name, (shape, dims) in parameters.items()
  }


def _parameters(config: MoEConfig) -> dict[str, tuple[_Shape, _Dims]]:
  """Returns the global shape of each parameter, and the kind of each dim."""
  e, h, f = config.num_experts, config.hidden, config.inner
  s = config.shared_inner
  up, down = ("hidden", "inner"), ("inner", "hidden")
  ups = ("gate", "up") if config.gated else ("up",)
  params: dict[str, tuple[_Shape, _Dims]]
  params = {"router": ((h, e), (None, None))}
  if config.router_bias:
    params["router_bias"] = ((e,), (None,))
  for name in ups:
    params[f"w_{name}"] = ((e, h, f), ("experts", *up))
  params["w_down"] = ((e, f, h), ("experts", *down))
  if config.biases:
    for name in ups:
      params[f"b_{name}"] = ((e, f), ("experts", "inner"))
    params["b_down"] = ((e, h), ("experts", None))
  if s:
    for name in ups:
      params[f"shared_{name}"] = ((h, s), up)
    params["shared_down"] = ((s, h), down)
  return params


class State(NamedTuple):
  """The state of a layer, which changes between steps without a gradient.

  It is a pytree. Save it in checkpoints, with the parameters.

  Attributes:
    bias: float32 [..., E], added to the scores for the choice of experts, not
      for the weights. Leading axes are layers.
  """

  bias: jax.Array

  def after(self, load: jax.Array, rate: float = 1e-3) -> State:
    """Returns the state of the next step: the bias rises for idle experts.

    Each entry changes by `rate`: it rises if the expert had less than the mean
    load, and falls if it had more (Wang et al., "Auxiliary-Loss-Free Load
    Balancing Strategy for Mixture-of-Experts", arXiv 2408.15664, algorithm 1;
    DeepSeek-V3 uses a rate of 0.001). The comparison is exact: an expert with
    the mean load keeps its entry. An entry never becomes NaN or infinite.

    Args:
      load: [..., E], the `Metrics.load` of the step, or the sum of the loads of
        its microbatches.
      rate: the change of an entry, in units of a score.

    Raises:
      ValueError: the shapes differ.
      TypeError: the bias is not float32.
    """
    what = "ep.moe.State.after"
    bias = arrays.float32(what, "bias", self.bias)
    load = jnp.asarray(load).astype(jnp.float32)
    arguments.check(
      bias.shape == load.shape,
      what,
      f"bias has shape {bias.shape}, but load {load.shape}; pass the"
      " Metrics.load of the same layers.",
    )
    # Compares loads with their mean exactly. A float32 mean or E * load would
    # round; sums of quotients and of remainders by E are small, so exact.
    experts = load.shape[-1]
    load -= load.min(axis=-1, keepdims=True)
    quotient = jnp.floor(load / experts)
    remainder = load - experts * quotient
    above = load - quotient.sum(axis=-1, keepdims=True)
    side = jnp.sign(remainder.sum(axis=-1, keepdims=True) - experts * above)
    changed = bias + (rate * side).astype(bias.dtype)
    return State(jnp.where(jnp.isfinite(changed), changed, bias))
