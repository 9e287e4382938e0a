# SPDX-License-Identifier: Apache-2.0
"""MoE: a whole MoE layer, from tokens to tokens and metrics."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from ep._src.base import arguments, arrays, compat
from ep._src.base.meshes import Mesh
from ep._src.group.bootstrap import ep_bootstrap
from ep._src.group.group import EpGroup, EpLayerConfig
from ep._src.matmul import row_map
from ep._src.moe import apply, batching, parameters
from ep._src.moe.config import MoEConfig
from ep._src.moe.metrics import Metrics
from ep._src.moe.padding import Padding
from ep._src.moe.placement import check_placement, Placement
from ep._src.moe.state import State
from ep._src.ops import views


@dataclasses.dataclass(frozen=True, init=False)
class MoE:
  """A MoE layer on a mesh: routes, exchanges, runs the experts, and sums.

      cfg = ep.MoEConfig(hidden=512, inner=1024, num_experts=16, top_k=2)
      layer = ep.MoE(cfg, mesh)
      params, state = layer.init(jax.random.key(0)), layer.init_state()
      y, metrics = layer(params, x, state)
      loss = task_loss(y) + 1e-2 * metrics.aux_loss + 1e-3 * metrics.z_loss
      state = state.after(metrics.load)

  Frozen and hashable, so programs may close over it. It holds no array.

  Args:
    config: the layer's sizes and choices.
    where: a mesh, or the `EpGroup` of one. A mesh gets a group for this layer,
      as `ep_bootstrap` makes it: a collective call of all processes of the
      mesh. All layers of a model can share a group, and memory:

          first = ep.MoE(cfg, mesh, name="first")
          second = ep.MoE(cfg, first.group, name="second")

      The group of P ranks has E + P * `replica_slots` experts.
    name: for messages and traces; None is `config.name`.
    **options: of `ep_bootstrap`, with a mesh, such as `max_tokens_per_rank` and
      `backend`. `num_experts`, `top_k` and `hidden_dim` are those of `config`,
      and tokens are not split over `config.tp_axis`.

  Attributes:
    config: the configuration.
    ep_layer: the `EpLayerConfig` of the ops. `config.capacity_factor` gives its
      capacity; with `config.replica_slots` and none, calls may take less: the
      mean of the ranks, if copies suffice for it. If the group has no
      `max_tokens_per_rank`, the capacity follows the tokens of each call.

  Raises:
    ValueError: the config does not fit the group: another number of experts, a
      smaller hidden size, axes that cannot split parameters, or `deterministic`
      with "nccl".
    TypeError: an argument has another type, or a group comes with options.
  """

  config: MoEConfig
  ep_layer: EpLayerConfig

  def __init__(
    self,
    config: MoEConfig,
    where: Mesh | EpGroup,
    *,
    name: str | None = None,
    **options: Any,
  ) -> None:
    if not isinstance(config, MoEConfig):
      raise TypeError(
        f"MoE: config is a {type(config).__name__}, but an ep.MoEConfig is"
        " expected."
      )
    if isinstance(where, EpGroup):
      if options:
        raise TypeError(
          f"MoE: {sorted(options)} are options of ep_bootstrap, but a group was"
          " given, which has them already; pass its mesh for a group of others."
        )
      group = where
    else:
      group = _bootstrap(config, where, options)
    ep_layer = _bind(config, group, name or config.name)
    object.__setattr__(self, "config", config)
    object.__setattr__(self, "ep_layer", ep_layer)

  @property
  def group(self) -> EpGroup:
    """The group whose ranks exchange tokens; `with layer.group:` closes it."""
    return self.ep_layer.group

  def init(
    self, key: jax.Array, dtype: DTypeLike = jnp.float32
  ) -> dict[str, jax.Array]:
    """Returns new parameters, as `ep.moe.init`, on the mesh by `specs`.

    Every process of the mesh calls it; each device makes only its own part. In
    the global view. `jax.vmap` over keys makes stacked layers.
    """
    mesh = self.group.mesh
    shardings = {n: NamedSharding(mesh, s) for n, s in self.specs().items()}
    init = jax.jit(
      parameters.init, static_argnums=(1, 2), out_shardings=shardings
    )
    dtype = arrays.dtype("MoE.init", "dtype", dtype)
    return init(key, self.config, dtype)

  def init_state(self) -> State:
    """Returns the first state, of zeros, on all devices of the mesh."""
    E = self.config.num_experts
    zeros = functools.partial(jnp.zeros, E, jnp.float32)
    everywhere = NamedSharding(self.group.mesh, PartitionSpec())
    return State(jax.jit(zeros, out_shardings=everywhere)())

  def specs(self, lead: int = 0) -> dict[str, PartitionSpec]:
    """Returns how each parameter is sharded; see `ep.moe.partition_specs`.

    A state is whole on every device: its spec is `PartitionSpec()`.
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
    key: jax.Array | None = None,
    pad: bool = False,
    placement: Placement | None = None,
  ) -> tuple[jax.Array, Metrics]:
    """Applies the layer to tokens.

    Collective over the group's ranks: over the EP domain for the tokens, and
    over all token ranks for the metrics. For a token x, experts e_k and weights
    w_k,

        y = sum_k w_k expert[e_k](x) + shared(x)
        y = sum_k expert[e_k](w_k x) + shared(x)      with weigh = "input"
        expert(x) = h @ w_down + b_down

    where h is, with gates and without,

        activation(x @ w_gate + b_gate) * up_activation(x @ w_up + b_up)
        activation(x @ w_up + b_up)

    Biases are there with `config.biases`; the shared expert, if there is one,
    has none. Tokens and matrices are multiplied in the dtype of `x`, whatever
    the dtype of the parameters; logits, scores and metrics are float32.

    Works in the local view, in `jax.shard_map` with the parameters that `specs`
    gives a rank, and in the global one. Differentiable in `params`, `x` and
    through the losses of the metrics, in both modes. `jax.vmap` over `x` (and
    `mask`) makes one exchange of all examples, and the metrics are of all
    examples. Inside a `shard_map` with `check_vma=False`, the gradient of a
    metric is the gradient of the sum of all ranks' copies: divide it by the
    number of ranks.

    Args:
      params: as from `init`; of stacked layers, the parameters of one.
      x: [..., H], float32, bfloat16 or float16.
      state: as from `init_state`, or None for no bias when experts are chosen.
        It gets no gradient.
      mask: bool [...] or None. Tokens where it is False visit no expert, not
        even the shared one, and do not count in the metrics: y is 0 there, and
        what x holds, even NaN, reaches no value and no gradient.
      forced_idx: int32 [..., K] or None, the experts to visit in the place of
        those with the highest scores, as in `ep.route_topk`. With a placement,
        `replica_slots` or `token_chunks`, a collective of XLA checks them.
      key: a key of `jax.random`, needed if `config.jitter` is not 0. Each rank
        folds in its number.
      pad: whether x may have a first axis that does not divide over the ranks
        in the global view, as in `moe_layer`. If it does not, then masked
        tokens are added, y is not split over the ranks, and `Metrics.aux_loss`
        is the loss of the batch whatever `config.balance` is.
      placement: where experts are, of E slots; None is their own order. The
        experts' parameters have the order of its slots along the first axis,
        as `ep.moe.move` brings them there; all else numbers experts. Results
        are as without it, up to rounding, unless they depend on the experts
        that share a rank: `max_rank_rows`, drops, chunks.

    Returns:
      y, like `x`, and `Metrics`. What `overflow="chunk"` means is in
      `moe_layer`; `config.deterministic` refuses it.

    Raises:
      ValueError, TypeError: an argument does not fit; it is named.
      ep.EpError: when the program runs; see `ep_prepare`.
    """
    config, group = self.config, self.group
    op = f'MoE(layer "{self.ep_layer.name}")'
    arguments.flag(op, "pad", pad)
    bias = _bias(op, state)
    x, bias, mask = jax.tree.map(jnp.asarray, (x, bias, mask), is_leaf=_is_list)
    if forced_idx is not None:
      forced_idx = arrays.array(op, "forced_idx", forced_idx)
    view = views.View.of(group, op)
    _check_params(op, group, config, params, view.is_local)
    check_placement(op, "placement", placement, config.num_experts)
    arguments.check(
      placement is None or placement.experts.ndim == 1,
      op,
      "placement is of several layers; pass that of one.",
    )
    _check_tokens(op, config, x, bias, mask, forced_idx)

    keep = not config.experts.is_traced()

    def run(tokens, others):
      x, mask, forced_idx = tokens
      padding = Padding.of(view, x.shape[:-1]) if pad else Padding(())
      view_config = config
      arguments.check(
        config.balance == "batch" or x.ndim > 2 or view.is_local,
        op,
        f"x has shape {x.shape}, but balance = 'sequence' needs [..., S, H]"
        " here: the tokens of a sequence lie along the last axis but one.",
      )
      if padding.count is not None:
        mask = jnp.ones(x.shape[:-1], bool) if mask is None else mask
        x, mask = padding.add(x, 0), padding.add(mask, False)
        if forced_idx is not None:
          forced_idx = padding.add(forced_idx, -1)
        view_config = dataclasses.replace(config, balance="batch")
      view.lead("x", x.shape)
      y, metrics = view.call(
        apply.of_rank,
        [self.ep_layer, view_config],
        [x, mask, forced_idx, *others],
        [views.TOKENS] * 3 + [self.specs()] + [views.REPLICATED] * 3,
        (views.TOKENS, views.REPLICATED),
        keep=keep,
      )
      return padding.remove(y), metrics

    tokens, others = (x, mask, forced_idx), (dict(params), bias, key, placement)
    return batching.examples(run, tokens, others)


