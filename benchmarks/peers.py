# SPDX-License-Identifier: Apache-2.0
"""MoE layers in the way of MaxText and Levanter, to compare compiled programs.

A layer has the method `moe` of layers.py. We read these files, and wrote our
own code with the same exchanges, copies and buffers:

* `Ragged` and `Ring`: src/maxtext/layers/moe.py of AI-Hypercomputer/maxtext, at
  e591f30c, with the defaults of its options.
* `Chunked`: lib/levanter/src/levanter/grug/_moe/ep_ragged_all_to_all.py of
  marin-community/marin, at 00f04ec7, with its newer way to clip sizes, and
  without its kernels for Blackwell GPUs.

Our layers differ in these ways: gate and up are two matrices, and the router is
not part of the layer.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
import math

import jax
from jax import lax
from jax.experimental.pallas.ops.tpu.megablox import gmm
import jax.numpy as jnp

from benchmarks.exchanges import sort_choices, starts
from benchmarks.layers import inner
from benchmarks.workload import AXIS

_TILING = 512, 1024, 1024  # both projects' rows, summed axis and columns
_CHUNKS = 2  # of Levanter's local experts


def megablox(rows, matrices, sizes):
  """Multiplies rows by their expert's matrix, in JAX's kernels for TPUs.

  Sizes of more experts than there are matrices give zero rows.
  """
  missing = -len(rows) % _TILING[0]
  padded = jnp.pad(rows, ((0, missing), (0, 0)))
  out = gmm(padded, matrices.astype(rows.dtype), sizes, rows.dtype, _TILING)
  return out[: len(rows)]


def ragged_dot(rows, matrices, sizes):
  """Does the same as `megablox`, in the operation of XLA."""
  sizes = sizes[: len(matrices)]
  return lax.ragged_dot(rows, matrices.astype(rows.dtype), sizes)


@dataclasses.dataclass(frozen=True)
class Peer:
  """A layer of P ranks.

  Attributes:
    factor: rows of the receive buffer, relative to a balanced routing; rows
      beyond are dropped. None is the size for every routing.
    multiply: `megablox` or `ragged_dot`.
  """

  ranks: int
  num_experts: int
  factor: float | None
  multiply: Callable

  @property
  def local(self) -> int:
    return self.num_experts // self.ranks

  def experts(self, rows, sizes, w_gate, w_up, w_down):
    dot = functools.partial(self.multiply, sizes=sizes.astype(jnp.int32))
    return dot(inner(dot, rows, w_gate, w_up), w_down)


class Ragged(Peer):
  """MaxText's exchange: one slice for each pair of ranks, then a local sort."""

  def moe(self, topk_idx, tokens, topk_weights, *matrices):
    (T, K), me = topk_idx.shape, lax.axis_index(AXIS)
    worst = min(self.ranks, self.num_experts / K)
    C = int(T * K * (self.factor or worst))
    order, counts = sort_choices(topk_idx, self.num_experts)
    wanted = counts.reshape(self.ranks, self.ranks, -1).sum(-1)
    sent = _cut(wanted, C)  # [source, destination]
    rows = lax.ragged_all_to_all(
      _permuted(jnp.repeat(tokens, K, axis=0), order),
      lax.empty((C, tokens.shape[1]), tokens.dtype),
      starts(wanted, 1)[me],
      sent[me],
      starts(sent, 0)[me],
      sent[:, me],
      axis_name=AXIS,
    )

    mine = lax.dynamic_slice_in_dim(counts, me * self.local, self.local, 1)
    expert = jnp.tile(jnp.arange(self.local), self.ranks)
    expert = jnp.repeat(expert, mine.ravel(), total_repeat_length=C)
    by_expert = jnp.argsort(expert)
    sizes = _cut(mine.reshape(-1, 1), C).reshape(mine.shape).sum(0)
    rows = self.experts(_permuted(rows, by_expert), sizes, *matrices)

    # MaxText returns dropped rows in uninitialized memory, even with a factor.
    unsent = jnp.zeros if self.factor else lax.empty
    rows = lax.ragged_all_to_all(
      _permuted(rows, jnp.argsort(by_expert)),
      unsent((T * K, tokens.shape[1]), tokens.dtype),
      starts(sent, 0)[:, me],
      sent[:, me],
      starts(wanted, 1)[:, me],
      sent[me],
      axis_name=AXIS,
    )
    return _weighted_sum(_permuted(rows, jnp.argsort(order)), topk_weights)


