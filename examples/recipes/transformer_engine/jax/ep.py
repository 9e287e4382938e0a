# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism, with the arrays of all ranks or inside `shard_map`."""

import dataclasses

from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

import ep

from .sharding import get_mesh, global_mesh_resource

_group: ep.EpGroup | None = None  # of `ep_bootstrap`


@dataclasses.dataclass(frozen=True)
class EpLayerConfig:
  """The choices of a token, and the alignment of each expert's rows."""

  top_k: int
  dispatch_output_per_expert_alignment: int = 0


def ep_bootstrap(
  world_size,
  rank,
  num_experts,
  max_tokens_per_rank,
  recv_capacity_per_rank,
  hidden_dim,
  max_token_dtype=jnp.bfloat16,
  max_num_sms=0,
  drop_on_overflow=False,
):
  """Connects the ranks of the current mesh, one for each device.

  Tokens may also be float32. `rank` and `max_num_sms` have no effect.
  """
  global _group
  resource, mesh = global_mesh_resource(), get_mesh()
  if resource.ep_resource not in mesh.shape:
    raise ValueError(
      f"ep_bootstrap: ep_resource = {resource.ep_resource!r}, but the mesh has"
      f" the axes {mesh.axis_names}; enter a mesh, and global_shard_guard with"
      " a MeshResource of its axes."
    )
  if world_size not in (None, mesh.size):
    raise ValueError(
      f"ep_bootstrap: world_size = {world_size}, but the mesh has {mesh.size}"
      " devices; pass that, or None."
    )
  outer = resource.dp_resource, resource.fsdp_resource
  _group = ep.ep_bootstrap(
    mesh,
    axis_name=resource.ep_resource,
    data_axes=tuple(a for a in outer if mesh.shape.get(a, 1) > 1),
    num_experts=num_experts,
    max_tokens_per_rank=max_tokens_per_rank,
    hidden_dim=hidden_dim,
    recv_capacity_per_rank=recv_capacity_per_rank,
    overflow="drop" if drop_on_overflow else "error",
    drop_by="slot",
    name="transformer_engine",
  )


def ep_finalize():
  """Disconnects the ranks, for another `ep_bootstrap`."""
  global _group
  if _group is not None:
    ep.ep_finalize(_group)
  _group = None


def bootstrapped() -> ep.EpGroup:
  """Returns the group of `ep_bootstrap`."""
  if _group is None:
    raise RuntimeError("call transformer_engine.jax.ep.ep_bootstrap first.")
  return _group


def ep_prepare(cfg, topk_idx):
  """Returns each expert's padded rows, their total, and an `ep.EpHandle`."""
  alignment = cfg.dispatch_output_per_expert_alignment
  layer = ep.EpLayerConfig(bootstrapped(), cfg.top_k, alignment)
  handle = ep.ep_prepare(layer, topk_idx)
  return handle.group_sizes, handle.total_recv_tokens, handle


def ep_dispatch(cfg, topk_idx, tokens, topk_weights, recv_capacity_per_rank):
  """Sends tokens to the ranks of their experts.

  Returns the received tokens [R, C, H], their weights [R, C], an `ep.EpHandle`
  as `handle_mem`, and the counts [R, L] and totals [R, 1] of `ep_prepare`.
  """
  counts, total, handle = ep_prepare(cfg, topk_idx)
  if recv_capacity_per_rank != handle.capacity:
    raise ValueError(
      f"ep_dispatch: recv_capacity_per_rank = {recv_capacity_per_rank}, but"
      f" ep_bootstrap got {handle.capacity}; pass the same capacity."
    )
  rows, weights = ep.ep_dispatch(handle, tokens, topk_weights)
  return rows, weights, handle, counts, total


def ep_combine(
  cfg, handle_mem, token_counts, expert_out, num_local_tokens, out_sharding=None
):
  """Returns the sum of each token's rows [R, C, H], which have weights."""
  y = ep.ep_combine(handle_mem, expert_out)
  if y.shape[:-1] != tuple(np.atleast_1d(num_local_tokens)):
    raise ValueError(
      f"ep_combine: num_local_tokens = {num_local_tokens}, but the dispatched"
      f" tokens are {y.shape[:-1]}; pass that, and reshape the result."
    )
  if out_sharding is None:
    return y
  sharding = NamedSharding(bootstrapped().mesh, P(*out_sharding))
  return lax.with_sharding_constraint(y, sharding)
