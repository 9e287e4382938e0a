# SPDX-License-Identifier: Apache-2.0
"""A result does not depend on how many ranks share the experts."""

import jax
import jax.numpy as jnp
import numpy as np

from cases import assert_same, Case
from groups import E, layer
from parameters import DTYPES

MESHES = ["dp4_ep1", "dp2_ep2", "ep4"]  # EP size 1, 2 and 4.

# Each expert multiplies its rows by its scale.
SCALES = np.linspace(0.5, 2, E, dtype=np.float32)


def experts(rows, group_sizes, ep_size):
  """Multiplies each row of `rows [R, C, H]` by the scale of its expert."""
  ranks, local = group_sizes.shape
  ends = group_sizes.cumsum(-1)
  position = jnp.arange(rows.shape[1])
  slab = (position[:, None] >= ends[:, None, :]).sum(-1)
  first = jnp.arange(ranks) % ep_size * local
  scale = jnp.asarray(SCALES)[(first[:, None] + slab).clip(max=E - 1)]
  return rows * scale[..., None].astype(rows.dtype)


def moe(ops, tokens, weights):
  recv, recv_weights = ops.dispatch(tokens, weights)
  group_sizes = ops.sizes().group_sizes
  rows = experts(recv, group_sizes, ops.handle.layer.ep_size)
  return ops.combine(rows, recv_weights)


def moe_and_back(ops, tokens, weights, g):
  out, vjp = jax.vjp(lambda *x: moe(ops, *x), tokens, weights)
  return out, *vjp(g)


def dense(topk_idx, tokens, weights):
  """Returns what `moe` returns, computed from all experts without ranks."""
  scale = SCALES[topk_idx].astype(tokens.dtype)
  out = np.zeros(tokens.shape, np.float32)
  for k in range(topk_idx.shape[-1]):
    row = (tokens * scale[:, k, None]).astype(np.float32)
    out += np.where(topk_idx[:, k, None] < 0, 0, weights[:, k, None] * row)
  return out.astype(tokens.dtype)


@DTYPES
def test_forward_and_backward(dtype):
  """EP sizes 2 and 4 compute what EP size 1 does, which is the dense result."""
  claims = []
  for mesh in MESHES:
    case = Case(layer(mesh), "with_unused_choices")
    # No product with these weights is exact.
    inputs = case.tokens(dtype), np.sqrt(case.weights()), case.tokens(dtype)
    results = case.run(moe_and_back, *inputs)
    assert_same(results[0], dense(case.topk_idx, *inputs[:2]))
    claims.append(jax.tree.map(local_numpy, results))
  first, *others = claims
  for other in others:
    assert_same(jax.tree.map(jnp.asarray, other), first)


def local_numpy(array):
  """Returns this process's part of an array that all meshes split alike."""
  shards = sorted(array.addressable_shards, key=lambda s: s.index[0].start)
  return np.concatenate([np.asarray(s.data) for s in shards])
