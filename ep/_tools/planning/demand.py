# SPDX-License-Identifier: Apache-2.0
"""Computes how many rows each rank's tokens need on each rank and node.

`Counted` counts the rows of a given routing. `Expected` computes the mean
rows for a distribution, which gives only the load of each expert. The number of
distinct ranks of a token also depends on which experts it chooses together. So
`Expected` draws tokens, with a fixed seed, from independent scores and the
model's router groups. From these tokens it takes only the ratio of rows to
choices; the number of choices follows from the loads.
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
_DRAWN = 16384  # drawn tokens; a round of the fit draws a quarter of these
_ROUNDS = 16  # rounds of the fit of odds to loads
_STEPS = 8  # drawn steps, whose loads vary as in training
_ORDERS = 4  # random orders of the experts for each drawn step


class Layout(NamedTuple):
  """The assignment of all copies of experts to ranks and nodes.

  Attributes:
    num_domains: D, EP domains of consecutive ranks.
    ep_size: P, ranks of a domain.
    num_nodes: N, nodes of a domain.
    experts: int [V], the expert of each copy; each rank has V / P copies. The
      numbers from E on are empty slots, which no token uses.
  """

  num_domains: int
  ep_size: int
  num_nodes: int
  experts: np.ndarray

  @property
  def copies(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Copies sorted by expert, and the start and count for each expert."""
    order = self.experts.argsort(kind="stable")
    number = np.bincount(self.experts)
    return order, number.cumsum() - number, number

  def copies_of(self, ids: np.ndarray) -> np.ndarray:
    """Returns the copies for expert ids [n, K]; -1 stays -1.

    Token t uses copy t % m of an expert with m copies.
    """
    order, first, number = self.copies
    nth = np.arange(len(ids))[:, None] % number[ids]
    return np.where(ids < 0, -1, order[first[ids] + nth])


