# SPDX-License-Identifier: Apache-2.0
"""Demand: how many rows each rank's tokens want on each rank and node.

It is counted where a routing is given, and expected where a distribution is. A
distribution is only the load of each expert. What it leaves open, which experts
a token chooses together, decides how often a token goes once for two choices.
So tokens are drawn, with a fixed seed, as a router with the model's groups
would choose for scores without other structure. Of these tokens only the ratio
counts of rows to choices; the choices themselves are those of the loads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from ep._src.base import arguments
from ep._src.moe.config import MoEConfig

_SEED = 0
_DRAWN = 16384  # tokens for the ratios; a quarter for each round of a fit
_ROUNDS = 16  # of the fit of odds to loads
_STEPS = 8  # that are drawn for what differs from step to step
_ORDERS = 4  # of experts, in which the tokens of a step are drawn


class Layout(NamedTuple):
  """Where the copies of experts are.

  Attributes:
    num_domains: D, EP domains of consecutive ranks.
    ep_size: P.
    num_nodes: N, nodes of a domain.
    experts: int [V], the expert of each of the V / P copies of each rank.
  """

  num_domains: int
  ep_size: int
  num_nodes: int
  experts: np.ndarray

  @property
  def copies(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Copies by expert, with each expert's first place and number of them."""
    order = self.experts.argsort(kind="stable")
    number = np.bincount(self.experts)
    return order, number.cumsum() - number, number

  def copies_of(self, ids: np.ndarray) -> np.ndarray:
    """Returns the copy for each of [n, K] ids; -1 stays.

    The tokens of a step take the copies of an expert in turn.
    """
    order, first, number = self.copies
    turn = np.arange(len(ids))[:, None] % number[ids]
    return np.where(ids < 0, -1, order[first[ids] + turn])


