# SPDX-License-Identifier: Apache-2.0
"""Drops choices by "fair" if the capacity is too small for all.

`reference.assign` defines the result by a loop over the choices. A choice gets
a row if its expert has a free row in its last block, or if its rank has a free
block of `alignment` rows. The code here needs no loop: it computes the number
of blocks of each expert, its *quota*. The expert's choices of the largest
weights, as many as fit into these blocks, get a row.

All ranks of a domain gather all choices and compute the same result.
`ep_prepare` then passes only the kept choices to the backend. For the order
"slot", the backend itself drops choices.
"""

from __future__ import annotations

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from ep._src.base.group import Sizes


@functools.partial(jax.jit, static_argnums=0)
def assign(
  sizes: Sizes, topk_idx: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Assigns rows to the choices of a rank. Collective over the EP domain.

  Args:
    sizes: the sizes of the op.
    topk_idx: int [T, K], in -1..E-1 and distinct within a token.
    weights: float [T, K].

  Returns:
    `topk_idx` as int32, with -1 for dropped choices, and int32 [L], the number
    of the domain's choices of each local expert that are dropped.
  """
  axis = sizes.group.axis_name
  ids = topk_idx.astype(jnp.int32)
  shared = jnp.stack([ids, _by_weight(weights)], axis=2)
  if sizes.P > 1:
    shared = lax.all_gather(shared, axis, tiled=True)
  blocks = sizes.C // sizes.alignment
  last_order, last_place, dropped_counts = _last_kept(
    sizes, blocks, shared[..., 0].reshape(-1), shared[..., 1].reshape(-1)
  )
  me, L = lax.axis_index(axis), sizes.L
  order = lax.dynamic_slice_in_dim(shared[..., 1], me * len(ids), len(ids))
  place = me * ids.size + lax.iota(jnp.int32, ids.size).reshape(ids.shape)
  is_before = (order == last_order[ids]) & (place <= last_place[ids])
  is_before |= order < last_order[ids]
  dropped_counts = lax.dynamic_slice_in_dim(dropped_counts, me * L, L)
  return jnp.where(is_before, ids, -1), dropped_counts


def _by_weight(weights: jax.Array) -> jax.Array:
  """Returns int32 keys that sort by descending weight, with NaNs last.

  +0 and -0 have equal keys. Integer keys compare alike on all platforms.
  """
  weights = weights.astype(jnp.float32)
  largest = np.int32(np.iinfo(np.int32).max)
  bits = lax.bitcast_convert_type(weights, jnp.int32)
  is_nan = (bits & largest) > np.float32(np.inf).view(np.int32)
  bits = jnp.where(bits & largest == 0, 0, bits)
  ascending = jnp.where(bits < 0, bits ^ largest, bits)
  return jnp.where(is_nan, largest, ~ascending)


def _last_kept(
  sizes: Sizes, blocks: int, experts: jax.Array, order: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Assigns the row blocks of all ranks, `blocks` per rank, to choices [n].

  An expert keeps its choices of least `order`; ties keep array order. Returns
  three int32 [V]: for each expert, the order and the array place of the last
  choice that it keeps, and the number of its dropped choices. The place is -1
  for an expert without rows.
  """
  P, V = sizes.P, sizes.V
  experts = jnp.where(experts < 0, V, experts)
  place = lax.iota(jnp.int32, experts.size)
  expert, order, place = lax.sort((experts, order, place), num_keys=3)
  start = jnp.searchsorted(expert, lax.iota(jnp.int32, V + 1)).astype(jnp.int32)
  wanted = jnp.diff(start)
  wants = -(-wanted // sizes.alignment)  # in blocks
  quota = _quota(blocks, wants.reshape(P, -1))
  kept = jnp.minimum(wanted, quota.reshape(V) * sizes.alignment)
  at = start[:-1] + kept - 1
  least = np.int32(np.iinfo(np.int32).min)
  last_order = jnp.where(kept > 0, order[at], least)
  last_place = jnp.where(kept > 0, place[at], -1)
  return last_order, last_place, wanted - kept


def _quota(blocks: int, wants: jax.Array) -> jax.Array:
  """Returns how many of the blocks that it `wants` each expert gets, [P, L].

  The definition gives blocks to the experts of a rank round-robin, up to
  `wants`. So an expert gets the smaller of its `wants` and a level common to
  the rank. The remaining blocks, fewer than one per expert, go to the first
  experts that want more.
  """

  def raise_level(i: jax.Array, level: jax.Array) -> jax.Array:
    """Sets the i-th highest bit of `level` if there are enough blocks."""
    higher = level + (1 << (bits - 1 - i))
    fits = _sum(jnp.minimum(wants, higher)) <= blocks
    return jnp.where(fits, higher, level)

  level, bits = jnp.zeros((len(wants), 1), jnp.int32), blocks.bit_length()
  level = lax.fori_loop(0, bits, raise_level, level)
  quota = jnp.minimum(wants, level)
  wants_more = wants > quota
  rest = blocks - _sum(quota)
  one_more = wants_more.astype(jnp.int32)
  before = one_more.cumsum(1, dtype=jnp.int32) - one_more
  return quota + (wants_more & (before < rest)).astype(jnp.int32)


def _sum(x: jax.Array) -> jax.Array:
  return x.sum(1, keepdims=True, dtype=jnp.int32)
