# SPDX-License-Identifier: Apache-2.0
"""The numeric contract of ep: a reference implementation of the ops.

With NumPy arrays, the functions return the exact bits of the contract. With
traced JAX arrays, the functions are differentiable.

Arrays have a leading axis for the `P` ranks of one EP domain. Other sizes: `T`
tokens of a rank, `K` choices of a token, `E` experts, `L = ceil(E / P)` expert
slots of a rank (rank `e // L` has expert `e`), `C` receive capacity of a rank,
`H` hidden size.

* Layout: expert-major. The segment of local expert `j` starts at row
  `offset[j] = sum_{i<j} roundup(count[i], alignment)`. Rows of a segment are
  sorted by source rank, then by token. Padding rows, rows after the last
  segment, and their weights are zero.
* Empty slots: if `P` does not divide `E`, the slots from `E` to `P L - 1`, on
  the last ranks, have no expert. Their segments have no rows.
* Choices: -1 is an unused choice. A choice with a slot of `C` or more is
  dropped, along with its weight and gradient. `total_recv_tokens` and
  `max_recv_tokens` count dropped choices and padding.
* Sums: `sum_k row(t, k)` starts at +0.0, runs in float32 in ascending `k`, and
  is rounded once, to the dtype of the rows. The product of a row and a weight
  is rounded to float32 before the addition. Each product and each addition
  flushes denormal float32 operands and results to zeros of the same sign. A
  final sum of zero is +0.
* Derivatives: dispatch and combine are transposes of each other, because they
  send rows along the same routing in opposite directions.

With JAX arrays, only integer results are exact. XLA may contract a product and
a sum into an FMA, which rounds once. XLA replaces `0 + x` by `x`, which may be
-0 or a denormal. XLA:CPU may change the bits of a bfloat16 that it copies.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import jax
import numpy as np

Array = jax.Array | np.ndarray
_Choice = tuple[int, ...]  # rank, token, k


def local_experts(num_experts: int, ep_size: int) -> int:
  """Returns L, the expert slots of a rank."""
  return -(-num_experts // ep_size)


class Routing(NamedTuple):
  """The destination of each choice, and the rows that each rank receives."""

  rank: Array  # [P, T, K] destination rank; -1: unused or dropped
  slot: Array  # [P, T, K] row on the destination rank; -1: unused or dropped
  group_sizes: Array  # [P, L] rows of each expert segment within the capacity
  token_counts: Array  # [P, L] rows of each expert segment that hold a token
  total_recv_tokens: Array  # [P, 1] rows, including dropped rows
  dropped_counts: Array  # [P, L] dropped choices of each expert
  max_recv_tokens: Array  # [P, 1] the largest total_recv_tokens of all ranks
  kept: Array  # [P, T, K] whether a choice has a slot


def prepare(
  topk_idx: Array, *, num_experts: int, capacity: int, alignment: int = 1
) -> Routing:
  """Returns the routing of `topk_idx` [P, T, K]."""
  xp = topk_idx.__array_namespace__()
  P, T, _ = topk_idx.shape
  L, i32 = local_experts(num_experts, P), np.int32
  V = P * L
  idx = topk_idx.astype(i32)
  chosen = (idx[..., None] == xp.arange(V)).any(2).reshape(P * T, V)
  count = chosen.sum(0, dtype=i32).reshape(P, L)
  padded = -(-count // alignment) * alignment
  end = padded.cumsum(1, dtype=i32)
  offset = end - padded
  row_in_slab = (chosen.cumsum(0, dtype=i32) - chosen).reshape(P, T, V)
  slot_of_expert = row_in_slab + offset.reshape(V)
  slot = xp.take_along_axis(slot_of_expert, idx.clip(0), axis=2)
  kept = (idx >= 0) & (slot < capacity)
  token_counts = count.clip(max=(capacity - offset).clip(0))
  total = end[:, -1:]
  return Routing(
    rank=xp.where(kept, idx // L, -1),
    slot=xp.where(kept, slot, -1),
    group_sizes=end.clip(max=capacity) - offset.clip(max=capacity),
    token_counts=token_counts,
    total_recv_tokens=total,
    dropped_counts=count - token_counts,
    max_recv_tokens=xp.full_like(total, total.max()),
    kept=kept,
  )


def assign(
  topk_idx: np.ndarray,
  weights: np.ndarray | None,
  *,
  num_experts: int,
  capacity: int,
  alignment: int = 1,
  drop_by: str = "slot",
) -> np.ndarray:
  """Returns which choices get a row: bool [P, T, K].

  `topk_idx` are NumPy ids [P, T, K], and `weights` float [P, T, K], or None for
  `drop_by="slot"`. The loop visits the choices in the order of "slot" or
  "fair", and keeps a choice if the rank of its expert has a free row.
  """
  P = len(topk_idx)
  L = local_experts(num_experts, P)
  kept = np.zeros(topk_idx.shape, bool)
  rows = np.zeros(P * L, int)  # kept choices of each expert

  def has_free_row(expert: int) -> bool:
    """Returns whether the expert's rank has a free row for the expert."""
    wanted = rows + (np.arange(P * L) == expert)
    slabs = wanted.reshape(-1, L)[expert // L]
    return bool((-(-slabs // alignment) * alignment).sum() <= capacity)

  def expert(choice: _Choice) -> int:
    return int(topk_idx[choice])

  def lightness(choice: _Choice) -> tuple[int, bool, float]:
    assert weights is not None
    weight = float(weights[choice])
    is_nan = math.isnan(weight)
    return expert(choice), is_nan, 0.0 if is_nan else -weight

  def in_order(choices: list[_Choice]) -> list[_Choice]:
    """Sorts choices (rank, token, k) in the order that `drop_by` names."""
    if drop_by == "slot":
      return sorted(choices, key=expert)
    blocks = []  # (index of the block in its expert's segment, choice)
    for _, own in itertools.groupby(sorted(choices, key=lightness), expert):
      blocks += [(row // alignment, c) for row, c in enumerate(own)]
    return [choice for _, choice in sorted(blocks, key=lambda block: block[0])]

  for choice in in_order([*zip(*np.nonzero(topk_idx >= 0), strict=True)]):
    if has_free_row(expert(choice)):
      rows[expert(choice)] += 1
      kept[choice] = True
  return kept


def prepare_assigned(
  topk_idx: np.ndarray, kept: np.ndarray, *, num_experts: int, **sizes: int
) -> Routing:
  """Returns the NumPy routing of the choices that `assign` kept.

  The totals and the dropped counts include the dropped choices.
  """
  every = prepare(topk_idx, num_experts=num_experts, **sizes)
  assigned = np.where(kept, topk_idx, -1)
  dropped = topk_idx[(topk_idx >= 0) & ~kept]
  shape = every.token_counts.shape
  dropped_counts = np.bincount(dropped, minlength=math.prod(shape))
  return prepare(assigned, num_experts=num_experts, **sizes)._replace(
    total_recv_tokens=every.total_recv_tokens,
    dropped_counts=dropped_counts.reshape(shape).astype(np.int32),
    max_recv_tokens=every.max_recv_tokens,
  )


def dispatch(
  routing: Routing, tokens: Array, topk_weights: Array, *, capacity: int
) -> tuple[Array, Array]:
  """Sends tokens [P, T, H] and weights [P, T, K] to [P, C, H] and [P, C]."""
  weights = topk_weights.astype(np.float32)
  return (
    _scatter(routing, tokens[:, :, None], capacity),
    _scatter(routing, weights, capacity),
  )


def combine(
  routing: Routing, rows: Array, weights: Array | None = None
) -> Array:
  """Sums rows [P, C, H], times optional weights [P, C], to [P, T, H]."""
  terms = _flushed(_gather(routing, rows).astype(np.float32))
  if weights is not None:
    weights = _flushed(_gather(routing, weights.astype(np.float32)))
    terms = _flushed(terms * weights[..., None])
  out: Any = np.float32(0)
  for k in range(terms.shape[2]):
    out = _flushed(out + terms[:, :, k])
  sums: Array = (out + np.float32(0)).astype(rows.dtype)  # turns -0 into +0
  return sums


def dispatch_bwd(
  routing: Routing, g_recv: Array, g_recv_weights: Array
) -> tuple[Array, Array]:
  """Returns the cotangents of the tokens and weights of `dispatch`."""
  return combine(routing, g_recv), _gather(routing, g_recv_weights)


def combine_bwd(routing: Routing, g: Array, *, capacity: int) -> Array:
  """Returns the cotangent [P, C, H] of the rows of an unweighted `combine`."""
  return _scatter(routing, g[:, :, None], capacity)


def _scatter(routing: Routing, x: Array, capacity: int) -> Array:
  """Copies each choice to its slot: [P, T, K or 1, ...] to [P, C, ...]."""
  xp = x.__array_namespace__()
  P, _, _, *rest = x.shape
  x = xp.broadcast_to(x, (*routing.slot.shape, *rest))
  # Choices without a slot are copied to an extra last row, which is cut off.
  at = routing.rank, xp.where(routing.kept, routing.slot, capacity)
  rows: Array = xp.zeros((P, capacity + 1, *rest), x.dtype)
  if isinstance(rows, np.ndarray):
    rows[at] = x
  else:
    rows = rows.at[at].set(x)
  return rows[:, :capacity]


def _gather(routing: Routing, rows: Array) -> Array:
  """Copies each slot to its choice: [P, C, ...] to [P, T, K, ...]."""
  xp = rows.__array_namespace__()
  kept = routing.kept
  kept = kept.reshape(*kept.shape, *[1] * (rows.ndim - 2))
  found = rows[routing.rank, routing.slot]
  terms: Array = xp.where(kept, found, xp.zeros((), rows.dtype))
  return terms


def _flushed(x: Array) -> Array:
  """Flushes denormal numbers to zeros of the same sign."""
  if isinstance(x, jax.Array):
    return x  # XLA:CPU flushes denormals in every operation
  denormal = abs(x) < np.finfo(np.float32).tiny
  return np.where(denormal, np.copysign(np.float32(0), x), x)