class Ring(Peer):
  """MaxText's ring of experts: gathers all tokens, and scatters the sums."""

  def moe(self, topk_idx, tokens, topk_weights, *matrices):
    gather = functools.partial(lax.all_gather, axis_name=AXIS, tiled=True)
    topk_idx, tokens, topk_weights = map(
      gather, (topk_idx, tokens, topk_weights)
    )
    first = lax.axis_index(AXIS) * self.local
    expert = (topk_idx.ravel() - first) % self.num_experts
    order = jnp.argsort(expert)
    rows = _permuted(jnp.repeat(tokens, topk_idx.shape[1], axis=0), order)
    sizes = jnp.bincount(expert, length=self.num_experts)
    rows = self.experts(rows, sizes, *matrices)
    out = _weighted_sum(_permuted(rows, jnp.argsort(order)), topk_weights)
    return lax.psum_scatter(out, AXIS, tiled=True)


class Chunked(Peer):
  """Levanter's exchange: a slice for each rank and expert, in two chunks."""

  def moe(self, topk_idx, tokens, topk_weights, *matrices):
    P, L, me = self.ranks, self.local, lax.axis_index(AXIS)
    K = topk_idx.shape[1]
    chunks = _CHUNKS if L % _CHUNKS == 0 else 1
    C = max(L, math.ceil((self.factor or P) * topk_idx.size))
    C = max(L // chunks, -(-C // chunks))
    order, counts = sort_choices(topk_idx, self.num_experts)
    start = starts(counts, 1).reshape(P, P, L)  # [source, destination, expert]
    counts = counts.reshape(P, P, L)
    source = _of_choices(tokens, order, K)
    returned = jnp.zeros_like(source)
    for i in range(chunks):
      part = slice(i * L // chunks, (i + 1) * L // chunks)
      is_here = jnp.zeros(L, bool).at[part].set(True)
      # Rows fill a buffer by expert, then by source.
      filled = jnp.where(is_here, counts, 0).transpose(2, 0, 1).reshape(-1, P)
      sent = _cut(filled, C).reshape(L, P, P).transpose(1, 2, 0)
      totals = sent.sum(0)
      slot = starts(totals, 1) + starts(sent, 0)
      source, _ = lax.optimization_barrier((source, returned))
      params = start[me], sent[me], slot[me], sent[:, me]
      unsent = jnp.zeros((C, tokens.shape[1]), tokens.dtype)
      rows = _exchange(source, unsent, *params)
      sizes = totals[me, part]
      # The last expert also multiplies the rest of the buffer.
      sizes = sizes.at[-1].add(C - sizes.sum())
      rows = self.experts(rows, sizes, *(w[part] for w in matrices))
      params = slot[:, me], sent[:, me], start[:, me], sent[me]
      returned = _exchange(rows, returned, *params)
    return _weighted_sum(_permuted(returned, jnp.argsort(order)), topk_weights)


def _exchange(rows, unsent, *params):
  params = [x.ravel() for x in params]
  return lax.ragged_all_to_all(rows, unsent, *params, axis_name=AXIS)


def _cut(counts, capacity):
  """Returns counts [n, ...], of which the first `capacity` units are kept."""
  return jnp.diff(jnp.cumsum(counts, 0).clip(max=capacity), axis=0, prepend=0)


@jax.custom_vjp
def _permuted(rows, order):
  return rows[order]


_permuted.defvjp(
  lambda rows, order: (rows[order], order),
  lambda order, rows: (rows[jnp.argsort(order)], None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _of_choices(tokens, order, top_k):
  """Returns the token of each choice."""
  return tokens[order // top_k]


def _of_choices_bwd(top_k, order, rows):
  rows = rows[jnp.argsort(order).reshape(-1, top_k)]
  return rows.sum(1, dtype=jnp.float32).astype(rows.dtype), None


_of_choices.defvjp(
  lambda tokens, order, top_k: (_of_choices(tokens, order, top_k), order),
  _of_choices_bwd,
)


def _weighted_sum(rows, weights):
  rows = rows.reshape(*weights.shape, -1)
  out = jnp.einsum("tkh,tk->th", rows.astype(jnp.float32), weights)
  return out.astype(rows.dtype)
