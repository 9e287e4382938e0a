# SPDX-License-Identifier: Apache-2.0
"""MaxText's `RoutedMoE.sparse_matmul`, implemented with ep.

After the router, MaxText runs `permute`, `ragged_all_to_all`, `local_permute`,
three `gmm`, the inverse permutation, a second `ragged_all_to_all` and
`unpermute`. This recipe runs `ep_dispatch`, three grouped matmuls, and
`ep_combine`.

`refuse` lists the routers and experts that the recipe does not support.
"""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import ep

# The values of MaxText's `decoder_block` that this recipe supports.
_BLOCKS = (
  "mixtral",
  "qwen3_moe",
  "qwen3_custom_moe",
  "qwen3_next",
  "qwen3_5",
  "deepseek",
)


def sparse_matmul(
  layer: ep.EpLayerConfig,
  config: Any,
  inputs: jax.Array,
  gate_logits: jax.Array,
  pre_bias_logits: jax.Array | None,
  w0_kernel: jax.Array,
  w1_kernel: jax.Array,
  wo_kernel: jax.Array,
  w0_bias: jax.Array | None,
  w1_bias: jax.Array | None,
  wo_bias: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns output [B, S, H], lb_loss, and bias_updates [E].

  `config` is MaxText's. `inputs` are [B, S, H], whose batch is sharded over the
  axes "data", "fsdp" and "expert", and `gate_logits` [B, S, E]. Kernels may
  also be sharded over "fsdp", and over "tensor" along the inner size. The
  output is sharded over "tensor" along H.

  Raises:
    ValueError: the recipe does not support the model; see `refuse`.
  """
  refuse(config, pre_bias_logits is not None)
  group, top_k = layer.group, layer.top_k
  topk_weights, topk_idx = get_topk(gate_logits, pre_bias_logits, top_k)
  tokens, inner = P(group.token_axes), P("expert", None, "tensor")
  row = P("expert", "tensor")
  # The kernels' specs leave out "fsdp", so XLA gathers the kernels before the
  # `shard_map`.
  output = jax.shard_map(
    lambda *args: _of_rank(layer, *args),
    mesh=group.mesh,
    in_specs=(tokens, tokens, tokens, (inner, inner, row), row),
    out_specs=P(group.token_axes, None, "tensor"),
    check_vma=False,
  )(
    inputs,
    topk_idx,
    topk_weights,
    (w0_kernel, w1_kernel, wo_kernel),
    (w0_bias, w1_bias, wo_bias),
  )
  # MaxText counts an expert's choices per token; ep divides them by top_k.
  lb_loss = top_k * ep.sequence_balancing_loss(gate_logits, topk_idx)
  load = jnp.bincount(topk_idx.ravel(), length=group.num_experts)
  no_bias = ep.moe.State(jnp.zeros(group.num_experts))
  bias_updates = no_bias.after(load, config.routed_bias_update_rate).bias
  return output, config.load_balance_loss_weight * lb_loss, bias_updates


def refuse(config: Any, has_pre_bias_logits: bool) -> None:
  """Raises `ValueError` for a model that this recipe does not support.

  Args:
    config: MaxText's configuration; the error names the field.
    has_pre_bias_logits: whether `pre_bias_logits` were passed. MaxText passes
      them if `model_name` begins with "deepseek3".
  """
  block = config.decoder_block.value
  is_deepseek = block == "deepseek"
  is_refused = {
    "decoder_block": block not in _BLOCKS,
    "model_name": is_deepseek != has_pre_bias_logits,
    "routed_score_func": is_deepseek
    and config.routed_score_func not in ("sigmoid", "sqrtsoftplus"),
    "routed_scaling_factor": is_deepseek and config.routed_scaling_factor != 1,
    "n_routing_groups": is_deepseek and config.n_routing_groups != -1,
    "use_random_routing": config.use_random_routing,
    "mlp_activations": config.mlp_activations[0] != "silu",
    "mlp_activations_limit": is_deepseek and config.mlp_activations_limit > 0,
    "quantization": bool(config.quantization),
  }
  for field, refused in is_refused.items():
    if refused:
      raise ValueError(
        f"MaxText's {field} = {getattr(config, field)!r} changes its results,"
        " but not those of this recipe; keep MaxText's own sparse_matmul for"
        " this model."
      )


def _of_rank(layer, inputs, topk_idx, topk_weights, kernels, biases):
  """Dispatches, applies the experts, and combines, on one rank."""
  handle = ep.ep_prepare(layer, topk_idx, topk_weights)
  rows, row_weights = ep.ep_dispatch(handle, inputs, topk_weights)
  ids = row_experts(handle)

  def product(rows, i):
    return ep.grouped_matmul(rows, kernels[i], handle.group_sizes)

  def biased(rows, i):
    return rows if biases[i] is None else rows + biases[i][ids]

  gate = jax.nn.silu(biased(product(rows, 0), 0))
  out = product(gate * biased(product(rows, 1), 1), 2)
  out = lax.psum_scatter(out, "tensor", scatter_dimension=1, tiled=True)
  return ep.ep_combine(handle, biased(out, 2), weights=row_weights)


def row_experts(handle: ep.EpHandle) -> jax.Array:
  """Returns the local expert of each row, int32 [C].

  Padding rows have the expert of their segment, and tail rows the last expert.
  `ep_combine` does not read these rows.
  """
  return jnp.repeat(
    jnp.arange(handle.layer.num_local_experts, dtype=jnp.int32),
    handle.group_sizes,
    total_repeat_length=handle.capacity,
  )


def get_topk(
  gate_logits: jax.Array, pre_bias_logits: jax.Array | None, top_k: int
) -> tuple[jax.Array, jax.Array]:
  """Returns the weights and the ids [B, S, K] of the experts of each token.

  With `pre_bias_logits`, the router is DeepSeek-V3's: it chooses experts by
  `gate_logits`, which are biased scores, and weighs them by unbiased scores.
  """
  # Not `lax.top_k`: outside of `shard_map`, XLA would gather its operand.
  topk_idx, topk_weights = ep.route_topk(gate_logits, top_k)
  if pre_bias_logits is None:
    return topk_weights, topk_idx
  scores = jnp.take_along_axis(pre_bias_logits, topk_idx, axis=-1)
  return scores / scores.sum(axis=-1, keepdims=True), topk_idx
