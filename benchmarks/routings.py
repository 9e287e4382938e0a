# SPDX-License-Identifier: Apache-2.0
"""Draws routings: which experts each token chooses.

It uses numpy only, so that every process draws the same ones.
"""

import pathlib

import numpy as np


def draw(
  name: str, num_tokens: int, top_k: int, num_experts: int, *, zipf: float
) -> np.ndarray:
  """Returns distinct experts of each token, int32 `[num_tokens, top_k]`.

  Args:
    name: "uniform"; "zipf", where the n-th most popular expert is `n**-zipf`
      times as likely as the first, at each choice among the experts that are
      left; "one_rank", where all tokens choose the first experts, which are of
      as few ranks as possible; or a .npy file of recorded choices, of which the
      first tokens are taken.

  Raises:
    ValueError, OSError: if a file does not hold such choices.
  """
  if name == "one_rank":
    return np.tile(np.arange(top_k, dtype=np.int32), (num_tokens, 1))
  if name not in ("uniform", "zipf"):
    return _recorded(name, num_tokens, top_k, num_experts)
  rng = np.random.default_rng(0)
  popularity = np.arange(1, num_experts + 1) ** -(
    zipf if name == "zipf" else 0.0
  )
  # Popular experts are not neighbours, or one rank would own them all.
  log_odds = np.log(rng.permutation(popularity))
  # The largest sums of log odds and Gumbel noise draw without replacement.
  keys = log_odds + rng.gumbel(size=(num_tokens, num_experts))
  return keys.argsort(axis=1)[:, : -top_k - 1 : -1].astype(np.int32)


def _recorded(
  name: str, num_tokens: int, top_k: int, num_experts: int
) -> np.ndarray:
  path = pathlib.Path(name)
  if path.suffix != ".npy":
    raise ValueError(
      f"{name!r} is no routing; choose uniform, zipf, one_rank, or a .npy file"
      " of recorded topk_idx."
    )
  choices = np.load(path)
  if not np.issubdtype(choices.dtype, np.integer) or choices.ndim < 2:
    raise ValueError(
      f"{path} holds {choices.dtype}{list(choices.shape)}, but expert ids"
      " [..., K] are expected: the topk_idx of a layer."
    )
  choices = choices.reshape(-1, choices.shape[-1])
  if len(choices) < num_tokens or choices.shape[1] != top_k:
    raise ValueError(
      f"{path} holds {len(choices)} tokens of {choices.shape[1]} choices, but"
      f" {num_tokens} of {top_k} are wanted; choose a shape that fits it."
    )
  choices = choices[:num_tokens].astype(np.int32)
  used = np.sort(choices, axis=1)
  repeated = (used[:, 1:] == used[:, :-1]) & (used[:, 1:] >= 0)
  if used.min() < -1 or used.max() >= num_experts or repeated.any():
    raise ValueError(
      f"{path} holds ids from {used.min()} to {used.max()},"
      f" {repeated.sum()} repeated in a token; distinct ids from 0 to"
      f" {num_experts - 1}, or -1, are expected. Choose a shape that fits it."
    )
  return choices


def loads(choices: np.ndarray, ranks: int, num_experts: int) -> np.ndarray:
  """Returns the rows from each rank to each expert: `[source, expert]`."""
  sources = choices.reshape(ranks, -1)
  return np.stack(
    [np.bincount(x[x >= 0], minlength=num_experts) for x in sources]
  )
