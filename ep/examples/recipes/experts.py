# SPDX-License-Identifier: Apache-2.0
"""Gated experts with biases, as frameworks write them: the body of the recipes.

A kernel is [E, ...], sharded over the EP axis, and its inner size may be
sharded over a tensor axis. The recipes differ in the names and in what is
around it.
"""

from collections.abc import Callable

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import ep

# The kernels of the gate [E, H, F], of the other factor [E, H, F], and of the
# output [E, F, H]; and their biases [E, F], [E, F], [E, H], where None is none.
Kernels = tuple[jax.Array, jax.Array, jax.Array]
Biases = tuple[jax.Array | None, jax.Array | None, jax.Array | None]
NO_BIASES = None, None, None


def routed(
  layer: ep.EpLayerConfig,
  x: jax.Array,
  topk_idx: jax.Array,
  topk_weights: jax.Array,
  kernels: Kernels,
  biases: Biases = NO_BIASES,
  *,
  activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
  tensor_axis: str | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns the outputs [..., H] of tokens [..., H], and the dropped choices.

  It takes global arrays. An axis over which kernels are stored but not used, as
  in FSDP, is in none of the specs, so that XLA gathers them where `shard_map`
  begins. With a `tensor_axis` the outputs are split over it along H: each of
  its ranks returns a part of each row only.
  """
  group = layer.group
  tokens, expert = P(group.token_axes), group.axis_name
  inner = P(expert, None, tensor_axis)
  kernel_specs = inner, inner, P(expert, tensor_axis)
  bias_spec = P(expert, tensor_axis)

  def of_rank(x, topk_idx, topk_weights, kernels, biases):
    handle = ep.ep_prepare(layer, topk_idx, topk_weights)
    rows, row_weights = ep.ep_dispatch(handle, x, topk_weights)
    rows = feed_forward(
      handle, rows, kernels, biases, activation, tensor_axis=tensor_axis
    )
    dropped = lax.psum(handle.dropped_counts.sum(), group.token_axes)
    return ep.ep_combine(handle, rows, weights=row_weights), dropped

  return jax.shard_map(
    of_rank,
    mesh=group.mesh,
    in_specs=(tokens, tokens, tokens, kernel_specs, bias_spec),
    out_specs=(P(group.token_axes, *[None] * (x.ndim - 2), tensor_axis), P()),
    check_vma=False,
  )(x, topk_idx, topk_weights, kernels, biases)


def feed_forward(
  handle: ep.EpHandle,
  rows: jax.Array,
  kernels: Kernels,
  biases: Biases = NO_BIASES,
  activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
  *,
  tensor_axis: str | None = None,
) -> jax.Array:
  """Returns what a rank's experts make of the rows [C, H] that came to it."""
  ids = row_experts(handle)

  def product(rows, i):
    return ep.grouped_matmul(rows, kernels[i], handle.group_sizes)

  def biased(rows, i):
    return rows if biases[i] is None else rows + biases[i][ids]

  hidden = activation(biased(product(rows, 0), 0)) * biased(product(rows, 1), 1)
  out = product(hidden, 2)
  if tensor_axis is not None:
    out = lax.psum_scatter(out, tensor_axis, scatter_dimension=1, tiled=True)
  return biased(out, 2)


def row_experts(handle: ep.EpHandle) -> jax.Array:
  """Returns int32 [C]: which of its rank's experts each row is for.

  Rows of padding have the expert of their slab, and those after the last slab
  the last one. What a bias makes of these rows is never read.
  """
  return jnp.repeat(
    jnp.arange(handle.layer.num_local_experts, dtype=jnp.int32),
    handle.group_sizes,
    total_repeat_length=handle.capacity,
  )
