# SPDX-License-Identifier: Apache-2.0
"""The computation of a whole MoE layer on the tokens of one rank."""

from __future__ import annotations

from collections.abc import Mapping
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from ep._src.base import (
  compat,
  errors,
)
from ep._src.base.compat import fail_if
from ep._src.base.group import Sizes
from ep._src.lax import ordered_sum, primitive
from ep._src.moe import losses, parameters, router
from ep._src.moe.chunks import through_experts
from ep._src.moe.config import MoEConfig
from ep._src.moe.experts import SharedExpert
from ep._src.moe.placement import Placement
from ep._src.ops.prepare import keep_routing
from ep._src.ops.views import mapped, REPLICATED, TOKENS


def _inputs(sizes: Sizes, config: MoEConfig) -> list[Any]:
  specs = parameters.specs_of(config, sizes.group.axis_name)
  return [TOKENS] * 4 + [specs] + [REPLICATED] * 2


@mapped(_inputs, (TOKENS, REPLICATED), is_layer=True)
def of_rank(
  sizes: Sizes,
  config: MoEConfig,
  x: jax.Array,
  mask: jax.Array | None,
  forced_idx: jax.Array | None,
  captured_idx: jax.Array | None,
  params: Mapping[str, jax.Array],
  bias: jax.Array | None,
  placement: Placement | None,
) -> tuple[jax.Array, losses.Metrics]:
  """Applies `ep.MoE` to one rank's tokens, with the rank's parameter shards."""
  # Without barriers, XLA would fuse the layer with the ops around it. These ops
  # differ in the local and the global view, and fusion may change rounding.
  if config.deterministic:
    x, params = jax.tree.map(lax.optimization_barrier, (x, params))
  params = _local_params(sizes, config, params)
  x = x if mask is None else jnp.where(mask[..., None], x, 0)
  with jax.named_scope("route"):
    logits, topk_idx, topk_weights = _route(
      sizes, config, params, x, mask, forced_idx, captured_idx, bias
    )
    as_written = placement is None and config.token_chunks == 1
    as_written &= sizes.group.num_experts == config.num_experts
    is_given = forced_idx is not None or captured_idx is not None
    fault = None
    if is_given and not as_written:
      topk_idx, fault = _checked_choices(sizes, config.num_experts, topk_idx)
  # Ranks of `tp_axis` multiply the same tokens by different parts of matrices.
  # So tokens vary over that axis from here on, and routing weights from
  # dispatch on. JAX sums the gradients over the axis at these points, where
  # gradients have the size of the tokens.
  if config.dtype is not None:
    x = x.astype(config.dtype)
  inner_axes = [config.tp_axis] if config.tp_axis else []
  (x_inner,) = compat.vary_together(x, axes=inner_axes)
  experts = {n: p for n, p in params.items() if n.startswith(("w_", "b_"))}
  ids = topk_idx
  first = lax.axis_index(sizes.group.axis_name) * sizes.L
  held = first + lax.iota(jnp.int32, sizes.L)
  if placement is not None:
    ids = placement.slots_of(topk_idx)
    held = jnp.asarray(placement.experts)[held]
  shared = None
  if config.shared_inner:
    shared = SharedExpert(config.experts, params, mask)
  y, routing = through_experts(
    sizes, config.experts, experts, x_inner, ids, topk_weights, shared
  )
  if config.tp_axis:
    y = lax.psum(y, config.tp_axis)
  with jax.named_scope("metrics"):
    metrics = losses.measure(
      sizes, config, logits, topk_idx, mask, routing, held, fault
    )
  if config.deterministic:
    y, metrics = jax.tree.map(lax.optimization_barrier, (y, metrics))
  return y, metrics


def _route(
  sizes: Sizes,
  config: MoEConfig,
  params: Mapping[str, jax.Array],
  x: jax.Array,
  mask: jax.Array | None,
  forced_idx: jax.Array | None,
  captured_idx: jax.Array | None,
  bias: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the router's logits, and the choices and weights of the tokens."""
  logits = jnp.matmul(
    x.astype(jnp.float32),
    params["router"].astype(jnp.float32),
    precision=lax.Precision.HIGHEST,
  )
  if config.router_bias:
    router_bias = params["router_bias"].astype(jnp.float32)
    logits += jnp.broadcast_to(router_bias, logits.shape)
  topk_idx, topk_weights = router.choose(
    config.rule, logits, bias, mask, forced_idx, captured_idx
  )
  # `forced_idx` may be a constant, which does not vary over ranks.
  (topk_idx,) = compat.vary_together(topk_idx, axes=sizes.group.token_axes)
  return logits, topk_idx, topk_weights


def _local_params(
  sizes: Sizes, config: MoEConfig, params: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
  """Returns a rank's parameters, gathered over `fsdp_axis`.

  The outputs of the ranks of `tp_axis` are added, so only the first of these
  ranks keeps `b_down`.
  """
  group = sizes.group
  specs = parameters.specs_of(config, group.axis_name)
  params = dict(params)
  fsdp = config.fsdp_axis
  is_equal = config.deterministic or fsdp not in group.token_axes
  gather = functools.partial(compat.all_gather, mesh=group.mesh)
  if fsdp and is_equal and compat.checks_vma():  # then cotangents are equal
    gather = functools.partial(ordered_sum.all_gather, tiled=True)
  for name, spec in specs.items():
    if fsdp and fsdp in spec:
      params[name] = gather(params[name], fsdp, axis=spec.index(fsdp))
    if config.deterministic:
      copies = [a for a in group.token_axes if a == fsdp or a not in spec]
      params[name] = ordered_sum.replicated(params[name], copies)
  if config.biases and (axis := config.tp_axis):
    is_first = lax.axis_index(axis) == 0
    params["b_down"] = jnp.where(is_first, params["b_down"], 0)
  return params


def _checked_choices(
  sizes: Sizes, num_experts: int, ids: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
  """Returns expert ids int32 [..., K], or fails on all ranks like `ep_prepare`.

  `ep_prepare` itself gets only the slots and the tokens of a chunk. So its
  errors would name a slot, or a position in the chunk.

  Collective over the EP domain; `ids` must vary over its axis. A program that
  does not raise returns ids that `ep_prepare` refuses, and the fault.
  """
  if not ids.size:
    return ids, None
  ids, fault = _check_p.bind(
    ids,
    name=sizes.name,
    axis_name=sizes.group.axis_name,
    num_experts=num_experts,
    raises=sizes.raises or not sizes.connection.flags,
  )
  return keep_routing(ids), fault


def _check(
  ids: jax.Array, *, name: str, axis_name: str, num_experts: int, raises: bool
) -> list[jax.Array]:
  K = ids.shape[-1]
  wrong = errors.first_wrong_choice(ids.reshape(-1, K), num_experts)
  of_ranks = lax.all_gather(wrong, axis_name)
  fault = errors.fault_of(of_ranks, name, K, num_experts, 0)
  failed = fail_if(fault[0] > 0, errors.raise_fault, fault, can_raise=raises)
  return [jnp.where(failed > 0, -2, ids), fault]


def _check_types(ids: Any, **_: Any) -> list[Any]:
  return [ids, compat.out_aval((errors.FAULT_WORDS,), jnp.int32, ids)]


def _lower(ctx: Any, ids: Any, *, raises: bool, **params: Any) -> Any:
  raises = raises and compat.can_call_python(ctx)
  check = functools.partial(_check, raises=raises, **params)
  return compat.lower_local(jax.named_scope("ep_check")(check))(ctx, ids)


_check_p = primitive.new("ep_check", _check_types, _lower)
