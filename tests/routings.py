# SPDX-License-Identifier: Apache-2.0
"""Draws routings: `[N, K]` arrays of each token's distinct experts, or -1."""

import numpy as np

from groups import E


def draw(rng, shape, odds=(1,) * E):
  """Draws distinct experts with these odds, by Gumbel's top-k trick."""
  n, k = shape
  odds = np.asarray(odds, float)
  with np.errstate(divide="ignore"):
    keys = np.log(odds) + rng.gumbel(size=(n, odds.size))
  idx = keys.argsort(-1)[:, ::-1][:, :k]
  return np.where(odds[idx] > 0, idx, -1).astype(np.int32)


def _uniform(rng, shape):
  return draw(rng, shape)


def _skewed(rng, shape):
  return draw(rng, shape, 2.0 ** -np.arange(E))


def _empty_experts(rng, shape):
  return draw(rng, shape, np.arange(E) % 2)


def _to_one_expert(rng, shape):
  return draw(rng, shape, np.arange(E) == E - 2)


def _with_unused_choices(rng, shape):
  return np.where(rng.random(shape) < 0.4, -1, draw(rng, shape))


def _one_token(rng, shape):
  only = np.arange(shape[0])[:, None] == shape[0] // 2
  return np.where(only, draw(rng, shape), -1)


def _idle_rank(rng, shape):
  """Leaves the second quarter of the tokens, all of one rank, unrouted."""
  quarter = np.arange(shape[0])[:, None] * 4 // shape[0]
  return np.where(quarter == 1, -1, draw(rng, shape))


def _idle(rng, shape):
  return np.full(shape, -1)


ROUTINGS = {
  "uniform": _uniform,
  "skewed": _skewed,
  "empty_experts": _empty_experts,
  "to_one_expert": _to_one_expert,
  "with_unused_choices": _with_unused_choices,
  "one_token": _one_token,
  "idle_rank": _idle_rank,
  "idle": _idle,
}
