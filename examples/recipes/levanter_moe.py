# SPDX-License-Identifier: Apache-2.0
"""Levanter's expert-parallel `moe_mlp`, with the exchange of ep.

    from levanter.grug import grug_moe

    group = ep.ep_bootstrap(
        mesh, axis_name="expert", data_axes=("data",), num_experts=num_experts)
    grug_moe._moe_mlp_ep_ragged_a2a_local = levanter_moe.replacement(group)

Then `moe_mlp(..., implementation="ragged_all_to_all")` uses ep. Levanter's
functions choose the assignments that fit the capacity, so the drops are those
of Levanter's backend with one chunk of experts.
"""

from collections.abc import Callable
import functools
import inspect
import math

import jax
from jax import lax
import jax.numpy as jnp
from levanter.grug._moe import common, ep_common
from levanter.grug._moe import ep_ragged_all_to_all as ragged

import ep

# The functions of Levanter that this recipe replaces or calls.
_ARGUMENTS = {
  ragged._moe_mlp_ep_ragged_a2a_local: "x_local, selected_experts_local,"
  " combine_weights_local, token_valid_local, moe_w13_local, moe_w2_local,"
  " activation_fn, num_experts, capacity_factor, token_sharding_axes",
  ragged._accepted_assignments: "flat_selected, sorted_indices, group_sizes,"
  " accepted_group_sizes",
  ep_common._clip_receiver_group_sizes: "global_group_sizes,"
  " local_expert_size, receiver_capacity",
  common._scaled_capacity: "assignments, capacity_factor, divisor, minimum,"
  " maximum",
  common.CapacityDrops: "sender_dropped, receiver_dropped",
}


def replacement(group: ep.EpGroup) -> Callable[..., tuple]:
  """Returns a replacement of `_moe_mlp_ep_ragged_a2a_local`.

  Raises:
    TypeError: a function of Levanter has other arguments.
  """
  for function, known in _ARGUMENTS.items():
    arguments = ", ".join(inspect.signature(function).parameters)
    if arguments != known:
      raise TypeError(
        f"Levanter's {function.__name__} has the arguments ({arguments}), but"
        f" this recipe knows ({known}). docs/howto/replace.md names"
        " the version of Levanter that the recipe was tested with."
      )
  return functools.partial(_moe_mlp, group)


def _moe_mlp(
  group: ep.EpGroup,
  x: jax.Array,
  topk_idx: jax.Array,
  topk_weights: jax.Array,
  is_valid: jax.Array,
  w13: jax.Array,
  w2: jax.Array,
  *,
  activation_fn: Callable[[jax.Array], jax.Array],
  num_experts: int,
  capacity_factor: float,
  token_sharding_axes: tuple[str, ...],
) -> tuple[jax.Array, common.CapacityDrops]:
  """Returns the output of a rank's tokens, and the drops of all ranks.

  The arguments are Levanter's. `w13` holds the gate kernels, then the up
  kernels, along the last axis.
  """
  capacity = max(
    math.ceil(capacity_factor * topk_idx.size), num_experts // group.ep_size
  )
  layer = ep.EpLayerConfig(
    group, top_k=topk_idx.shape[1], recv_capacity_per_rank=capacity
  )
  is_used = jnp.broadcast_to(is_valid[:, None], topk_idx.shape)
  used_idx = jnp.where(is_used, topk_idx, num_experts)
  is_kept = _accepted(layer, used_idx, capacity_factor)
  topk_idx, topk_weights = _merged(
    jnp.where(is_kept, topk_idx, -1), topk_weights
  )
  handle = ep.ep_prepare(layer, topk_idx)
  rows, row_weights = ep.ep_dispatch(handle, x, topk_weights)
  both = ep.grouped_matmul(rows, w13, handle.group_sizes)
  gate, up = jnp.split(both, 2, axis=-1)
  out = ep.grouped_matmul(activation_fn(gate) * up, w2, handle.group_sizes)
  y = ep.ep_combine(handle, out, weights=row_weights)
  dropped = lax.psum(jnp.sum(is_used & ~is_kept), token_sharding_axes)
  return y, common.CapacityDrops(dropped, jnp.zeros_like(dropped))


def _merged(
  topk_idx: jax.Array, topk_weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Makes one choice of a token's choices of one expert, and adds the weights.

  Levanter may choose an expert twice for a token, which ep refuses.
  """
  is_same = topk_idx[:, :, None] == topk_idx[:, None, :]
  is_first = is_same.argmax(axis=2) == jnp.arange(topk_idx.shape[1])
  weights = jnp.sum(is_same * topk_weights[:, None, :], axis=2)
  return jnp.where(is_first, topk_idx, -1), weights


def _accepted(
  layer: ep.EpLayerConfig, topk_idx: jax.Array, capacity_factor: float
) -> jax.Array:
  """Returns which choices fit the capacity of valid assignments, bool [T, K].

  An id of `num_experts` is no choice. Each rank accepts a prefix of the choices
  of each expert and source rank.
  """
  group, ids = layer.group, topk_idx.ravel()
  sizes = jnp.bincount(ids, length=group.num_experts).astype(jnp.int32)
  all_sizes = lax.all_gather(sizes, group.axis_name)
  capacity = common._scaled_capacity(
    jnp.sum(all_sizes),
    capacity_factor=capacity_factor,
    divisor=group.ep_size,
    minimum=group.num_local_experts,
    maximum=layer.capacity,
  )
  accepted = ep_common._clip_receiver_group_sizes(
    all_sizes,
    local_expert_size=group.num_local_experts,
    receiver_capacity=capacity,
  )[lax.axis_index(group.axis_name)]
  is_kept = ragged._accepted_assignments(ids, jnp.argsort(ids), sizes, accepted)
  return is_kept.reshape(topk_idx.shape)