class Demand(NamedTuple):
  """What the tokens of a step want.

  Attributes:
    num_domains: D. The arrays have one entry for each or, if all domains are
      alike, one.
    choices: [D, P, P], choices of each rank's tokens on each rank.
    ranks: [D, P, P], tokens of each rank with a choice on each rank.
    nodes: [D, P, N], tokens of each rank with a choice in each node.
    tokens: int [S, D, V], tokens of each copy of an expert, in S steps.
  """

  num_domains: int
  choices: np.ndarray
  ranks: np.ndarray
  nodes: np.ndarray
  tokens: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Counted:
  """Steps whose ids are given.

  Args:
    name: for the plan.
    steps: int [R * T, K] each, with -1 for an unused choice.
    num_experts: E.
    num_ranks: R.
  """

  name: str
  steps: Sequence[np.ndarray]
  num_experts: int
  num_ranks: int

  @property
  def tokens_per_rank(self) -> int:
    """T: the most of a step."""
    return max(len(ids) for ids in self.steps) // self.num_ranks

  @property
  def loads(self) -> np.ndarray:
    """Choices of each expert in all steps."""
    ids = np.concatenate([ids.ravel() for ids in self.steps])
    return np.bincount(ids[ids >= 0], minlength=self.num_experts)

  def demands(self, layout: Layout) -> Iterator[Demand]:
    """Yields the demand of each step."""
    D, P, N, _ = layout
    V = layout.experts.size
    for ids in self.steps:
      copies = layout.copies_of(ids)
      source = np.arange(len(ids)) // (len(ids) // self.num_ranks)

      def count(size, dest, by=source):
        """Returns how often [n, K] has each of 0..size-1, by source."""
        at = (by[:, None] * size + dest)[dest >= 0]
        return np.bincount(at, minlength=(by[-1] + 1) * size)

      rank = _part(copies, V // P)
      yield Demand(
        num_domains=D,
        choices=count(P, rank).reshape(D, P, P),
        ranks=count(P, _distinct(rank)).reshape(D, P, P),
        nodes=count(N, _distinct(_part(copies, V // N))).reshape(D, P, N),
        tokens=count(V, copies, source // P).reshape(1, D, V),
      )


@dataclasses.dataclass(frozen=True, eq=False)
class Expected:
  """Steps of a distribution.

  Args:
    name: for the plan.
    cfg: its experts, choices and groups.
    loads: [E], of which only the ratios count.
    tokens_per_rank: T.
  """

  name: str
  cfg: MoEConfig
  loads: np.ndarray
  tokens_per_rank: int

  @functools.cached_property
  def _chances(self) -> np.ndarray:
    return _chances(self.loads, self.cfg.top_k)

  @functools.cached_property
  def _ids(self) -> np.ndarray:
    return _draw(self.cfg, self._chances)

  def demands(self, layout: Layout) -> Iterator[Demand]:
    """Yields the demand of one step, which is the mean of all."""
    D, P, N, experts = layout
    V, T, K = experts.size, self.tokens_per_rank, self.cfg.top_k
    order, first, number = layout.copies
    chances = (self._chances / number)[experts]  # that a token chooses a copy
    copies = layout.copies_of(self._ids)

    def distinct(parts):
      """Returns the chances that a token has a choice in each part."""
      part = _part(copies, V // parts)
      wanted = np.bincount(part.ravel(), minlength=parts)
      ways = _distinct(part)
      found = np.bincount(ways[ways >= 0], minlength=parts)
      ratio = np.where(wanted > 0, found / np.maximum(wanted, 1), 1)
      return (chances.reshape(parts, -1).sum(1) * ratio).clip(max=1)

    def of_all(chances):
      return np.broadcast_to(T * chances, (1, P, chances.size))

    rng = np.random.default_rng(_SEED)
    drawn = np.stack(
      [_counts(rng, self._chances, K, P * T, D) for _ in range(_STEPS)]
    )
    turn = np.empty(V, int)  # of each copy among those of its expert
    turn[order] = np.arange(V) - first[experts[order]]
    yield Demand(
      num_domains=D,
      choices=of_all(chances.reshape(P, -1).sum(1)),
      ranks=of_all(distinct(P)),
      nodes=of_all(distinct(N)),
      tokens=(drawn[..., experts] - turn - 1) // number[experts] + 1,
    )


def _part(copies, size):
  """Returns the part, of `size` copies each, of each copy; -1 stays."""
  return np.where(copies < 0, -1, copies // size)


def _distinct(parts):
  """Returns [n, K] with -1 for all but one of a token's equal parts."""
  parts = np.sort(parts, axis=1)
  repeats = parts[:, 1:] == parts[:, :-1]
  parts[:, 1:][repeats] = -1
  return parts


def _chances(loads, top_k):
  """Returns the chance that a token chooses each expert: K in all, each <= 1.

  An expert whose load would need more than each token gets each token.
  """
  arguments.check(
    (loads > 0).sum() >= top_k,
    "ep.plan",
    f"fewer experts than top_k = {top_k} have a load; give more experts one (a"
    ' large A of "zipf:A" leaves few).',
  )
  most = np.sort(loads)[::-1]
  full = next(
    n for n in range(top_k) if (top_k - n) * most[n] <= most[n:].sum()
  )
  with np.errstate(over="ignore"):  # the largest loads of tiny ones
    return np.minimum(1, loads / most[full:].sum() * (top_k - full))


def _counts(rng, chances, top_k, num_tokens, num_domains):
  """Draws how many of a domain's tokens choose each expert, int [D, E].

  It samples systematically. The chances of all experts lie side by side on a
  line of length K. A token draws a number u in [0, 1), and chooses the K
  experts that lie at u, u + 1, ..., u + K - 1. They differ, because no chance
  is longer than 1. All tokens whose u lies between the same two borders of
  experts choose the same experts, so only these tokens are counted. Neighbors
  on the line exclude each other, so the experts have several random orders.
  """
  counts = np.zeros((num_domains, chances.size), int)
  for tokens in np.diff(num_tokens * np.arange(_ORDERS + 1) // _ORDERS):
    order = rng.permutation(chances.size)
    ends = chances[order].cumsum()
    ends *= top_k / ends[-1]
    borders = np.unique([0, 1, *(ends % 1).round(12)])
    at = (borders[:-1] + borders[1:])[:, None] / 2 + np.arange(top_k)
    is_chosen = np.zeros((len(at), chances.size))
    chosen = order[np.searchsorted(ends, at)]
    np.put_along_axis(is_chosen, chosen, 1, axis=1)
    drawn = rng.multinomial(tokens, np.diff(borders), num_domains)
    counts += (drawn @ is_chosen).astype(int)
  return counts


def _draw(cfg, chances):
  """Draws ids [n, K] whose experts come about as often as `chances` say."""
  odds = chances / chances.max()
  if np.ptp(chances) > 1e-12:
    for _ in range(_ROUNDS):
      ids = _route(cfg, odds, _DRAWN // 4)
      found = np.bincount(ids.ravel(), minlength=odds.size) / len(ids)
      odds = odds * (chances / np.maximum(found, 1 / len(ids))) ** 0.7
      odds /= odds.max()
  return _route(cfg, odds, _DRAWN)


def _route(cfg, odds, num_tokens):
  """Returns the ids [n, K] of the best scores, of the best groups if any."""
  rng = np.random.default_rng(_SEED)
  waits = rng.standard_exponential((num_tokens, odds.size), np.float32)
  with np.errstate(divide="ignore", over="ignore"):
    scores = 1 / (1 + waits / odds)  # without replacement, with these odds
  if cfg.top_groups < cfg.num_groups:
    groups = scores.reshape(num_tokens, cfg.num_groups, -1)
    best = np.sort(groups, axis=2)[..., -cfg.group_best :].sum(2)
    losers = best.argpartition(-cfg.top_groups)[:, : -cfg.top_groups]
    np.put_along_axis(groups, losers[..., None], -1.0, axis=1)
  return scores.argpartition(-cfg.top_k)[:, -cfg.top_k :]
