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
    TypeError: `topk_idx` is being traced, or its dtype is not an integer.
    ValueError: its shape or an id does not fit, a token repeats an expert, or
      `topk_idx` is not fully addressable by this process.
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
  ids = np.sort(idx, axis=-1)
  repeats = (ids[..., 1:] == ids[..., :-1]) & (ids[..., 1:] >= 0)
  if repeats.any():
    *token, _ = np.argwhere(repeats)[0].tolist()
    raise ValueError(
      f"{what}: topk_idx{token} = {idx[tuple(token)].tolist()} repeats an"
      " expert; the top-k experts of a token must be distinct (use -1 for an"
      " unused choice)."
    )
  return np.stack(
    [
      np.bincount(own[own >= 0], minlength=num_experts)
      for own in idx.astype(np.int64).reshape(num_ranks, -1)
    ]
  )


def received(choices: np.ndarray, ep_size: int) -> np.ndarray:
  """Returns how many tokens each expert slot of a rank receives, int [R, L].

  `choices` is [R, E]. An EP domain is `ep_size` consecutive ranks.
  """
  choices = np.pad(choices, ((0, 0), (0, -choices.shape[1] % ep_size)))
  num_ranks, num_experts = choices.shape
  domains: np.ndarray = choices.reshape(-1, ep_size, num_experts).sum(axis=1)
  return domains.reshape(num_ranks, -1)


def padded(tokens: np.ndarray, alignment: int) -> np.ndarray:
  """Returns the rows of each expert: tokens rounded up to the alignment."""
  return -(-tokens // alignment) * alignment