def _bootstrap(config, mesh, options):
  """Returns a group for a layer that is alone on its mesh."""
  axis = options.get("axis_name", "ep")
  if config.tp_axis is not None and "data_axes" not in options:
    others = (a for a in mesh.axis_names if a not in (axis, config.tp_axis))
    options = {"data_axes": tuple(others)} | options
  copies = config.replica_slots * dict(mesh.shape).get(axis, 0)
  return ep_bootstrap(
    mesh,
    num_experts=config.num_experts + copies,
    top_k=config.top_k,
    hidden_dim=config.hidden,
    **options,
  )


def _bind(config, group, name):
  """Returns the layer's `EpLayerConfig`, if the group fits."""
  what = f'MoE(layer "{name}")'
  slots, copies = config.num_experts, ""
  if config.replica_slots:
    slots += group.ep_size * config.replica_slots
    copies = f" with replica_slots = {config.replica_slots} needs {slots}"
  arguments.check(
    slots == group.num_experts,
    what,
    f"num_experts = {config.num_experts}{copies}, but the group has"
    f" {group.num_experts}; bootstrap a group for this model.",
  )
  arguments.check(
    group.hidden_dim is None or config.hidden <= group.hidden_dim,
    what,
    f"hidden = {config.hidden}, but the group's rows have"
    f" hidden_dim = {group.hidden_dim}; bootstrap a group for this model.",
  )
  arguments.check(
    not config.deterministic or group.backend != "nccl",
    what,
    'deterministic = True, but backend = "nccl" adds the outputs of experts in'
    " an order of its own; pass deterministic=False, or bootstrap the group"
    ' with backend="xla".',
  )
  _check_axes(what, group, config)
  layer = EpLayerConfig(
    group,
    top_k=config.top_k,
    capacity_factor=config.capacity_factor,
    # Blocks of rows then are alike, also the last one (row_map.py).
    capacity_multiple=row_map.HEIGHT if config.deterministic else 1,
    overflow=config.overflow,
    drop_by=config.drop_by,
    wire=config.wire,
    name=name,
  )
  arguments.check(
    config.token_chunks == 1 or layer.overflow != "chunk",
    what,
    f"token_chunks = {config.token_chunks} splits the tokens of every step,"
    ' and overflow = "chunk" those of a step that does not fit; choose one.',
  )
  most = group.max_tokens_per_rank
  if most is not None and config.token_chunks > 1:
    of_part = layer.rows_for(-(-most // config.token_chunks))
    layer = dataclasses.replace(layer, recv_capacity_per_rank=of_part)
  fits_all = (
    config.capacity_factor is None and group.recv_capacity_per_rank is None
  )
  local = config.num_experts // group.ep_size
  arguments.check(
    not config.replica_slots or most is None or most >= local,
    what,
    f"max_tokens_per_rank = {most}, but a copy sends a row of each of a rank's"
    f" {local} experts at once; raise it to that at least.",
  )
  arguments.check(
    config.drop_by in (None, "slot") or not fits_all,
    what,
    f"drop_by = {config.drop_by!r}, but capacity_factor = None leaves room for"
    " any routing; give a factor, such as 1.25.",
  )
  return layer


def _bias(op, state):
  if state is None:
    return None
  if not isinstance(state, State):
    raise TypeError(
      f"{op}: state is a {type(state).__name__}, but an ep.moe.State is"
      " expected, as from init_state(); of a bias, ep.moe.State(bias)."
    )
  return arrays.float32(op, "state.bias", state.bias)


def _is_list(x):
  return isinstance(x, list)


def _check_tokens(op, config, x, bias, mask, forced_idx):
  """Raises unless the arrays of tokens have fitting shapes and dtypes."""
  arguments.check(
    x.ndim > 0 and x.shape[-1] == config.hidden,
    op,
    f"x has shape {x.shape}, but [..., {config.hidden}] is expected: tokens of"
    " the config's hidden size.",
  )
  lead = x.shape[:-1]
  for name, array, shape, kind, what in [
    ("bias", bias, (config.num_experts,), jnp.floating, "a float"),
    ("mask", mask, lead, jnp.bool_, "a bool"),
    (
      "forced_idx",
      forced_idx,
      (*lead, config.top_k),
      jnp.integer,
      "an integer",
    ),
  ]:
    if array is None:
      continue
    if not jnp.issubdtype(array.dtype, kind):
      raise TypeError(
        f"{op}: {name} is {array.dtype}, but {what} array is expected."
      )
    arguments.check(
      array.shape == shape,
      op,
      f"{name} has shape {array.shape}, but {shape} is expected for x of shape"
      f" {x.shape}.",
    )


def _check_axes(op, group, config):
  """Raises unless `tp_axis` and `fsdp_axis` can split parameters."""
  for name, axis in [
    ("tp_axis", config.tp_axis),
    ("fsdp_axis", config.fsdp_axis),
  ]:
    if axis is None:
      continue
    arguments.check(
      axis in group.mesh.shape and axis != group.axis_name,
      op,
      f"{name} = {axis!r}, but it must be one of the mesh axes"
      f" {tuple(group.mesh.shape)} and not the EP axis {group.axis_name!r}.",
    )
  arguments.check(
    config.tp_axis not in group.token_axes,
    op,
    f"tp_axis = {config.tp_axis!r}, but the group splits tokens over that axis,"
    f" whose ranks must hold the same tokens; pass ep_bootstrap(data_axes="
    f"{tuple(a for a in group.data_axes if a != config.tp_axis)}).",
  )


def _check_params(op, group, config, params, is_local):
  """Raises unless the parameters are those of the config."""
  shapes = parameters.shapes(config)
  names = sorted(params) if isinstance(params, Mapping) else type(params)
  arguments.check(
    names == sorted(shapes),
    op,
    f"params holds {names}, but the config has {sorted(shapes)}; make"
    " them with ep.moe.init.",
  )
  specs = parameters.partition_specs(config, group.axis_name)
  part = "the part of a rank" if is_local else "the whole array"
  for name, shape in shapes.items():
    sizes = [group.mesh.shape[a] if a else 1 for a in specs[name]]
    arguments.check(
      all(n % d == 0 for n, d in zip(shape, sizes, strict=True)),
      op,
      f"params[{name!r}] has shape {shape}, which cannot be split as"
      f" {specs[name]} says over a mesh of {dict(group.mesh.shape)}; choose"
      " sizes that the mesh axes divide.",
    )
    if is_local:
      shape = tuple(n // d for n, d in zip(shape, sizes, strict=True))
    arguments.check(
      params[name].shape == shape,
      op,
      f"params[{name!r}] has shape {params[name].shape}, but {shape} is"
      f" expected, {part}. Of stacked layers, pass those of one.",
    )
    dtype = jnp.result_type(params[name])
    if config.deterministic and dtype != jnp.float32:
      raise TypeError(
        f"{op}: params[{name!r}] is {dtype}, but deterministic = True adds"
        " gradients in float32, and rounding them before would depend on the"
        " split of the ranks; keep parameters in float32, which are multiplied"
        " in the dtype of x, or pass deterministic=False."
      )
  if is_local and config.tp_axis:
    arguments.check(
      compat.checks_vma(),
      op,
      f"tp_axis = {config.tp_axis!r} needs a jax.shard_map with check_vma=True:"
      " without it, the gradient of a sum over ranks is counted once per rank.",
    )
