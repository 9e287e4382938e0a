# SPDX-License-Identifier: Apache-2.0
"""Counts the choices of a routing, in NumPy and without a group."""

from __future__ import annotations

import jax
import numpy as np


def choices(
  what: str,
  topk_idx: jax.Array | np.ndarray,
  num_experts: int,
  num_ranks: int,
) -> np.ndarray:
  """Returns [R, E], how often each rank's tokens choose each expert.

  Raises, with a message that begins with `what`:
    TypeError: `topk_idx` is being traced, or holds no integers.
    ValueError: its shape or an id does not fit, or other processes hold a part
      of it.
  """
  if isinstance(topk_idx, jax.core.Tracer):
    raise TypeError(
      f"{what}: topk_idx is being traced and has no values yet; return it from"
      " the compiled program and pass it there."
    )
  if isinstance(topk_idx, jax.Array) and not topk_idx.is_fully_addressable:
    raise ValueError(
      f"{what}: other processes hold a part of topk_idx; gather it first, on"
      " all of them: jax.experimental.multihost_utils.process_allgather("
      "topk_idx, tiled=True)."
    )
  idx = np.asarray(topk_idx)
  if idx.dtype.kind not in "iu":
    raise TypeError(
      f"{what}: topk_idx is {idx.dtype}, but expert ids are integers; convert"
      " them."
    )
  if idx.ndim < 2 or len(idx) % num_ranks:
    raise ValueError(
      f"{what}: topk_idx has shape {idx.shape}, but [R * n, ..., K] with R ="
      f" {num_ranks} ranks is expected."
    )
  if idx.size and not -1 <= idx.min() <= idx.max() < num_experts:
    raise ValueError(
      f"{what}: topk_idx has ids in {idx.min()}..{idx.max()}, but valid ids are"
      f" -1..{num_experts - 1}."
    )
  return np.stack(
    [
      np.bincount(own[own >= 0], minlength=num_experts)
      for own in idx.astype(np.int64).reshape(num_ranks, -1)
    ]
  )


def received(choices: np.ndarray, ep_size: int) -> np.ndarray:
  """Returns [R, L], tokens for each expert of each rank, of `choices` [R, E].

  An EP domain is `ep_size` consecutive ranks.
  """
  num_ranks, num_experts = choices.shape
  domains = choices.reshape(-1, ep_size, num_experts).sum(axis=1)
  return domains.reshape(num_ranks, -1)


def slabs(tokens: np.ndarray, alignment: int) -> np.ndarray:
  """Returns the rows of each expert's slab, padding included."""
  return -(-tokens // alignment) * alignment


def dropped(
  tokens: np.ndarray, alignment: int, capacity: int, is_fair: bool = False
) -> np.ndarray:
  """Returns how many of a rank's tokens [..., L] find no room in its capacity.

  Experts get blocks of `alignment` rows, as many as they want, the first expert
  first; or if `is_fair`, each expert in turn gets one.
  """
  wants = -(-tokens // alignment)
  room = capacity // alignment
  if is_fair:
    quota = _shared_fairly(wants, room)
  else:
    quota = (room - _sum_before(wants)).clip(0, wants)
  return (tokens - np.minimum(tokens, quota * alignment)).sum(axis=-1)


def _shared_fairly(wants: np.ndarray, room: int) -> np.ndarray:
  """Returns the blocks of each expert [..., L] if they are given out in turns.

  All experts have as many turns that are complete. The blocks that are left go
  to the first of those that want more.
  """
  turns = np.zeros((*wants.shape[:-1], 1), wants.dtype)
  for bit in reversed(range(int(wants.max(initial=0)).bit_length())):
    more = turns + (1 << bit)
    fits = np.minimum(wants, more).sum(axis=-1, keepdims=True) <= room
    turns = np.where(fits, more, turns)
  quota = np.minimum(wants, turns)
  left = room - quota.sum(axis=-1, keepdims=True)
  wants_more = wants > quota
  return quota + (wants_more & (_sum_before(wants_more) < left))


def _sum_before(x: np.ndarray) -> np.ndarray:
  """Returns, for each element, the sum of those before it in the last axis."""
  return x.cumsum(axis=-1) - x
