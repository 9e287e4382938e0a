# SPDX-License-Identifier: Apache-2.0
"""apply: a whole MoE layer, from tokens to tokens and metrics."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools

import jax
from jax import lax
import jax.numpy as jnp

from ep._src.base import arguments, compat
from ep._src.group.group import check_layer, EpLayerConfig
from ep._src.matmul import ordered_sum
from ep._src.moe import batching, losses, parameters, router
from ep._src.moe.config import MoEConfig
from ep._src.moe.experts import through_experts
from ep._src.moe.metrics import Metrics
from ep._src.moe.padding import Padding
from ep._src.ops import views


def apply(
  layer: EpLayerConfig,
  config: MoEConfig,
  params: Mapping[str, jax.Array],
  x: jax.Array,
  *,
  bias: jax.Array | None = None,
  mask: jax.Array | None = None,
  forced_idx: jax.Array | None = None,
  key: jax.Array | None = None,
  pad: bool = False,
) -> tuple[jax.Array, Metrics]:
  """Applies a MoE layer: routes, exchanges, runs the experts, and sums.

  Collective over the group's ranks: over the EP domain for the tokens, and over
  all token ranks for the metrics. For a token x, experts e_k and weights w_k,

      y = sum_k w_k expert[e_k](x) + shared(x)

  where `Experts` in ep/_src/moe/network.py has the formula of an expert, and
  the shared expert, if there is one, has the same without biases. Tokens and
  matrices are multiplied in the dtype of `x`, whatever the dtype of the
  parameters; logits, scores and metrics are float32.

  Works in the local view, in `jax.shard_map` with the parameters that
  `partition_specs` gives a rank, and in the global one. Differentiable in
  `params`, `x` and through the losses of the metrics, in both modes. `jax.vmap`
  over `x` (and `mask`) makes one exchange of all examples, and the metrics are
  of all examples. Inside a `shard_map` with `check_vma=False`, the gradient of
  a metric is the gradient of the sum of all ranks' copies: divide it by the
  number of ranks.

      cfg = ep.MoEConfig(hidden=512, inner=1024, num_experts=16, top_k=2)
      layer = cfg.layer(group)
      params = ep.moe.init(jax.random.key(0), cfg)
      y, metrics = ep.moe.apply(layer, cfg, params, x)
      loss = task_loss(y) + 1e-2 * metrics.aux_loss + 1e-3 * metrics.z_loss

  Args:
    layer: `config.layer(group)`. What `overflow="chunk"` means is in
      `moe_layer`; `config.deterministic` refuses it.
    config: the layer's sizes and choices.
    params: as from `init`; of stacked layers, the parameters of one.
    x: [..., H], float32, bfloat16 or float16.
    bias: float32 [E] or None, added to the scores for the choice of experts;
      see `update_bias`. It gets no gradient.
    mask: bool [...] or None. Tokens where it is False visit no expert, not
      even the shared one, and do not count in the metrics: y is 0 there, and
      what x holds, even NaN, reaches no value and no gradient.
    forced_idx: int32 [..., K] or None, the experts to visit in the place of
      those with the highest scores, as in `ep.route_topk`.
    key: a key of `jax.random`, needed if `config.jitter` is not 0. Each rank
      folds in its number.
    pad: whether x may have a first axis that does not divide over the ranks in
      the global view, as in `moe_layer`. If it does not, then masked tokens are
      added, y is not split over the ranks, and `Metrics.aux_loss` is the loss
      of the batch whatever `config.balance` is.

  Returns:
    y, like `x`, and `Metrics`.

  Raises:
    ValueError, TypeError: an argument does not fit; it is named.
    ep.EpError: when the program runs; see `ep_prepare`.
  """
  check_layer("ep.moe.apply", layer)
  group = layer.group
  op = f'ep.moe.apply(layer "{layer.name}")'
  arguments.flag(op, "pad", pad)
  x, bias, mask = jax.tree.map(jnp.asarray, (x, bias, mask), is_leaf=_is_list)
  if forced_idx is not None:
    forced_idx = arguments.array(op, "forced_idx", forced_idx)
  view = views.View.of(group, op)
  _check(op, layer, config, params, view.is_local)
  _check_tokens(op, config, x, bias, mask, forced_idx)

  keep = not config.experts.is_traced()

  def run(tokens, others):
    x, mask, forced_idx = tokens
    padding = Padding.of(view, x.shape[:-1]) if pad else Padding(())
    view_config = config
    arguments.check(
      config.balance == "batch" or x.ndim > 2 or view.is_local,
      op,
      f"x has shape {x.shape}, but balance = 'sequence' needs [..., S, H] here:"
      " the tokens of a sequence lie along the last axis but one.",
    )
    if padding.count is not None:
      mask = jnp.ones(x.shape[:-1], bool) if mask is None else mask
      x, mask = padding.add(x, 0), padding.add(mask, False)
      if forced_idx is not None:
        forced_idx = padding.add(forced_idx, -1)
      view_config = dataclasses.replace(config, balance="batch")
    view.lead("x", x.shape)
    specs = parameters.partition_specs(config, group.axis_name)
    y, metrics = view.call(
      _apply,
      [layer, view_config],
      [x, mask, forced_idx, *others],
      [views.TOKENS] * 3 + [specs] + [views.REPLICATED] * 2,
      (views.TOKENS, views.REPLICATED),
      keep=keep,
    )
    return padding.remove(y), metrics

  tokens, others = (x, mask, forced_idx), (dict(params), bias, key)
  return batching.examples(run, tokens, others)


def _apply(layer, config, x, mask, forced_idx, params, bias, key):
  if not config.deterministic:
    return _layer(layer, config, x, mask, forced_idx, params, bias, key)
  # What surrounds the layer and its gradients differs between the views. XLA
  # would fuse it with parts of them, which then round in other ways.
  x, params = _apart((x, params))
  return _apart(_layer(layer, config, x, mask, forced_idx, params, bias, key))


def _apart(arrays):
  """Returns arrays. XLA fuses nothing later with them or their cotangents."""
  return jax.tree.map(lax.optimization_barrier, arrays)


def _layer(layer, config, x, mask, forced_idx, params, bias, key):
  params = _local_params(layer, config, params)

  def present(rows):
    return rows if mask is None else jnp.where(mask[..., None], rows, 0)

  x = present(x)
  with jax.named_scope("route"):
    logits = jnp.matmul(
      x.astype(jnp.float32),
      params["router"].astype(jnp.float32),
      precision=lax.Precision.HIGHEST,
    )
    if config.router_bias:
      logits += params["router_bias"].astype(jnp.float32)
    if key is not None:
      key = jax.random.fold_in(key, lax.axis_index(layer.group.token_axes))
    route = functools.partial(
      router.route_topk,
      logits,
      config.top_k,
      num_candidates=config.num_candidates,
      score=config.score,
      normalize=config.normalize,
      scale=config.scale,
      selection_bias=bias,
      mask=mask,
      num_groups=config.num_groups,
      top_groups=config.top_groups,
      group_best=config.group_best,
      jitter=config.jitter,
      key=key,
    )
    topk_idx, topk_weights = route(forced_idx=forced_idx)
  # Ranks of `tp_axis` multiply tokens and weights by different parts of the
  # inner size. So tokens vary over that axis from here on, and weights from
  # dispatch on. At these places their gradients are summed over the axis,
  # because there the gradients are as small as the tokens.
  inner_axes = [config.tp_axis] if config.tp_axis else []
  (x_inner,) = compat.vary_together(x, axes=inner_axes)
  experts = {n: p for n, p in params.items() if n.startswith(("w_", "b_"))}
  y, handle = through_experts(
    layer,
    config.experts,
    experts,
    x_inner,
    topk_idx,
    topk_weights,
    weigh_moved=lambda used_idx: route(forced_idx=used_idx)[1],
    beside=(lambda: present(_shared(config, params, x_inner)))
    if config.shared_inner
    else None,
  )
  if config.tp_axis:
    y = lax.psum(y, config.tp_axis)
  with jax.named_scope("metrics"):
    choices = topk_idx[..., : config.top_k]
    return y, _metrics(layer, config, logits, choices, mask, handle)


def _local_params(layer, config, params):
  """Returns a rank's parameters as they are multiplied.

  They are whole along the axis of `fsdp_axis`. The outputs of the ranks of
  `tp_axis` are added, so only the first of them adds the last bias.
  """
  group = layer.group
  specs = parameters.partition_specs(config, group.axis_name)
  params = dict(params)
  fsdp = config.fsdp_axis
  gather = lax.all_gather
  if config.deterministic or fsdp not in group.token_axes:
    gather = ordered_sum.all_gather
  for name, spec in specs.items():
    if fsdp and fsdp in spec:
      axis = spec.index(fsdp)
      params[name] = gather(params[name], fsdp, axis=axis, tiled=True)
    if config.deterministic:
      copies = [a for a in group.token_axes if a == fsdp or a not in spec]
      params[name] = ordered_sum.replicated(params[name], copies)
  if config.biases and (axis := config.tp_axis):
    is_first = lax.axis_index(axis) == 0
    params["b_down"] = jnp.where(is_first, params["b_down"], 0)
  return params


@jax.named_scope("shared_experts")
def _shared(config, params, x):
  def product(x, name):
    return x @ params["shared_" + name].astype(x.dtype)

  names = ["up", "gate"] if config.gated else ["up"]
  hidden = config.experts.hidden(*(product(x, name) for name in names))
  return product(hidden, "down")


def _metrics(layer, config, logits, topk_idx, mask, handle):
  axes = layer.group.token_axes
  experts = config.num_experts
  choices = jax.nn.one_hot(topk_idx, experts, dtype=jnp.float32)
  psum = ordered_sum.ordered_psum if config.deterministic else lax.psum
  batch = dict(mask=mask, axis_name=axes, psum=psum)
  dropped = handle.dropped_counts.sum(dtype=jnp.int32)
  if layer.overflow == "chunk":  # these went in chunks
    dropped = jnp.zeros_like(dropped)
  return Metrics(
    load=lax.psum(choices.reshape(-1, experts).sum(axis=0), axes),
    aux_loss=_BALANCE[config.balance](
      logits, topk_idx, score=config.score, **batch
    ),
    z_loss=losses.router_z_loss(logits, **batch),
    entropy=losses.router_entropy(logits, **batch),
    dropped=lax.psum(dropped, axes),
    max_rank_rows=lax.pmax(handle.total_recv_tokens[0], axes),
  )


_BALANCE = {
  "batch": losses.load_balancing_loss,
  "sequence": losses.sequence_balancing_loss,
}


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


def _check(op, layer, config, params, is_local):
  """Raises unless layer and parameters are those of the config."""
  group = layer.group
  if not isinstance(config, MoEConfig):
    raise TypeError(
      f"{op}: config is a {type(config).__name__}, but an ep.MoEConfig is"
      " expected: the one of which the layer was made."
    )
  _check_axes(op, group, config)
  for name, got, expected in [
    ("num_experts", group.num_experts, config.num_experts),
    ("top_k", layer.top_k, config.top_k),
    ("capacity_factor", layer.capacity_factor, config.capacity_factor),
  ]:
    arguments.check(
      got == expected,
      op,
      f"the layer has {name} = {got}, but the config {expected}; pass"
      " config.layer(group).",
    )
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
  if is_local and config.tp_axis:
    arguments.check(
      compat.checks_vma(),
      op,
      f"tp_axis = {config.tp_axis!r} needs a jax.shard_map with check_vma=True:"
      " without it, the gradient of a sum over ranks is counted once per rank.",
    )