class Demand(NamedTuple):
  """The rows that the tokens of a step need on each rank and node.

  Attributes:
    num_domains: D. If all domains are alike, the arrays have one entry instead
      of D.
    choices: [D, P, P], choices of each rank's tokens by destination rank.
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
  """The demand of given expert ids, counted exactly.

  Args:
    name: the routing's name in the plan.
    steps: int [R * T, K] for each step, with -1 for an unused choice.
    num_experts: E.
    num_ranks: R.
  """

  name: str
  steps: Sequence[np.ndarray]
  num_experts: int
  num_ranks: int

  @property
  def tokens_per_rank(self) -> int:
    """The number of tokens of a rank, T, in the largest step."""
    return max(len(ids) for ids in self.steps) // self.num_ranks

  @property
  def loads(self) -> np.ndarray:
    """The number of choices of each expert over all steps, [E]."""
    ids = np.concatenate([ids.ravel() for ids in self.steps])
    return np.bincount(ids[ids >= 0], minlength=self.num_experts)

  def demands(self, layout: Layout) -> Iterator[Demand]:
    """Yields the demand of each step."""
    D, P, N, _ = layout
    V = layout.experts.size
    for ids in self.steps:
      copies = layout.copies_of(ids)
      source = np.arange(len(ids)) // (len(ids) // self.num_ranks)

      def count(
        size: int, dest: np.ndarray, by: np.ndarray = source
      ) -> np.ndarray:
        """Counts the values 0..size-1 in `dest`, for each value of `by`."""
        at = (by[:, None] * size + dest)[dest >= 0]
        return np.bincount(at, minlength=(by[-1] + 1) * size)

      rank = _block(copies, V // P)
      yield Demand(
        num_domains=D,
        choices=count(P, rank).reshape(D, P, P),
        ranks=count(P, _distinct(rank)).reshape(D, P, P),
        nodes=count(N, _distinct(_block(copies, V // N))).reshape(D, P, N),
        tokens=count(V, copies, source // P).reshape(1, D, V),
      )


@dataclasses.dataclass(frozen=True, eq=False)
class Expected:
  """The expected demand for a distribution of expert loads.

  Args:
    name: the routing's name in the plan.
    cfg: gives num_experts, top_k and the router groups.
    loads: [E]; only their ratios count.
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
    """Yields one demand, the mean over steps."""
    D, P, N, experts = layout
    V, T, K = experts.size, self.tokens_per_rank, self.cfg.top_k
    order, first, number = layout.copies
    empty = (0, number.size - self._chances.size)
    chances = (np.pad(self._chances, empty) / number)[experts]  # of each copy
    copies = layout.copies_of(self._ids)

    def distinct(num_blocks: int) -> np.ndarray:
      """Returns each block's chance to get a choice of a token."""
      block = _block(copies, V // num_blocks)
      wanted = np.bincount(block.ravel(), minlength=num_blocks)
      block = _distinct(block)
      found = np.bincount(block[block >= 0], minlength=num_blocks)
      ratio = np.where(wanted > 0, found / np.maximum(wanted, 1), 1)
      wants: np.ndarray = chances.reshape(num_blocks, -1).sum(1) * ratio
      return wants.clip(max=1)

    def of_all(chances: np.ndarray) -> np.ndarray:
      return np.broadcast_to(T * chances, (1, P, chances.size))

    rng = np.random.default_rng(_SEED)
    drawn = np.stack(
      [_counts(rng, self._chances, K, P * T, D) for _ in range(_STEPS)]
    )
    drawn = np.pad(drawn, [(0, 0)] * (drawn.ndim - 1) + [empty])
    nth = np.empty(V, int)  # index of each copy among its expert's copies
    nth[order] = np.arange(V) - first[experts[order]]
    yield Demand(
      num_domains=D,
      choices=of_all(chances.reshape(P, -1).sum(1)),
      ranks=of_all(distinct(P)),
      nodes=of_all(distinct(N)),
      tokens=(drawn[..., experts] - nth - 1) // number[experts] + 1,
    )


def _block(copies: np.ndarray, size: int) -> np.ndarray:
  """Returns the block, i.e. the rank or node, of each copy; -1 stays -1.

  A block has `size` consecutive copies.
  """
  return np.where(copies < 0, -1, copies // size)


def _distinct(blocks: np.ndarray) -> np.ndarray:
  """Replaces repeated blocks of a token by -1, in [n, K]."""
  blocks = np.sort(blocks, axis=1)
  repeats = blocks[:, 1:] == blocks[:, :-1]
  blocks[:, 1:][repeats] = -1
  return blocks


def _chances(loads: np.ndarray, top_k: int) -> np.ndarray:
  """Returns the chance [E] that a token chooses each expert; the sum is K.

  An expert whose load would give a chance above 1 has the chance 1.
  """
  arguments.check(
    (loads > 0).sum() >= top_k,
    "ep.plan",
    f"fewer experts than top_k = {top_k} have a load; give more experts one (a"
    ' large A of "zipf:A" leaves few).',
  )
  most: np.ndarray = np.sort(loads)[::-1]
  full = next(
    n for n in range(top_k) if (top_k - n) * most[n] <= most[n:].sum()
  )
  with np.errstate(over="ignore"):  # a divisor may be tiny
    chances: np.ndarray = loads / most[full:].sum() * (top_k - full)
  return chances.clip(max=1)


def _counts(
  rng: np.random.Generator,
  chances: np.ndarray,
  top_k: int,
  num_tokens: int,
  num_domains: int,
) -> np.ndarray:
  """Draws how many of a domain's tokens choose each expert, int [D, E].

  This is systematic sampling. The chances of all experts lie side by side on a
  line of length K. A token draws u in [0, 1) and chooses the K experts at u,
  u + 1, ..., u + K - 1. These differ, because no chance is longer than 1. All
  tokens whose u is between the same two borders choose the same experts, so
  the function draws only the number of tokens between each two borders.
  Neighbors on the line exclude each other, so it uses several random orders.
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


def _draw(cfg: MoEConfig, chances: np.ndarray) -> np.ndarray:
  """Draws expert ids [n, K] whose frequencies are close to `chances`.

  A fixed-point iteration finds the odds that `_route` needs.
  """
  odds = chances / chances.max()
  if np.ptp(chances) > 1e-12:
    for _ in range(_ROUNDS):
      ids = _route(cfg, odds, _DRAWN // 4)
      found = np.bincount(ids.ravel(), minlength=odds.size) / len(ids)
      odds = odds * (chances / np.maximum(found, 1 / len(ids))) ** 0.7
      odds /= odds.max()
  return _route(cfg, odds, _DRAWN)


def _route(cfg: MoEConfig, odds: np.ndarray, num_tokens: int) -> np.ndarray:
  """Draws scores; returns the top-k ids [n, K] within the best router groups.

  Without groups, this samples experts by their odds, without replacement.
  """
  rng = np.random.default_rng(_SEED)
  waits = rng.standard_exponential((num_tokens, odds.size), np.float32)
  with np.errstate(divide="ignore", over="ignore"):
    scores: np.ndarray = 1 / (1 + waits / odds)
  if cfg.top_groups < cfg.num_groups:
    groups = scores.reshape(num_tokens, cfg.num_groups, -1)
    best = np.sort(groups, axis=2)[..., -cfg.group_best :].sum(2)
    losers = best.argpartition(-cfg.top_groups)[:, : -cfg.top_groups]
    np.put_along_axis(groups, losers[..., None], -1.0, axis=1)
  return scores.argpartition(-cfg.top_k)[:, -cfg.top_k :]
