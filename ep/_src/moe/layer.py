# SPDX-License-Identifier: Apache-2.0
"""MoE: a whole MoE layer, with router, experts and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
import numpy as np

from ep._src.base import arguments, arrays, compat
from ep._src.base.group import EpGroup
from ep._src.base.layer import EpLayerConfig
from ep._src.base.meshes import Mesh
from ep._src.group.bootstrap import ep_bootstrap
from ep._src.moe import batching, forward, parameters
from ep._src.moe.config import layer_of, MoEConfig, num_slots
from ep._src.moe.losses import Metrics
from ep._src.moe.parameters import State
from ep._src.moe.placement import check_placement, Placement
from ep._src.ops.dispatch import check_rows
from ep._src.ops.views import View


@dataclasses.dataclass(frozen=True, init=False)
class MoE:
  """A MoE layer on a mesh: router, exchange, experts, sum, metrics.

      cfg = ep.MoEConfig(hidden=512, inner=1024, num_experts=16, top_k=2)
      layer = ep.MoE(cfg, mesh)
      params, state = layer.init(jax.random.key(0)), layer.init_state()
      y, metrics = layer(params, x, state)
      loss = task_loss(y) + 1e-2 * metrics.aux_loss + 1e-3 * metrics.z_loss
      state = state.after(metrics.load)

  Frozen and hashable, so programs may close over it. It holds no array.

  Args:
    config: the layer's configuration.
    where: a mesh, or an `EpGroup`. For a mesh, `ep_bootstrap` creates a group
      for this layer: a collective call of all processes of the mesh. All layers
      of a model can share a group, and so its memory:

          first = ep.MoE(cfg, mesh, name="first")
          second = ep.MoE(cfg, first.group, name="second")

      The group of P ranks has P * L experts, where L is E / P, rounded up. A
      group of E experts also serves.
    name: for messages and profiles; None is `config.name`.
    **options: options of `ep_bootstrap` for a mesh, such as
      `max_tokens_per_rank` and `backend`. `config` gives `num_experts`, `top_k`
      and `hidden_dim`, and tokens are not split over `config.tp_axis`.

  Attributes:
    config: the configuration.
    ep_layer: the `EpLayerConfig` of the ops. `config.capacity_factor` gives its
      capacity. If the group has no `max_tokens_per_rank`, the capacity follows
      the tokens of each call.

  Raises:
    ValueError: the config does not fit the group: another number of experts, a
      smaller hidden size, axes that cannot split parameters, or `deterministic`
      with "nccl".
    TypeError: an argument has a wrong type, or options are given for a group.
  """

  config: MoEConfig
  ep_layer: EpLayerConfig
  _keeps_programs: bool = dataclasses.field(repr=False, compare=False)

  def __init__(
    self,
    config: MoEConfig,
    where: Mesh | EpGroup,
    *,
    name: str | None = None,
    **options: Any,
  ) -> None:
    parameters.check_config("MoE", config)
    if isinstance(where, EpGroup):
      if options:
        raise TypeError(
          f"MoE: {sorted(options)} are options of ep_bootstrap, but a group was"
          " given, which has these already; pass its mesh for another group."
        )
      group = where
    elif isinstance(where, Mesh):
      group = _bootstrap(config, where, options)
    else:
      expected = "a mesh or an ep.EpGroup"
      raise arguments.wrong_type("MoE", "where", where, expected)
    ep_layer = layer_of(config, group, name or config.name)
    object.__setattr__(self, "config", config)
    object.__setattr__(self, "ep_layer", ep_layer)
    keeps_programs = not config.experts.is_traced()
    object.__setattr__(self, "_keeps_programs", keeps_programs)

  @property
  def group(self) -> EpGroup:
    """The group whose ranks exchange tokens; `with layer.group:` closes it."""
    return self.ep_layer.group

  @property
  def num_expert_slots(self) -> int:
    """P * L: the length of the axis of experts."""
    return self.group.num_expert_slots

  def init(
    self, key: jax.Array, dtype: DTypeLike = jnp.float32
  ) -> dict[str, jax.Array]:
    """Returns `ep.moe.init` parameters as global arrays, sharded by `specs`.

    The axis of experts has P * L entries, and empty slots are zero.

    Call it in every process of the mesh; each device creates only its part.
    `jax.vmap` over keys creates stacked layers.
    """
    mesh, specs = self.group.mesh, parameters.partition_specs(self.config)
    shardings = {n: NamedSharding(mesh, s) for n, s in self.specs().items()}
    dtype = arrays.dtype("MoE.init", "dtype", dtype)

    @functools.partial(jax.jit, out_shardings=shardings)
    def init(key: jax.Array) -> dict[str, jax.Array]:
      params = parameters.init(key, self.config, dtype)
      return parameters.with_slots(params, specs, self.num_expert_slots)

    params: dict[str, jax.Array] = init(key)
    return params

  def init_state(self) -> State:
    """Returns the initial state, zeros, replicated over the mesh."""
    E = self.config.num_experts
    zeros = functools.partial(jnp.zeros, E, jnp.float32)
    everywhere = NamedSharding(self.group.mesh, PartitionSpec())
    return State(jax.jit(zeros, out_shardings=everywhere)())

  def specs(self, lead: int = 0) -> dict[str, PartitionSpec]:
    """Returns the sharding of each parameter; see `ep.moe.partition_specs`.

    A state is replicated: its spec is `PartitionSpec()`.
    """
    return parameters.partition_specs(
      self.config, self.group.axis_name, lead=lead
    )

  def __call__(
    self,
    params: Mapping[str, jax.Array],
    x: jax.Array,
    state: State | None = None,
    *,
    mask: jax.Array | None = None,
    forced_idx: jax.Array | None = None,
    captured_idx: jax.Array | None = None,
    pad: bool = False,
    placement: Placement | None = None,
  ) -> tuple[jax.Array, Metrics]:
    """Applies the layer to tokens.

    Collective over the group's ranks: over the EP domain for the tokens, and
    over all token ranks for the metrics. For a token x with experts e_k and
    weights w_k, the layer computes

        y = sum_k w_k expert[e_k](x) + shared(x)
        y = sum_k expert[e_k](w_k x) + shared(x)      with weigh = "input"
        expert(x) = h @ w_down + b_down

    where h is, with gates and without gates,

        activation(x @ w_gate + b_gate) * up_activation(x @ w_up + b_up)
        activation(x @ w_up + b_up)

    `config.biases` adds the biases; the shared expert has none. Tokens and
    matrices are multiplied in `config.dtype`, or if it is None, in the dtype
    that `x` and the parameters have. Logits, scores and metrics are float32.

    Works in the local view, in `jax.shard_map` with parameters sharded by
    `specs`, and in the global view. Differentiable in `params`, `x` and through
    the losses of the metrics, in both modes. `jax.vmap` over `x` (and `mask`)
    makes one exchange of all examples, padded as by `pad=True` if the ranks do
    not divide their number; the metrics are of all examples.
    Inside a `shard_map` with `check_vma=False`, the gradient of a metric is the
    gradient of the sum of all ranks' copies: divide it by the number of ranks.

    Args:
      params: as from `init`; for stacked layers, the parameters of one layer.
      x: [..., H], float32, bfloat16 or float16.
      state: as from `init_state`, or None for a choice of experts without bias.
        The state gets no gradient.
      mask: bool [...] or None. Tokens with the mask False visit no expert, not
        even the shared expert, and do not count in the metrics. For these
        tokens y is 0, and x, even NaN, affects no value and no gradient.
      forced_idx: int [..., K] or None, the experts to visit instead of the
        experts of the highest scores, as in `ep.route_topk`. With a placement,
        empty slots or `token_chunks`, a collective of XLA checks the ids.
      captured_idx: int [..., K] or None, the experts that an inference engine
        captured, checked like `forced_idx`. Tokens with an id of -1 were not
        captured: they visit the experts that the layer's router chooses.
      pad: whether, in the global view, the first axis of x may be no multiple
        of the number of ranks, as in `moe_layer`. Then the layer adds masked
        tokens, y is replicated, and `Metrics.aux_loss` is the loss of the
        batch, whatever `config.balance` is.
      placement: the placement of experts in P * L slots; None puts expert e
        into slot e. If P does not divide E, the numbers from E on are empty
        slots, and the group must count slots, as the group of a mesh does. The
        first axis of the experts' parameters has the order of the
        slots (see `ep.moe.move`). All other arguments and results use expert
        ids. A placement changes rounding, and results that depend on which
        experts share a rank: `max_rank_rows`, drops, chunks.

    Returns:
      y, like `x`, also in its sharding over Explicit mesh axes, but with the
      dtype `config.dtype` if there is one, and `Metrics`. `moe_layer` explains
      `overflow="chunk"`, which `config.deterministic` refuses.

    Raises:
      ValueError, TypeError: an argument does not fit; the message names it.
      ep.EpError: when the program runs; see `ep_prepare`.
    """
    config, group = self.config, self.ep_layer.group
    op = f'MoE(layer "{self.ep_layer.name}")'
    arguments.flag(op, "pad", pad)
    bias = None if state is None else _bias(op, config, state)
    x = arrays.array(op, "x", x)
    arrays.check_kind(op, "x", x, jnp.floating)
    view = View.of(group, op)
    _check_params(op, self, params, x.dtype, view.is_local)
    if placement is not None:
      _check_placement(op, group, placement)
    arguments.check(
      x.ndim > 0 and x.shape[-1] == config.hidden,
      op,
      f"x has shape {x.shape}, but [..., {config.hidden}] is expected: tokens"
      " of the config's hidden size.",
    )
    lead = x.shape[:-1]
    mask = arrays.shaped(op, "mask", mask, lead, jnp.bool_)
    ids = config.rule.check_call(
      op, config.num_experts, lead, forced_idx, captured_idx
    )
    run = batching.padded(view, "x", _FILLS, functools.partial(self._run, view))
    tokens = x, mask, *ids
    others = dict(params), bias, placement
    return batching.examples(run, tokens, others, pad)

  def _run(
    self,
    view: View,
    tokens: Sequence[Any],
    others: Sequence[Any],
    token_shape: tuple[int, ...],
    size: int | None,
  ) -> tuple[jax.Array, Metrics]:
    """Applies the layer in a view. Tokens after the first `size` were added."""
    config, layer = self.config, self.ep_layer
    x, mask, *ids = tokens
    if size is not None:
      config = dataclasses.replace(config, balance="batch")
      if mask is None:
        mask = lax.iota(jnp.int32, len(x)) < size
    arguments.check(
      config.balance == "batch" or x.ndim > 2 or view.is_local,
      view.op,
      f"x has shape {x.shape}, but balance = 'sequence' needs [..., S, H]"
      " here: the tokens of a sequence lie along the last axis but one.",
    )
    num_tokens = math.prod(token_shape)
    num_chunks = max(min(config.token_chunks, num_tokens), 1)
    num_tokens = -(-num_tokens // num_chunks)
    layer.check_tokens(view.op, num_tokens)
    sizes = layer.sizes(num_tokens, tail="unspecified")
    rows = jax.ShapeDtypeStruct(x.shape, config.dtype or x.dtype)
    check_rows(view.op, "x", rows, sizes)
    y: jax.Array
    y, metrics = forward.of_rank.in_view(
      view,
      [sizes, config],
      *(x, mask, *ids, *others),
      keep=self._keeps_programs,
    )
    return y, metrics


# `pad` adds tokens with these values of x, mask, forced_idx, captured_idx.
_FILLS = (0, False, -1, -1)


def _bootstrap(
  config: MoEConfig, mesh: Mesh, options: dict[str, Any]
) -> EpGroup:
  axis = options.get("axis_name", "ep")
  if config.tp_axis is not None and "data_axes" not in options:
    others = (a for a in mesh.axis_names if a not in (axis, config.tp_axis))
    options = {"data_axes": tuple(others)} | options
  return ep_bootstrap(
    mesh,
    num_experts=num_slots(config, dict(mesh.shape).get(axis, 1)),
    top_k=config.top_k,
    hidden_dim=config.hidden,
    **options,
  )


def _bias(op: str, config: MoEConfig, state: State) -> Any:
  cure = "pass init_state(), or of a bias, ep.moe.State(bias)"
  arguments.check_type(op, "state", state, State, cure)
  bias = arrays.float32(op, "state.bias", state.bias)
  shape = (config.num_experts,)
  return arrays.shaped(op, "state.bias", bias, shape, jnp.floating)


def _check_placement(op: str, group: EpGroup, placement: Placement) -> None:
  check_placement(op, "placement", placement, group.num_expert_slots)
  arguments.check(
    group.num_experts == group.num_expert_slots,
    op,
    f"a placement uses all {group.num_expert_slots} slots, but the group has"
    f" num_experts = {group.num_experts}; bootstrap it with the number of"
    " slots, or give ep.MoE a mesh.",
  )


def _check_params(
  op: str,
  layer: MoE,
  params: Mapping[str, jax.Array],
  x_dtype: jnp.dtype,
  is_local: bool,
) -> None:
  config, group = layer.config, layer.ep_layer.group
  shapes = parameters.shapes(config, group.num_expert_slots)
  names = sorted(params) if isinstance(params, Mapping) else type(params)
  arguments.check(
    names == sorted(shapes),
    op,
    f"params holds {names}, but the config has {sorted(shapes)}; make"
    " them with ep.moe.init.",
  )
  specs = parameters.specs_of(config, group.axis_name)
  part = "the part of a rank" if is_local else "the whole array"
  for name, shape in shapes.items():
    sizes = [group.mesh.shape[a] if a else 1 for a in specs[name]]
    if any(n % d for n, d in zip(shape, sizes, strict=True)):
      raise ValueError(
        f"{op}: params[{name!r}] has shape {shape}, which cannot be split as"
        f" {specs[name]} says over a mesh of {dict(group.mesh.shape)}; choose"
        " sizes that the mesh axes divide."
      )
    if is_local:
      shape = tuple(n // d for n, d in zip(shape, sizes, strict=True))
    what, param = f"params[{name!r}]", params[name]
    if not isinstance(param, jax.Array | np.ndarray):
      raise arguments.wrong_type(op, what, param, "an array")
    if param.shape != shape:
      cure = "For stacked layers, pass the parameters of one."
      if param.shape == parameters.shapes(config)[name]:
        cure = "Append empty slots with ep.moe.with_slots."
      raise ValueError(
        f"{op}: {what} has shape {param.shape}, but {shape} is expected,"
        f" {part}. {cure}"
      )
    arrays.check_kind(op, what, param, jnp.floating)
    _check_dtype(op, config, name, param.dtype, x_dtype)
  if is_local and config.tp_axis:
    arguments.check(
      compat.checks_vma(),
      op,
      f"tp_axis = {config.tp_axis!r} needs a jax.shard_map with check_vma=True:"
      " without it, the gradient of a sum over ranks is counted once per rank.",
    )


def _check_dtype(
  op: str, config: MoEConfig, name: str, dtype: jnp.dtype, x_dtype: jnp.dtype
) -> None:
  if config.deterministic and dtype != jnp.float32:
    raise TypeError(
      f"{op}: params[{name!r}] is {dtype}, but deterministic = True adds"
      " gradients in float32, and rounding them before would depend on the"
      " split of the ranks; keep parameters in float32, and name the dtype of"
      " products by MoEConfig.dtype, or pass deterministic=False."
    )
  is_router = name.startswith("router")  # always multiplied in float32
  if config.dtype is None and dtype != x_dtype and not is_router:
    raise TypeError(
      f"{op}: params[{name!r}] is {dtype}, but x is {x_dtype}; convert one,"
      " or name the dtype in which they are multiplied, such as"
      " MoEConfig(dtype=jnp.bfloat16)."
    )
