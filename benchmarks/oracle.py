# SPDX-License-Identifier: Apache-2.0
"""Checks the result of every op, by the routing of ep/_src/ops/reference.py.

The reference works on whole arrays, and those of a benchmark are large. So this
file applies its routing to the rows of one rank at a time.
"""

from __future__ import annotations

import jax
import numpy as np

from benchmarks.dense import DenseLayer
from benchmarks.workload import Workload
from ep._src.ops import reference

# A value of a whole layer may deviate by at most this share of the largest of
# its array.
BOUNDS = {"float32": 2e-5, "bfloat16": 5e-2, "float16": 1e-2}


class WrongResult(Exception):
  """A contender's result does not follow the contract."""


class Oracle:
  """Checks the results of each op on each rank.

  `bare` is for NCCL EP by itself: the round trip has no weights, and the rows
  past the last one hold anything.
  """

  def __init__(self, workload: Workload, *, bare: bool = False):
    self._workload = workload
    self._bare = bare
    layout = workload.layout
    routing = reference.prepare(
      workload.choices.reshape(layout.ranks, -1, layout.shape.top_k),
      num_experts=layout.shape.num_experts,
      capacity=layout.capacity,
    )
    self._rank, self._slot = routing.rank, routing.slot
    self._received = routing.group_sizes.sum(axis=1)
    self._dense = DenseLayer(workload)

  def check(self, op: str, outputs, *, exact: bool) -> None:
    """Raises `WrongResult` unless this process's shards are right.

    Copies must have the right bits. Sums must have them too if `exact`, and
    otherwise may deviate by K + P + 1 roundings to the rows' dtype. Results of
    whole layers may deviate by `BOUNDS` from those in float64.
    """
    check = getattr(self, f"_{op}")
    leaves = jax.tree.leaves(outputs)
    ranks = self._workload.layout.ranks
    for shards in zip(*(x.addressable_shards for x in leaves), strict=True):
      shard = shards[0]
      rank = (shard.index[0].start or 0) // (leaves[0].shape[0] // ranks)
      try:
        check(rank, *(np.asarray(s.data) for s in shards), exact=exact)
      except WrongResult as error:
        raise WrongResult(f"{op} on rank {rank}: {error}") from None

  def _dispatch(self, rank, rows, row_weights, *, exact):
    source, token, k = np.nonzero(self._rank == rank)
    weights = self._workload.topk_weights(self._token(source, token))
    weights = weights[np.arange(len(k)), k]
    self._combine_bwd(rank, rows, exact=exact)
    self._check_slots(rank, source, token, k, row_weights, weights)

  def _combine_bwd(self, rank, rows, *, exact):
    del exact  # copies are always exact
    source, token, k = np.nonzero(self._rank == rank)
    tokens = self._workload.tokens(self._token(source, token))
    self._check_slots(rank, source, token, k, rows, tokens)

  def _combine(self, rank, tokens, *, exact):
    self._check_sum(tokens, self._terms(rank), exact)

  def _dispatch_bwd(self, rank, tokens, topk_weights, *, exact):
    self._check_sum(tokens, self._terms(rank), exact)
    ids, kept = self._row_ids(rank)
    weights = np.where(kept, self._workload.row_weights(ids), np.float32(0))
    _check_bits(topk_weights, weights)

  def _round_trip(self, rank, tokens, *, exact):
    ids = self._token(rank, np.arange(self._workload.layout.shape.tokens))
    _, kept = self._row_ids(rank)
    weights = self._workload.topk_weights(ids) * kept
    if self._bare:
      weights = kept.astype(np.float32)
    rows = self._workload.tokens(ids).astype(np.float32)
    self._check_sum(tokens, (rows * w[:, None] for w in weights.T), exact)

  _layer = _round_trip

  def _moe(self, rank, tokens, *, exact):
    del exact  # XLA computes the experts, and may do so in any order
    self._check_close(tokens, self._dense.outputs[self._tokens(rank)])

  def _moe_grad(self, rank, tokens, topk_weights, *matrices, exact):
    del exact
    here = self._tokens(rank)
    self._check_close(tokens, self._dense.token_grads[here])
    self._check_close(topk_weights, self._dense.weight_grads[here])
    first = rank * self._workload.layout.num_local_experts
    for at in range(len(matrices[0])):
      wanted = self._dense.matrix_grads(first + at)
      for got, want in zip(matrices, wanted, strict=True):
        self._check_close(got[at], want)

  def _tokens(self, rank):
    size = self._workload.layout.shape.tokens
    return slice(rank * size, (rank + 1) * size)

  def _token(self, rank, token):
    return rank * self._workload.layout.shape.tokens + token

  def _row_ids(self, rank):
    """Returns the rows of a rank's choices `[T, K]`, and which were kept."""
    kept = self._slot[rank] >= 0
    ids = self._rank[rank] * self._workload.layout.capacity + self._slot[rank]
    return np.where(kept, ids, 0), kept

  def _terms(self, rank):
    """Yields the rows that combine adds, for each k."""
    for ids, kept in zip(*(x.T for x in self._row_ids(rank)), strict=True):
      rows = self._workload.rows(ids).astype(np.float32)
      yield np.where(kept[:, None], rows, np.float32(0))

  def _check_slots(self, rank, source, token, k, got, values):
    received = self._received[rank]
    want = np.empty((received, *values.shape[1:]), values.dtype)
    want[self._slot[source, token, k]] = values
    _check_bits(got[:received], want)
    if self._workload.layout.zero_tail and not self._bare:
      tail = got[received:]
      _check_bits(tail, np.broadcast_to(np.zeros((), tail.dtype), tail.shape))

  def _check_sum(self, got, terms, exact):
    total, magnitude = np.float32(0), np.float32(0)
    for term in terms:
      total = total + term
      magnitude = magnitude + abs(term)
    want = total.astype(got.dtype)
    if exact:
      _check_bits(got, want)
      return
    layout = self._workload.layout
    roundings = layout.shape.top_k + layout.ranks + 1
    eps = float(jax.numpy.finfo(got.dtype).eps)
    error = abs(got.astype(np.float32) - total)
    wrong = ~(error <= roundings * eps * magnitude)  # NaN is wrong, too
    _report(wrong, got, want)

  def _check_close(self, got, want):
    bound = BOUNDS[self._workload.dtype.name] * abs(want).max()
    wrong = ~(abs(got.astype(np.float64) - want) <= bound)  # NaN is wrong, too
    _report(wrong, got, want)


def _check_bits(got, want):
  if got.shape != want.shape or got.dtype != want.dtype:
    raise WrongResult(
      f"{got.dtype}{list(got.shape)}, but {want.dtype}{list(want.shape)} is"
      " expected"
    )
  unsigned = f"u{got.dtype.itemsize}"
  _report(got.view(unsigned) != want.view(unsigned), got, want)


def _report(wrong, got, want):
  if wrong.any():
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    raise WrongResult(
      f"{wrong.sum()} of {wrong.size} values are wrong; the first is at"
      f" {list(at)}: {got[at]}, expected {want[at]}"
    )
