# SPDX-License-Identifier: Apache-2.0
"""Finds a placement of experts that balances the loads of ranks and nodes.

The busiest rank decides how long the experts compute, and the busiest node how
long the network transfers rows. The search minimizes the sum of two ratios: the
load of the busiest rank over the mean rank's, and the same for nodes. It deals
out the experts to the ranks, the largest load first, and then swaps experts.
With an old placement, it starts there, and puts a price on each move.
"""

from __future__ import annotations

import jax
import numpy as np

from ep._src.base import arguments
from ep._src.moe.placement import check_placement, Placement

_Array = np.ndarray
_OP = "ep.place"
# Swaps minimize the p-norm of the block loads, which is a smooth maximum. The
# first, small p counts all overloaded blocks. The second, large p counts only
# the busiest block, also for small gains.
_POWERS = (24, 384)
_TOLERANCE = 2e-3  # a smaller gain, relative to the mean, is not worth a swap
_SEED = 0
_KICKS, _KICK_WORK = 100, 2 * 10**5


def place(
  loads: np.ndarray | jax.Array,
  num_ranks: int,
  *,
  nodes: int = 1,
  old: Placement | None = None,
  move_cost: float = 1e-3,
) -> Placement:
  """Finds a placement that balances the loads of ranks and nodes.

      loads = np.stack([m.load for m in metrics_of_steps])
      placement = ep.place(loads, layer.group.ep_size)

  It minimizes the load of the busiest rank over the mean rank's, averaged over
  steps. With several nodes of several ranks, it adds the same ratio of nodes.
  In small cases the result is within 5% of the optimum. All processes find the
  same placement, since the search uses a fixed seed.

  With `old`, the search starts from that placement, and adds `move_cost` for
  each expert that moves to another rank. So an expert moves only if the move
  saves more than it costs.

  Args:
    loads: load of each expert, [E]; or [S, E] for several steps, such as
      `ep.moe.Metrics.load`; or [layers, S, E] for several layers. Only ratios
      count.
    num_ranks: P, the ranks of an EP domain. Each has L = ceil(E / P) slots.
    nodes: the nodes of an EP domain. Each has P / nodes consecutive ranks.
    old: the present placement, of the same shape as the result.
    move_cost: the price of an expert that moves from `old`, in units of the
      mean rank's load in a step. In training, a fair price is the bytes of an
      expert's weights and optimizer moments, divided by the bytes that the mean
      rank exchanges in a step and by the steps until the next placement.

  Returns:
    A `Placement` of V = P * L slots: [V], or [layers, V] for loads of several
    layers. The numbers from E on are empty slots.

  Raises:
    ValueError: a size does not fit, or a load or the price is negative or not
      finite.
    TypeError: an argument has another type.
  """
  P = arguments.integer(_OP, "num_ranks", num_ranks)
  N = arguments.integer(_OP, "nodes", nodes)
  arguments.check(
    P > 0 and N > 0 and P % N == 0,
    _OP,
    f"num_ranks = {P} and nodes = {N}, but they must be positive, and num_ranks"
    " a multiple of nodes.",
  )
  move_cost = arguments.number(_OP, "move_cost", move_cost)
  arguments.check(
    move_cost >= 0,
    _OP,
    f"move_cost = {move_cost:g}, but it must not be negative.",
  )
  known = np.atleast_2d(_checked(loads))
  *layers, _, E = known.shape
  V = -(-E // P) * P
  of_slots = np.pad(known, [(0, 0)] * (known.ndim - 1) + [(0, V - E)])
  found = np.empty((*layers, V), int)
  if old is not None:
    if isinstance(old, Placement):  # a JAX array was not checked before
      old = Placement(np.asarray(old.experts))
    check_placement(_OP, "old", old, V)
    found = np.array(old.experts)
    arguments.check(
      found.shape == (*layers, V),
      _OP,
      f"old has shape {found.shape}, but it must be {[*layers, V]}.",
    )
  for layer in np.ndindex(*layers):
    start = None if old is None else found[layer]
    found[layer] = _Search(of_slots[layer], P, N, start, move_cost).run()
  return Placement(found)


def _checked(loads: np.ndarray | jax.Array) -> _Array:
  """Returns loads as float64; raises if they are invalid."""
  try:
    array = np.asarray(loads, float)
  except (TypeError, ValueError) as e:
    raise ValueError(f"{_OP}: numbers are expected as loads: {e}.") from None
  arguments.check(
    array.ndim in (1, 2, 3)
    and array.size > 0
    and array.min() >= 0
    and array.max() < np.inf
    and (np.atleast_2d(array).sum((-2, -1)) > 0).all(),
    _OP,
    f"loads have shape {array.shape}, but [E] of the experts, [S, E] of steps,"
    " or [layers, S, E], all finite, none negative and not all zero, are"
    " expected.",
  )
  return array


class _Search:
  """A search for the best order of the experts in the slots.

  A level is a division of the slots into blocks: into ranks, and into nodes.
  Swaps minimize a norm of the blocks' loads. Unlike a maximum, the norm also
  falls if only one of two equally busy blocks gets less load.

  Args:
    loads: [S, V], load of each expert in each step.
    num_ranks, num_nodes: blocks of the two levels.
    old: [V], the expert of each slot before, or None.
    move_cost: price of an expert on another rank than in `old`.
  """

  def __init__(
    self,
    loads: _Array,
    num_ranks: int,
    num_nodes: int,
    old: _Array | None,
    move_cost: float,
  ):
    loads = loads[loads.any(1)]  # steps without any choice do not count
    totals = loads.sum(1, keepdims=True)
    self._weights = totals[:, 0] / totals.sum()
    self._shares = loads / totals
    slot = np.arange(loads.shape[1])
    levels = {num_ranks, num_nodes} - {1}
    self._blocks = {n: slot * n // slot.size for n in levels}
    self._rank = slot * num_ranks // slot.size
    self._price = 0.0 if old is None else move_cost
    if old is None:  # deals out the experts, the largest first, back and forth
      largest = (-self._weights @ self._shares).argsort(kind="stable")
      rounds = largest.reshape(-1, num_ranks)
      rounds[1::2] = rounds[1::2, ::-1]
      old = rounds.T.ravel()
    self._first, self._home = old, self._rank[old.argsort()]

  def run(self) -> _Array:
    """Returns the best of the first order and its variations, improved."""
    # At best, the block with the largest expert has the smallest other experts.
    sizes, V = np.sort(self._shares), self._first.size
    bounds = [
      np.maximum(1, n * (sizes[:, -1] + sizes[:, : V // n - 1].sum(1)))
      for n in self._blocks
    ]
    enough = sum(self._weights @ x for x in bounds) * (1 + _TOLERANCE)
    best, cost, rng = self._first, np.inf, np.random.default_rng(_SEED)
    for kick in range(1 + min(_KICKS, _KICK_WORK // (V * sizes.size))):
      order = best.copy()
      for i, j in rng.integers(V, size=(3 if kick else 0, 2)):
        order[[i, j]] = order[[j, i]]
      for power in _POWERS:
        self._improve(order, power)
      if (found := self._norm(order, np.inf)) < cost:
        best, cost = order, found
      if cost <= enough:
        break
    stays = self._home[best] == self._rank
    settled = self._first.copy()  # experts that stay on a rank keep their slot
    settled[~np.isin(settled, best[stays])] = best[~stays]
    return settled

  def _improve(self, order: _Array, power: float) -> None:
    """Swaps experts in `order` while a swap makes the norm smaller."""
    norm, is_better = self._norm(order, power), True
    while is_better:
      is_better = False
      for i in range(order.size):
        norms = self._norms_after_swaps(order, i, power)
        j = int(norms.argmin())
        if norms[j] < norm * (1 - 1e-9):
          order[[i, j]] = order[[j, i]]
          if (after := self._norm(order, power)) < norm:
            norm, is_better = after, True
          else:
            order[[i, j]] = order[[j, i]]

  def _loads(self, order: _Array) -> list[tuple[_Array, _Array]]:
    """Returns each level's block of each slot, and loads [S, n] of mean 1."""
    placed = self._shares[:, order]
    return [
      (block, placed.reshape(len(placed), n, -1).sum(2) * n)
      for n, block in self._blocks.items()
    ]

  def _prices(self, order: _Array) -> _Array:
    """Returns the price of each slot's expert, [V]."""
    return np.where(self._home[order] == self._rank, 0, self._price)

  def _norm(self, order: _Array, power: float) -> float:
    """Returns a smooth maximum of loads (inf: the maximum), plus prices."""
    norm = self._prices(order).sum()
    for _, y in self._loads(order):
      most = y.max(1, keepdims=True)
      total = ((y / most) ** power).sum(1)
      norm += self._weights @ (most[:, 0] * total ** (1 / power))
    return float(norm)

  def _norms_after_swaps(self, order: _Array, i: int, power: float) -> _Array:
    """Returns the norm [V] after a swap of slot i with each slot.

    inf if no block of slot i is above the mean.
    """
    loads = self._loads(order)
    if not any((y[:, b[i]] > 1 + _TOLERANCE).any() for b, y in loads):
      return np.full(order.size, np.inf)
    home, rank, prices = self._home[order], self._rank, self._prices(order)
    norms: _Array = prices.sum() - prices - prices[i]
    norms += self._price * ((home != rank[i]) + 1.0 * (home[i] != rank))
    placed = self._shares[:, order]
    for block, y in loads:
      most = y.max(1, keepdims=True)
      more = (placed - placed[:, [i]]) * y.shape[1] / most
      own, other = (y / most)[:, [block[i]]], (y / most)[:, block]
      total = ((y / most) ** power).sum(1, keepdims=True)
      with np.errstate(over="ignore"):  # inf: the swap is never the best
        changed = (own + more).clip(0) ** power
        changed += (other - more).clip(0) ** power
      changed += (total - own**power - other**power).clip(0)
      after = np.where(block == block[i], total, changed)
      norms += self._weights @ (most * after ** (1 / power))
    return norms
