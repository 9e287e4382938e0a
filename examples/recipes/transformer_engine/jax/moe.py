# SPDX-License-Identifier: Apache-2.0
"""A MoE layer: router, exchange, experts and balancing loss."""

import math

import jax
from jax import lax
import jax.numpy as jnp

import ep

from .ep import bootstrapped

_ALIGN_SIZE = 128  # of each expert's rows
_SCORES = {
  "softmax": jax.nn.softmax,
  "sigmoid": jax.nn.sigmoid,
  "sqrtsoftplus": lambda x: jnp.sqrt(jax.nn.softplus(x)),
}


def get_moe_recv_capacity_per_rank(
  *,
  num_experts,
  num_experts_per_tok,
  max_tokens_per_rank,
  ep_size,
  recv_capacity_factor=None,
  alignment=_ALIGN_SIZE,
):
  """Returns rows that a rank can receive, a multiple of the alignment.

  They hold any routing, or with a factor that many times the aligned rows of an
  even load.
  """
  factor = recv_capacity_factor
  if num_experts % ep_size or not (factor is None or 1 <= factor < math.inf):
    raise ValueError(
      f"num_experts = {num_experts} must be a multiple of ep_size = {ep_size},"
      f" and recv_capacity_factor = {factor} at least 1, or None."
    )

  def aligned(rows):
    return -(-rows // alignment) * alignment

  experts, tokens = num_experts // ep_size, ep_size * max_tokens_per_rank
  choices = tokens * min(num_experts_per_tok, experts)
  padded = choices + (alignment - 1) * min(experts, choices)
  most = min(experts * aligned(tokens), aligned(padded))
  if factor is None:
    return most
  even = -(-max_tokens_per_rank * num_experts_per_tok // experts)
  return min(aligned(math.ceil(experts * aligned(even) * factor)), most)


def record_ep_bootstrap_signature_for_moe(*sizes, **named_sizes):
  """Has no effect: `ep_bootstrap` has recorded the sizes."""


def _choose(order, top_k, num_groups, group_topk):
  """Returns the experts [..., K] that are first in the order [..., E]."""
  if group_topk:  # only experts of the groups with the best sums
    groups = order.reshape(*order.shape[:-1], num_groups, -1)
    best = lax.top_k(groups, top_k // group_topk)[0].sum(-1)
    chosen = jax.nn.one_hot(lax.top_k(best, group_topk)[1], num_groups).sum(-2)
    groups = jnp.where(chosen[..., None] > 0, groups, -jnp.inf)
    order = groups.reshape(order.shape)
  return lax.top_k(order, top_k)[1]


def moe(
  x,
  gate_kernel,
  wi,
  wo,
  wi_0_bias=None,
  wi_1_bias=None,
  wo_bias=None,
  expert_bias=None,
  *,
  num_experts,
  num_experts_per_tok,
  activation_type="silu",
  score_function="softmax",
  use_pre_softmax=False,
  num_groups=None,
  group_topk=None,
  scaling_factor=1.0,
  aux_loss_coeff=0.0,
  apply_topk_weights_early=False,
  quantizer_sets=None,
  ep_axis,
  data_parallelism_axes=(),
  input_axes=(),
  gate_kernel_axes=(),
  wi_kernel_axes=(),
  wo_kernel_axes=(),
  dtype=jnp.float32,
  recv_capacity_per_rank=None,
):
  """Returns the output [B, S, H], the balancing loss or None, and the totals.

  The totals [R, 1] are the padded rows that each rank needs. As in
  TransformerEngine, logits have the dtype of `x`; groups compete by logits if
  the weights are a softmax of the chosen logits; and early weights do not
  multiply `wo_bias`. The last four `..._axes` are hints, without effect.
  """
  group, k = bootstrapped(), num_experts_per_tok
  shape = group.mesh.shape
  axes = *(a for a in data_parallelism_axes if shape[a] > 1), ep_axis
  if (num_experts, set(axes)) != (group.num_experts, set(group.token_axes)):
    raise ValueError(
      f"moe: got {num_experts} experts and tokens split over {axes}, but"
      f" ep_bootstrap {group.num_experts} and {group.token_axes}."
    )
  capacity = recv_capacity_per_rank or get_moe_recv_capacity_per_rank(
    num_experts=num_experts,
    num_experts_per_tok=k,
    max_tokens_per_rank=x[..., 0].size // group.num_token_ranks,
    ep_size=group.ep_size,
  )
  layer = ep.EpLayerConfig(group, k, _ALIGN_SIZE, capacity)

  logits = (x @ gate_kernel.astype(x.dtype)).astype(jnp.float32)
  rounding = jnp.finfo(x.dtype)  # XLA might leave it out
  logits = lax.reduce_precision(logits, rounding.nexp, rounding.nmant)
  score = getattr(score_function, "name", score_function).lower()
  scores = order = _SCORES[score](logits)
  is_late_softmax = score == "softmax" and not use_pre_softmax
  if is_late_softmax:
    order = logits
  elif score != "softmax" and expert_bias is not None:
    order = scores + expert_bias
  topk_idx = _choose(lax.stop_gradient(order), k, num_groups, group_topk)
  topk_idx = ep.keep_routing(topk_idx)
  choices = jax.nn.one_hot(topk_idx, num_experts)  # [B, S, K, E]
  weights = jnp.einsum("bske,bse->bsk", choices, scores)
  if is_late_softmax or (score != "softmax" and k > 1):
    weights /= weights.sum(-1, keepdims=True) + 1e-20
  weights = (scaling_factor * weights).astype(dtype).astype(jnp.float32)

  aux_loss = None
  if aux_loss_coeff > 0:
    if k > 1:
      scores /= scores.sum(-1, keepdims=True) + 1e-20
    load = choices.sum(2).mean((0, 1)) * scores.mean((0, 1))
    aux_loss = (aux_loss_coeff * num_experts / k * load.sum()).astype(dtype)

  def gated(gate, up):
    return getattr(jax.nn, activation_type)(gate) * up

  def experts(segments, params, rows):
    wi, wo, wi_bias, wo_bias = params
    hidden = segments.matmul(rows, wi)
    if wi_bias is not None:
      hidden += segments.spread(wi_bias)
    hidden = segments.map(gated, *jnp.split(hidden, 2, axis=-1))
    y = segments.matmul(hidden, wo)
    return y if wo_bias is None else y + segments.spread(wo_bias)

  wi_bias, late_bias = wi_0_bias, wo_bias
  if wi_bias is not None:
    wi_bias = jnp.concatenate([wi_0_bias, wi_1_bias], axis=-1)
  if apply_topk_weights_early:
    late_bias = None
  params = wi, wo, wi_bias, late_bias
  y, handle = ep.moe_layer(
    layer,
    x,
    topk_idx,
    weights,
    experts=experts,
    params=jax.tree.map(lambda p: p.astype(x.dtype), params),
    return_handle=True,
  )
  if apply_topk_weights_early and wo_bias is not None:
    y += jnp.einsum("bske,bsk,eh->bsh", choices, handle.kept, wo_bias)
  return y.astype(x.dtype), aux_loss, handle.total_recv_tokens
