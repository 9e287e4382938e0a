# SPDX-License-Identifier: Apache-2.0
"""The numeric contract of ep, on whole arrays: the results of every backend.

NumPy arrays give NumPy arrays, with the bits of the contract. Traced JAX arrays
can be differentiated.

Arrays have a leading axis for the `P` ranks of one EP domain. `T` tokens of a
rank, `K` choices of a token, `E` experts, `L = E / P` local experts (expert `e`
lives on rank `e // L`), `C` receive capacity of a rank, `H` hidden size.

* Layout: expert-major. The slab of local expert `j` starts at
  `offset[j] = sum_{i<j} roundup(count[i], alignment)`; its rows ascend by
  source rank, then by source token. Padding rows, rows past the last slab, and
  their weights are zero.
* Choices: -1 is an unused choice. Slots at or past `C` are dropped, along with
  their weights and gradients; `total_recv_tokens` and `max_recv_tokens` include
  dropped slots and padding.
* Sums: `sum_k row(t, k)` starts at +0.0, runs in float32 in ascending `k`, and
  is rounded once, to the dtype of the rows. A weighted row is a float32 product
  that is rounded before it is added. Denormal float32 numbers are zeros of
  their sign, before and after each product and each addition. A final sum of
  zero is +0.
* Derivatives: dispatch and combine send rows along the same routing in opposite
  directions, so each is the other's transpose.

Results of JAX arrays are exact only for integers, because XLA does not keep
these bits. It may contract a product and a sum into an FMA, which rounds once.
It replaces `0 + x` by `x`, which may be -0 or a denormal. XLA:CPU may change
the bits of a bfloat16 that it copies.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import jax
import numpy as np

Array = jax.Array | np.ndarray
_Choice = tuple[int, ...]  # rank, token, k


class Routing(NamedTuple):
  """The destination of each choice, and the rows that each rank receives."""

  rank: Array  # [P, T, K] destination rank; -1: unused or dropped
  slot: Array  # [P, T, K] row on that rank; -1: unused or dropped
  group_sizes: Array  # [P, L] rows of each slab within the capacity
  token_counts: Array  # [P, L] rows of each slab that hold a token
  total_recv_tokens: Array  # [P, 1] rows, dropped ones included
  dropped_counts: Array  # [P, L] tokens of each expert without a row
  max_recv_tokens: Array  # [P, 1] the largest total_recv_tokens of all ranks
  kept: Array  # [P, T, K] whether a choice has a slot


def prepare(
  topk_idx: Array, *, num_experts: int, capacity: int, alignment: int = 1
) -> Routing:
  """Returns the routing of `topk_idx` [P, T, K]."""
  xp = topk_idx.__array_namespace__()
  P, T, _ = topk_idx.shape
  E, L, i32 = num_experts, num_experts // P, np.int32
  idx = topk_idx.astype(i32)
  chosen = (idx[..., None] == xp.arange(E)).any(2).reshape(P * T, E)
  count = chosen.sum(0, dtype=i32).reshape(P, L)
  padded = -(-count // alignment) * alignment
  end = padded.cumsum(1, dtype=i32)
  offset = end - padded
  row_in_slab = (chosen.cumsum(0, dtype=i32) - chosen).reshape(P, T, E)
  slot_of_expert = row_in_slab + offset.reshape(E)
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
  `drop_by="slot"`. The loop takes the choices in the order `drop_by`, and keeps
  each one for which its rank has a free row.
  """
  L = num_experts // len(topk_idx)
  kept = np.zeros(topk_idx.shape, bool)
  rows = np.zeros(num_experts, int)  # kept choices of each expert

  def has_free_row(expert: int) -> bool:
    """Returns whether the slabs of its rank fit with one more row."""
    wanted = rows + (np.arange(num_experts) == expert)
    slabs = wanted.reshape(-1, L)[expert // L]
    return bool((-(-slabs // alignment) * alignment).sum() <= capacity)

  def expert(choice: _Choice) -> int:
    return int(topk_idx[choice])

  def lightness(choice: _Choice) -> tuple[bool, float]:
    assert weights is not None
    weight = float(weights[choice])
    return (True, 0.0) if math.isnan(weight) else (False, -weight)

  def in_order(choices: list[_Choice]) -> list[_Choice]:
    """Returns choices (r, t, k) in the order `drop_by`."""
    if drop_by == "slot":
      return sorted(choices, key=expert)
    by_weight = sorted(choices, key=lightness)
    if drop_by == "weight":
      return by_weight
    blocks = []  # (number of the block in its expert's slab, choice)
    for _, own in itertools.groupby(sorted(by_weight, key=expert), expert):
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
  """Returns the routing of the choices that `assign` kept, in NumPy.

  The totals and the dropped counts are of all choices.
  """
  every = prepare(topk_idx, num_experts=num_experts, **sizes)
  assigned = np.where(kept, topk_idx, -1)
  dropped = topk_idx[(topk_idx >= 0) & ~kept]
  dropped_counts = np.bincount(dropped, minlength=num_experts)
  return prepare(assigned, num_experts=num_experts, **sizes)._replace(
    total_recv_tokens=every.total_recv_tokens,
    dropped_counts=dropped_counts.reshape(len(topk_idx), -1).astype(np.int32),
    max_recv_tokens=every.max_recv_tokens,
  )


def dispatch(
  routing: Routing, tokens: Array, topk_weights: Array, *, capacity: int
) -> tuple[Array, Array]:
  """Returns [P, C, H] and [P, C], for tokens [P, T, H], weights [P, T, K]."""
  weights = topk_weights.astype(np.float32)
  return (
    _scatter(routing, tokens[:, :, None], capacity),
    _scatter(routing, weights, capacity),
  )


def combine(
  routing: Routing, rows: Array, weights: Array | None = None
) -> Array:
  """Returns [P, T, H], for rows [P, C, H] and optional weights [P, C]."""
  terms = _flushed(_gather(routing, rows).astype(np.float32))
  if weights is not None:
    weights = _flushed(_gather(routing, weights.astype(np.float32)))
    terms = _flushed(terms * weights[..., None])
  out: Any = np.float32(0)
  for k in range(terms.shape[2]):
    out = _flushed(out + terms[:, :, k])
  sums: Array = (out + np.float32(0)).astype(rows.dtype)  # makes +0 of -0
  return sums


def dispatch_bwd(
  routing: Routing, g_recv: Array, g_recv_weights: Array
) -> tuple[Array, Array]:
  """Returns cotangents of tokens and weights, for [P, C, H] and [P, C]."""
  return combine(routing, g_recv), _gather(routing, g_recv_weights)


def combine_bwd(routing: Routing, g: Array, *, capacity: int) -> Array:
  """Returns [P, C, H], the cotangent of unweighted rows, for g [P, T, H]."""
  return _scatter(routing, g[:, :, None], capacity)


def _scatter(routing: Routing, x: Array, capacity: int) -> Array:
  """Copies each choice to its slot: [P, T, K or 1, ...] to [P, C, ...]."""
  xp = x.__array_namespace__()
  P, _, _, *rest = x.shape
  x = xp.broadcast_to(x, (*routing.slot.shape, *rest))
  # Choices without a slot are copied to one more row, which is cut off.
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
  """Returns `x` with denormal numbers as zeros of their sign."""
  if isinstance(x, jax.Array):
    return x  # XLA:CPU flushes them in every operation
  denormal = abs(x) < np.finfo(np.float32).tiny
  return np.where(denormal, np.copysign(np.float32(0), x), x)
