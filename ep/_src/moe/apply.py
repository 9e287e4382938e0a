# SPDX-License-Identifier: Apache-2.0
"""Applies a whole MoE layer to the tokens of a rank."""

from __future__ import annotations

from collections.abc import Mapping
import math

import jax
from jax import lax
import jax.numpy as jnp

from ep._src.base import arrays, compat
from ep._src.group.group import EpLayerConfig
from ep._src.matmul import ordered_sum
from ep._src.moe import losses, parameters, router
from ep._src.moe.choices import checked_choices
from ep._src.moe.config import MoEConfig
from ep._src.moe.experts import through_experts
from ep._src.moe.metrics import Metrics
from ep._src.moe.parts import in_parts
from ep._src.moe.placement import Placement
from ep._src.moe.replicas import Replicas, with_room
from ep._src.moe.shared import SharedExpert


def of_rank(
  layer: EpLayerConfig,
  config: MoEConfig,
  x: jax.Array,
  mask: jax.Array | None,
  forced_idx: jax.Array | None,
  params: Mapping[str, jax.Array],
  bias: jax.Array | None,
  key: jax.Array | None,
  placement: Placement | None,
) -> tuple[jax.Array, Metrics]:
  """Returns what `ep.MoE` does, for the tokens and the parameters of a rank."""
  others = bias, key, placement
  if not config.deterministic:
    return _layer(layer, config, x, mask, forced_idx, params, *others)
  # What surrounds the layer and its gradients differs between the views. XLA
  # would fuse it with parts of them, which then round in other ways.
  x, params = _apart((x, params))
  return _apart(_layer(layer, config, x, mask, forced_idx, params, *others))


def _apart(arrays):
  """Returns arrays. XLA fuses nothing later with them or their cotangents."""
  return jax.tree.map(lax.optimization_barrier, arrays)


def _layer(layer, config, x, mask, forced_idx, params, bias, key, placement):
  params = _local_params(layer, config, params)

  x = x if mask is None else jnp.where(mask[..., None], x, 0)
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
    topk_idx, topk_weights = router.route_topk(
      logits,
      config.top_k,
      score=config.score,
      normalize=config.normalize,
      scale=config.scale,
      selection_bias=bias,
      mask=mask,
      num_groups=config.num_groups,
      top_groups=config.top_groups,
      group_best=config.group_best,
      forced_idx=forced_idx,
      jitter=config.jitter,
      key=key,
    )
    # Forced choices may be a constant, which all ranks share.
    (topk_idx,) = compat.vary_together(topk_idx, axes=layer.group.token_axes)
    as_written = placement is None and not config.replica_slots
    as_written &= config.token_chunks == 1
    if forced_idx is not None and not as_written:
      topk_idx = checked_choices(layer, config.num_experts, topk_idx)
  # Ranks of `tp_axis` multiply tokens and weights by different parts of the
  # inner size. So tokens vary over that axis from here on, and weights from
  # dispatch on. At these places their gradients are summed over the axis,
  # because there the gradients are as small as the tokens.
  inner_axes = [config.tp_axis] if config.tp_axis else []
  (x_inner,) = compat.vary_together(x, axes=inner_axes)
  experts = {n: p for n, p in params.items() if n.startswith(("w_", "b_"))}
  L = config.num_experts // layer.ep_size
  slots = lax.axis_index(layer.group.axis_name) * L + arrays.iota(L)
  where: Placement | Replicas | None = placement
  if config.replica_slots:
    layer = with_room(layer, config, math.prod(x.shape[:-1]))
    where = Replicas.of(layer, config, topk_idx, placement)
    experts, slots = where.copied(experts, config.hidden), where.experts
  args = layer, config.experts, experts, x_inner, topk_idx, topk_weights
  shared = None
  if config.shared_inner:
    shared = SharedExpert(config, params, mask)
  num_parts = min(config.token_chunks, math.prod(x.shape[:-1]))
  if num_parts > 1:
    y, received = in_parts(*args, num_parts, placement)
    y = y if shared is None else y + shared(x_inner)
  else:
    y, handle = through_experts(*args, placement=where, shared=shared)
    received = handle.total_recv_tokens, handle.dropped_counts
  if config.tp_axis:
    y = lax.psum(y, config.tp_axis)
  with jax.named_scope("metrics"):
    metrics = _metrics(
      layer, config, logits, topk_idx, mask, placement, slots, *received
    )
    return y, metrics


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


def _metrics(
  layer,
  config,
  logits,
  topk_idx,
  mask,
  placement,
  slots,
  rows,
  dropped_counts,
):
  axes = layer.group.token_axes
  experts = config.num_experts
  load = jax.nn.one_hot(topk_idx, experts, dtype=jnp.float32)
  drops = jnp.zeros(experts, jnp.int32)
  if layer.overflow != "chunk":  # else what the handle drops goes in chunks
    drops = drops.at[slots].add(dropped_counts)
  of_ranks = jnp.zeros(lax.axis_size(axes), jnp.int32)
  sums = dict(
    load=load.reshape(-1, experts).sum(axis=0),
    drops=_halves(drops),
    rows=_halves(of_ranks.at[lax.axis_index(axes)].set(rows[0])),
  )
  terms = dict(
    aux_loss=_BALANCE[config.balance](logits, topk_idx, config.score, mask),
    z_loss=losses.logit_size(logits, mask),
    entropy=losses.score_entropy(logits, mask),
  )
  psum = ordered_sum.ordered_psum if config.deterministic else lax.psum
  sums, of_terms = losses.summed(
    (sums, {name: term.sums for name, term in terms.items()}), axes, psum
  )
  drops = _whole(sums["drops"])
  if placement is not None:
    drops = drops[placement.slots]
  return Metrics(
    load=sums["load"],
    drops=drops,
    max_rank_rows=_whole(sums["rows"]).max(),
    **{name: term.loss(*of_terms[name]) for name, term in terms.items()},
  )


def _halves(x):
  """Returns float32 arrays whose sums over up to 4096 ranks are exact."""
  return (x >> 12).astype(jnp.float32), (x & 4095).astype(jnp.float32)


def _whole(halves):
  """Returns the integers of which `halves` are sums of `_halves`."""
  high, low = (x.astype(jnp.int32) for x in halves)
  return (high << 12) + low


_BALANCE = {
  "batch": losses.batch_balance,
  "sequence": losses.sequence_balance,
}
