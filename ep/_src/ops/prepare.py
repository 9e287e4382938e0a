# SPDX-License-Identifier: Apache-2.0
"""ep_prepare: exchanges the routing of a step between ranks."""

from __future__ import annotations

import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from ep._src.base import arguments, arrays
from ep._src.base.backend import OpParams
from ep._src.base.identities import keep_routing
from ep._src.group.group import check_layer, EpLayerConfig
from ep._src.ops import drop_policy, primitives, views
from ep._src.ops.handle import EpHandle, LEAF_KINDS
from ep._src.ops.views import View


def ep_prepare(
  layer: EpLayerConfig,
  topk_idx: jax.Array,
  topk_weights: jax.Array | None = None,
) -> EpHandle:
  """Exchanges the routing of a step between the ranks of an EP domain.

  Collective. One handle serves any number of dispatches and combines of the
  same tokens, and their derivatives.

  If `count[j]` tokens of all ranks chose local expert `j` of a rank, the rows
  of that expert start at row

      offset[j] = sum(roundup(count[i], alignment) for i < j)

  of the rank. They are sorted by source rank, then by token.

  If the rows exceed the capacity, `layer.overflow` and `layer.drop_by` decide
  which choices get a row.

  `jax.checkpoint` saves the handle with any policy, so the backward pass does
  not exchange the routing again. If you write a router, apply `ep.keep_routing`
  to its `topk_idx`.

  Args:
    layer: the layer's configuration.
    topk_idx: int32 or int64 [..., K], the experts of each token, distinct
      within a token; -1 is an unused choice. Outside `jax.shard_map` the first
      axis is global, sharded over the data axes and the EP axis.
    topk_weights: float, of the shape of `topk_idx`, as in `ep_dispatch`. Needed
      if `layer.drop_by` is "fair". If `layer.drop_by` is None, the layer drops
      choices by "fair" with weights, and by "slot" without. The handle has no
      derivative.

  Returns:
    The handle; see `EpHandle` for its shapes.

  Raises:
    ValueError, TypeError: shape or dtype does not fit the layer or the group.
    ep.EpError: when the program runs, on every rank: an id out
      of range or repeated in a token, more rows than the capacity with
      `overflow="error"`, or a peer that is gone, late, or runs another program.
      With `ep_bootstrap(errors="flag")`, `ep.check` raises instead.
  """
  check_layer("ep_prepare", layer)
  op = f'ep_prepare(layer "{layer.name}")'
  topk_idx = arrays.array(op, "topk_idx", topk_idx)
  if topk_idx.dtype not in (jnp.int32, jnp.int64):
    raise TypeError(
      f"{op}: topk_idx is {topk_idx.dtype}, but expert ids are int32 or int64;"
      " convert them."
    )
  arguments.check(
    topk_idx.ndim >= 2 and topk_idx.shape[-1] == layer.top_k,
    op,
    f"topk_idx has shape {topk_idx.shape}, but [..., top_k] ="
    f" [..., {layer.top_k}] with at least one axis of tokens is expected.",
  )
  arguments.check(
    layer.overflow != "chunk",
    op,
    'overflow = "chunk" sends the tokens of a layer in several exchanges, but'
    " this op makes one; call ep.MoE or ep.moe_layer, or give it a layer of"
    ' overflow="drop" or "error".',
  )
  view = View.of(layer.group, op)
  token_shape = view.lead("topk_idx", topk_idx.shape)
  params = layer.op_params(math.prod(token_shape))
  layer.config.check_tokens(op, params.num_tokens)
  is_fair = layer.config.drops_fairly
  arguments.check(
    topk_weights is not None or not is_fair or layer.drop_by is None,
    op,
    'drop_by = "fair" keeps the choices of an expert that have the largest'
    " weights, but topk_weights is None; pass the weights of topk_idx.",
  )
  if topk_weights is not None:
    topk_weights = lax.stop_gradient(jnp.asarray(topk_weights))
    arguments.check(
      topk_weights.shape == topk_idx.shape,
      op,
      f"topk_weights has shape {topk_weights.shape}, but topk_idx"
      f" {topk_idx.shape}; pass a weight for each id.",
    )
    arrays.check_floats(op, "topk_weights", topk_weights)
  if not is_fair:
    topk_weights = None

  leaves = view.call(
    _prepare,
    [params],
    [topk_idx, topk_weights],
    [views.TOKENS] * 2,
    LEAF_KINDS,
  )
  leaves = keep_routing(leaves)
  layer.group.connection.saw(leaves[0])
  return EpHandle(*leaves, layer=layer, token_shape=token_shape)


def _prepare(
  params: OpParams, topk_idx: jax.Array, topk_weights: jax.Array | None
) -> list[jax.Array]:
  """Returns the arrays of the `EpHandle`."""
  layer = params.layer
  ids = topk_idx.reshape(params.num_tokens, layer.top_k)
  may_overflow = layer.worst_case(params.num_tokens) > params.capacity
  if may_overflow and layer.drops_fairly and topk_weights is not None:
    weights = topk_weights.reshape(ids.shape)
    leaves = primitives.bind(assigned_prepare_p, params, ids, weights)
  else:
    leaves = primitives.bind(prepare_p, params, ids)
  *sizes, kept = leaves
  return [*sizes, kept.reshape(topk_idx.shape)]


def _assigned_prepare(
  ids: jax.Array, weights: jax.Array, *, params: OpParams
) -> list[jax.Array]:
  """Prepares all choices; if rows overflow, prepares the kept choices again.

  The first `prepare_p` reports late ranks and invalid ids. After it, all ranks
  have arrived with valid choices, so the collectives in `drop_policy.assign` do
  not wait. If the first `prepare_p` fails without terminating the program, it
  returns totals of -1, and `assign` does not run.
  """
  first = prepare_p.bind(ids, params=params)
  *_, wanted_here, _, wanted, _ = first

  def assigned() -> list[jax.Array]:
    chosen, dropped_counts = drop_policy.assign(params.layer, ids, weights)
    *sizes, total, _, largest, kept = prepare_p.bind(chosen, params=params)
    failed = total < 0
    return [
      *sizes,
      jnp.where(failed, total, wanted_here),
      dropped_counts,
      jnp.where(failed, largest, wanted),
      kept,
    ]

  is_over = wanted[0] > params.capacity
  leaves: list[jax.Array] = lax.cond(is_over, assigned, lambda: first)
  return leaves


def _out_types(
  params: OpParams, topk_idx: Any, weights: Any = None
) -> list[jax.ShapeDtypeStruct]:
  del topk_idx, weights
  layer = params.layer
  per_expert = jax.ShapeDtypeStruct((layer.num_local_experts,), jnp.int32)
  per_rank = jax.ShapeDtypeStruct((1,), jnp.int32)
  try:
    mem_bytes = params.connection.mem_bytes(params)
  except ValueError as e:
    raise ValueError(f'ep_prepare(layer "{layer.name}"): {e}') from e
  return [
    jax.ShapeDtypeStruct((mem_bytes,), jnp.uint8),
    per_expert,
    per_expert,
    per_rank,
    per_expert,
    per_rank,
    jax.ShapeDtypeStruct((params.num_tokens, layer.top_k), jnp.bool_),
  ]


prepare_p = primitives.op("ep_prepare", _out_types)
assigned_prepare_p = primitives.composite(
  "ep_assign", _assigned_prepare, _out_types
)
