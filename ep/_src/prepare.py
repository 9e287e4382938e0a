# SPDX-License-Identifier: Apache-2.0
"""ep_prepare: exchanges the routing."""

from __future__ import annotations

import math

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from ep._src import primitive, record, sharding, te_names
from ep._src.backend import OpParams
from ep._src.group import check_layer, EpLayerConfig
from ep._src.handle import EpHandle


@te_names.explain
def ep_prepare(layer: EpLayerConfig, topk_idx: jax.Array) -> EpHandle:
  """Exchanges the routing of a step between the ranks of an EP domain.

  Collective. The handle that it returns serves any number of dispatches and
  combines of the same tokens, and their derivatives.

  The counts of the domain determine where each row goes. If `count[j]` tokens
  of all ranks chose local expert `j` of a rank, that expert's slab starts at

      offset[j] = sum(roundup(count[i], alignment) for i < j)

  and holds its tokens by ascending source rank, then ascending token.

  The handle's arrays are named "ep_routing" for `jax.checkpoint`, so that a
  block which prepares its own handle need not exchange the routing again in the
  backward pass:

      policy = jax.checkpoint_policies.save_only_these_names("ep_routing")
      block = jax.checkpoint(block, policy=policy)

  Args:
    layer: the layer's configuration.
    topk_idx: int32 or int64 [..., K], the experts of each token, distinct
      within a token; -1 is an unused choice. Outside `jax.shard_map` the first
      axis is global, sharded over the data axes and the EP axis.

  Returns:
    The handle; see `EpHandle` for its shapes.

  Raises:
    ValueError, TypeError: shape or dtype does not fit the layer or the group.
    ep.EpError: when the program runs, on every rank: an id out
      of range or repeated in a token, more rows than the capacity with
      `overflow="error"`, or a peer that is gone, late, or runs another program.
  """
  check_layer("ep_prepare", layer)
  op = f'ep_prepare(layer "{layer.name}")'
  topk_idx = jnp.asarray(topk_idx)
  if topk_idx.dtype not in (jnp.int32, jnp.int64):
    raise TypeError(
      f"{op}: topk_idx is {topk_idx.dtype}, but expert ids are int32 or int64;"
      " convert them."
    )
  if topk_idx.ndim < 2 or topk_idx.shape[-1] != layer.top_k:
    raise ValueError(
      f"{op}: topk_idx has shape {topk_idx.shape}, but [..., top_k] ="
      f" [..., {layer.top_k}] with at least one axis of tokens is expected."
    )
  token_shape = sharding.local_lead(layer.group, op, "topk_idx", topk_idx.shape)
  params = layer.op_params(math.prod(token_shape))
  if params.num_tokens > layer.group.max_tokens_per_rank:
    raise ValueError(
      f"{op}: {params.num_tokens} tokens on a rank, but max_tokens_per_rank ="
      f" {layer.group.max_tokens_per_rank}; raise it in ep_bootstrap, or split"
      " the tokens."
    )

  leaves = sharding.call(
    layer.group,
    op,
    _prepare,
    [params],
    [topk_idx],
    [sharding.TOKENS],
    sharding.RANK,
  )
  leaves = [checkpoint_name(leaf, "ep_routing") for leaf in leaves]
  return EpHandle(*leaves, layer=layer, token_shape=token_shape)


def _prepare(params: OpParams, topk_idx: jax.Array) -> list[jax.Array]:
  topk_idx = record.tap(params.layer, topk_idx)
  idx = topk_idx.reshape(params.num_tokens, params.layer.top_k)
  return primitive.bind(prepare_p, params, idx)


def _out_types(params: OpParams, topk_idx):
  del topk_idx
  layer = params.layer
  per_expert = jax.ShapeDtypeStruct((layer.num_local_experts,), jnp.int32)
  try:
    mem_bytes = params.connection.mem_bytes(params)
  except ValueError as e:
    raise ValueError(f'ep_prepare(layer "{layer.name}"): {e}') from e
  return [
    jax.ShapeDtypeStruct((mem_bytes,), jnp.uint8),
    per_expert,
    per_expert,
    jax.ShapeDtypeStruct((1,), jnp.int32),
  ]


prepare_p = primitive.op("ep_prepare", _out_types)
