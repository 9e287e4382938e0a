# SPDX-License-Identifier: Apache-2.0
"""Draws routings `[N, K]`: the distinct experts of each token, or -1."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

_Rng = np.random.Generator
_Shape = tuple[int, int]
# Returns experts for a random generator, a shape [N, K], and E.
Routing = Callable[[_Rng, _Shape, int], np.ndarray]


def draw(
  rng: _Rng, shape: _Shape, odds: Sequence[float] | np.ndarray
) -> np.ndarray:
  """Draws distinct experts with the given odds, by Gumbel's top-k trick."""
  n, k = shape
  odds = np.asarray(odds, float)
  with np.errstate(divide="ignore"):
    keys = np.log(odds) + rng.gumbel(size=(n, odds.size))
  idx = keys.argsort(-1)[:, ::-1][:, :k]
  return np.where(odds[idx] > 0, idx, -1).astype(np.int32)


def _uniform(rng: _Rng, shape: _Shape, experts: int) -> np.ndarray:
  return draw(rng, shape, np.ones(experts))


def _with_unused_choices(rng: _Rng, shape: _Shape, experts: int) -> np.ndarray:
  return np.where(rng.random(shape) < 0.4, -1, _uniform(rng, shape, experts))


def _balanced(rng: _Rng, shape: _Shape, experts: int) -> np.ndarray:
  """Gives all experts equally many rows, if that is possible."""
  first = rng.integers(experts)
  return (first + np.arange(shape[0] * shape[1]).reshape(shape)) % experts


def _one_token(rng: _Rng, shape: _Shape, experts: int) -> np.ndarray:
  only = np.arange(shape[0])[:, None] == shape[0] // 2
  return np.where(only, _uniform(rng, shape, experts), -1)


def _idle_rank(rng: _Rng, shape: _Shape, experts: int) -> np.ndarray:
  """Leaves the second quarter of the tokens unrouted: all tokens of a rank."""
  quarter = np.arange(shape[0])[:, None] * 4 // shape[0]
  return np.where(quarter == 1, -1, _uniform(rng, shape, experts))


ROUTINGS: dict[str, Routing] = {
  "uniform": _uniform,
  "balanced": _balanced,
  "skewed": lambda rng, shape, E: draw(rng, shape, 2.0 ** -np.arange(E)),
  "empty_experts": lambda rng, shape, E: draw(rng, shape, np.arange(E) % 2),
  "to_one_expert": lambda rng, shape, E: draw(
    rng, shape, np.arange(E) == E - 2
  ),
  "with_unused_choices": _with_unused_choices,
  "one_token": _one_token,
  "idle_rank": _idle_rank,
  "idle": lambda rng, shape, E: np.full(shape, -1, np.int32),
}
