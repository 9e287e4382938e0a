# SPDX-License-Identifier: Apache-2.0
"""ep_prepare: exchanges the routing of a step between ranks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeVar

import jax
from jax import lax
import jax.numpy as jnp

from ep._src.base import arguments, arrays, compat
from ep._src.base.group import Sizes
from ep._src.base.layer import check_layer, EpLayerConfig
from ep._src.lax import primitive
from ep._src.ops import drop_policy, primitives
from ep._src.ops.handle import EpHandle, Routing
from ep._src.ops.views import mapped, ROUTING_KINDS, TOKENS, View

_Tree = TypeVar("_Tree")


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
  if topk_weights is not None:
    topk_weights = jnp.asarray(topk_weights)
  check_choices(op, layer, topk_idx, topk_weights)
  arguments.check(
    layer.overflow != "chunk",
    op,
    'overflow = "chunk" sends the tokens of a layer in several exchanges, but'
    " this op makes one; call ep.MoE or ep.moe_layer, or give it a layer of"
    ' overflow="drop" or "error".',
  )
  view = View.of(layer.group, op)
  token_shape = view.lead("topk_idx", topk_idx.shape)
  layer.check_tokens(op, math.prod(token_shape))
  sizes = layer.sizes(math.prod(token_shape))
  arguments.check(
    topk_weights is not None or not sizes.fair or layer.drop_by is None,
    op,
    'drop_by = "fair" keeps the choices of an expert that have the largest'
    " weights, but topk_weights is None; pass the weights of topk_idx.",
  )
  if not sizes.fair:
    topk_weights = None
  routing = prepare.in_view(view, [sizes], topk_idx, topk_weights)
  return EpHandle(*routing, layer=layer, token_shape=token_shape)


def check_choices(
  op: str,
  layer: EpLayerConfig,
  topk_idx: jax.Array,
  topk_weights: jax.Array | None,
) -> None:
  """Raises unless these are the choices of a layer, and their weights."""
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
  if topk_weights is None:
    return
  arguments.check(
    topk_weights.shape == topk_idx.shape,
    op,
    f"topk_weights has shape {topk_weights.shape}, but topk_idx"
    f" {topk_idx.shape}; pass a weight for each id.",
  )
  arrays.check_kind(op, "topk_weights", topk_weights, jnp.floating)


def keep_routing(x: _Tree) -> _Tree:
  """Returns x; makes `jax.checkpoint`, with any policy, save x.

  A router that ran again in the backward pass could choose other experts: XLA
  keeps some bfloat16 values in float32 where it fuses operations, and rounds
  them where it does not, so near ties of logits may change their order. With
  this function, the backward pass of a block has the routing that its forward
  pass chose. `ep.route_topk` and `ep_prepare` call it. A router of your own
  must call it before anything reads the experts:

      topk_idx = ep.keep_routing(my_router(x))

  Args:
    x: an array, or a pytree of arrays, without a gradient.

  Returns:
    x, with the same values.
  """
  kept: _Tree
  kept = jax.tree.map(lambda x: _keep_p.bind(lax.stop_gradient(x))[0], x)
  return kept


_keep_p = primitive.new("ep_keep", lambda x: [x], lambda ctx, x: [x])
_keep_p.def_impl(lambda x: [x])
primitive.batch_elementwise(_keep_p)
compat.run_once_in_remat(_keep_p)


@mapped([TOKENS, TOKENS], ROUTING_KINDS)
def prepare(
  sizes: Sizes, topk_idx: jax.Array, topk_weights: jax.Array | None
) -> Routing:
  """Exchanges the routing of one rank; the arguments as in `ep_prepare`."""
  ids = topk_idx.reshape(sizes.T, sizes.K)
  if sizes.fair and topk_weights is not None and sizes.worst_case() > sizes.C:
    weights = lax.stop_gradient(topk_weights).reshape(ids.shape)
    leaves = primitives.bind(assigned_prepare_p, sizes, ids, weights)
  else:
    leaves = primitives.bind(prepare_p, sizes, ids)
  *others, kept = leaves
  return keep_routing(Routing._make([*others, kept.reshape(topk_idx.shape)]))


def _assigned_prepare(
  ids: jax.Array, weights: jax.Array, *, sizes: Sizes
) -> list[jax.Array]:
  """Prepares all choices; if rows overflow, prepares the kept choices again.

  The first `prepare_p` reports late ranks and invalid ids. After it, all ranks
  have arrived with valid choices, so the collectives in `drop_policy.assign` do
  not wait. If the first `prepare_p` fails without terminating the program, it
  returns totals of -1, and `assign` does not run.
  """
  first = prepare_p.bind(ids, sizes=sizes)
  *_, wanted_here, _, wanted, _ = first

  def assigned() -> list[jax.Array]:
    # Layers that differ only by name share one traced function: without it, the
    # program of 16 layers has 2.7 times the text.
    nameless = dataclasses.replace(sizes, name="any", fingerprint=0)
    chosen, dropped_counts = drop_policy.assign(nameless, ids, weights)
    *others, total, _, largest, kept = prepare_p.bind(chosen, sizes=sizes)
    failed = total < 0
    return [
      *others,
      jnp.where(failed, total, wanted_here),
      dropped_counts,
      jnp.where(failed, largest, wanted),
      kept,
    ]

  is_over = wanted[0] > sizes.C
  leaves: list[jax.Array] = lax.cond(is_over, assigned, lambda: first)
  return leaves


def _out_types(
  sizes: Sizes, topk_idx: Any, weights: Any = None
) -> list[jax.ShapeDtypeStruct]:
  del topk_idx, weights
  per_expert = jax.ShapeDtypeStruct((sizes.L,), jnp.int32)
  per_rank = jax.ShapeDtypeStruct((1,), jnp.int32)
  return [
    jax.ShapeDtypeStruct((sizes.mem_bytes,), jnp.uint8),
    per_expert,
    per_expert,
    per_rank,
    per_expert,
    per_rank,
    jax.ShapeDtypeStruct((sizes.T, sizes.K), jnp.bool_),
  ]


prepare_p = primitives.op("ep_prepare", _out_types)
assigned_prepare_p = primitives.composite(
  "ep_assign", _assigned_prepare, _out_types
)
