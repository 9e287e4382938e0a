# SPDX-License-Identifier: Apache-2.0
"""Finds a placement of experts that balances the loads of ranks and nodes.

The busiest rank decides how long the experts compute, and the busiest node how
long the network transfers rows. The search minimizes the sum of two ratios: the
load of the busiest rank over the mean rank's, and the same for nodes. It first
assigns copies greedily to nodes, then to the ranks of each node, the largest
load first. Then it swaps copies. With an old placement, the search starts
from the old one, and adds a price for each expert that moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
import heapq
import math

import jax
import numpy as np

from ep._src.base import arguments
from ep._src.moe.placement import Placement
from ep._tools.planning.cluster import Cluster

_Array = np.ndarray
# Swaps minimize the p-norm of the block loads, which is a smooth maximum. The
# first, small p counts all overloaded blocks. The second, large p counts only
# the busiest block, also for small gains.
_POWERS = (24, 384)
_TOLERANCE = 2e-3  # a smaller gain, relative to the mean, is not worth a swap
_MOST_RANKS, _MOST_SLOTS = 2**20, 2**14  # more would take minutes
_SEED = 0
_KICKS, _KICK_WORK = 100, 2 * 10**5


def place(
  loads: np.ndarray | jax.Array,
  cluster: Cluster,
  *,
  ep_size: int | None = None,
  replicas: int = 0,
  old: Placement | None = None,
  move_cost: float = 1e-3,
) -> Placement:
  """Finds a placement that balances the loads of ranks and nodes.

      loads = np.stack([m.load for m in metrics_of_steps])
      placement = ep.place(loads, ep.Cluster.named("dgx_h100", num_nodes=4))

  It minimizes the load of the busiest rank over the mean rank's, averaged over
  steps. If an EP domain has several nodes with several ranks each, it adds the
  same ratio of nodes. All ranks have equally many slots. In small cases the
  result is within 5% of the optimum. It is the same on all processes, since the
  search uses a fixed seed.

  With `old`, the search starts from that placement, and adds `move_cost` for
  each slot whose rank had no copy of its expert before. So an expert moves only
  if the move saves more than it costs:

      new = ep.place(loads, cluster, old=placement)

  As in DeepSeek's EPLB, each replica is given to the expert whose copies have
  the largest load; the copies of an expert share its load evenly. With `old`,
  each expert keeps its number of copies if this costs less.

  Args:
    loads: load of each expert, [E]; or [S, E] for several steps, such as
      `ep.moe.Metrics.load`; or [layers, S, E] for several layers. Only ratios
      count.
    cluster: says which consecutive ranks are a node.
    ep_size: P; by default the largest that divides E + replicas and the ranks,
      and is a multiple or a divisor of the GPUs of a node.
    replicas: extra copies of experts; P must divide E + replicas. Without
      replicas, P need not divide E: the numbers from E on are empty slots.
    old: the present placement, of the same shape.
    move_cost: the price of an expert that moves from `old`, in units of the
      mean rank's load in a step. In training, a fair price is the bytes of an
      expert's weights and optimizer moments, divided by the bytes that the mean
      rank exchanges in a step and by the steps until the next placement.

  Returns:
    A `Placement` of V = E + replicas slots, rounded up to a multiple of P: [V],
    or [layers, V] for loads of several layers.

  Raises:
    ValueError: a size does not fit, or a load or the price is negative or not
      finite.
    TypeError: an argument has another type.
  """
  if not isinstance(cluster, Cluster):
    raise arguments.wrong_type("ep.place", "cluster", cluster, "an ep.Cluster")
  loads = checked_loads("ep.place", loads)
  layers = np.atleast_2d(loads)
  layers = layers.reshape(-1, *layers.shape[-2:])
  P, N, V = domain("ep.place", cluster, layers.shape[-1], replicas, ep_size)
  layers = with_empty_slots(layers, V - replicas)
  move_cost = arguments.number("ep.place", "move_cost", move_cost)
  arguments.check(
    move_cost >= 0,
    "ep.place",
    f"move_cost = {move_cost:g}, but it must not be negative.",
  )
  shape = (*loads.shape[:-2], V)
  olds: Sequence[np.ndarray | None] = [None] * len(layers)
  if old is not None:
    slots = checked_slots("ep.place", "old", old, shape, V - replicas)
    olds = [*slots.reshape(-1, V)]
  found = [
    _placed(of_layer, P, N, replicas, its_old, move_cost)
    for of_layer, its_old in zip(layers, olds, strict=True)
  ]
  return Placement(np.reshape(found, shape))


def _linear(
  loads: np.ndarray | jax.Array,
  cluster: Cluster,
  *,
  ep_size: int | None = None,
  replicas: int = 0,
) -> Placement:
  """Returns copies in the order of the experts, as many as `place` makes."""
  del cluster, ep_size
  number = _numbers(np.atleast_2d(loads), replicas)
  return Placement(np.arange(number.size).repeat(number))


# The placements that `plan` knows by name.
NAMED = {"linear": _linear, "balanced": place}


def checked_loads(
  what: str, loads: np.ndarray | jax.Array, num_experts: int | None = None
) -> np.ndarray:
  """Checks `loads` and returns them as float64; `num_experts` demands [E]."""
  try:
    loads = np.asarray(loads, float)
  except (TypeError, ValueError) as e:
    raise ValueError(f"{what}: numbers are expected as loads: {e}.") from None
  fits = loads.ndim in (1, 2, 3) and loads.size > 0
  expected = "[E] of the experts, [S, E] of steps, or [layers, S, E]"
  if num_experts is not None:
    fits = loads.shape == (num_experts,)
    expected = f"[{num_experts}] of the experts"
  arguments.check(
    fits
    and loads.min() >= 0
    and loads.max() < np.inf
    and (np.atleast_2d(loads).sum((-2, -1)) > 0).all(),
    what,
    f"loads have shape {loads.shape}, but {expected}, all finite, none negative"
    " and not all zero, are expected.",
  )
  return loads


def checked_slots(
  what: str,
  name: str,
  placement: Placement,
  shape: tuple[int, ...],
  num_experts: int,
) -> np.ndarray:
  """Returns the experts of a placement; raises if the placement is invalid."""
  if not isinstance(placement, Placement):
    raise arguments.wrong_type(what, name, placement, "an ep.Placement")
  # `Placement` checks only NumPy arrays; this placement may have a JAX array.
  experts = np.asarray(Placement(np.asarray(placement.experts)).experts)
  arguments.check(
    experts.shape == shape and bool((experts.max(-1) == num_experts - 1).all()),
    what,
    f"{name} has shape {experts.shape} and experts up to {experts.max()}, but"
    f" it must be {[*shape]}, with all of 0..{num_experts - 1}.",
  )
  return experts


def with_empty_slots(loads: np.ndarray, num_experts: int) -> np.ndarray:
  """Appends zeros, the loads of empty slots, to [..., E]."""
  missing = num_experts - loads.shape[-1]
  return np.pad(loads, [*[(0, 0)] * (loads.ndim - 1), (0, missing)])


def default_ep_size(cluster: Cluster, num_experts: int) -> int:
  """Returns the largest P that divides the experts and fits the nodes."""
  common = math.gcd(num_experts, cluster.num_ranks)
  sizes = (P for P in range(1, common + 1) if common % P == 0)
  return max(P for P in sizes if _fits_nodes(P, cluster))


def domain(
  what: str,
  cluster: Cluster,
  num_experts: int,
  replicas: int,
  ep_size: int | None,
) -> tuple[int, int, int]:
  """Returns P, the nodes and the slots of an EP domain; raises if P is bad."""
  R, G = cluster.num_ranks, cluster.gpus_per_node
  V = num_experts + arguments.integer(what, "replicas", replicas)
  if ep_size is None:
    ep_size = default_ep_size(cluster, V)
  P = arguments.integer(what, "an EP size", ep_size)
  arguments.check(
    P > 0 and R % P == 0 and _fits_nodes(P, cluster),
    what,
    f"an EP size is {P}, but it must divide the {R} ranks, and be a multiple or"
    f" a divisor of the {G} GPUs of a node.",
  )
  arguments.check(
    replicas == 0 or (replicas > 0 and V % P == 0),
    what,
    f"{num_experts} experts and {replicas} replicas are {V} copies, but they"
    f" must be a multiple of the EP size {P}; change replicas or the EP size.",
  )
  slots = -(-V // P) * P
  arguments.check(
    R <= _MOST_RANKS and slots <= _MOST_SLOTS,
    what,
    f"{R} ranks and {slots} slots of experts in a domain are too many to count;"
    f" at most {_MOST_RANKS} and {_MOST_SLOTS} are allowed.",
  )
  return P, max(1, P // G), slots


def _fits_nodes(ep_size: int, cluster: Cluster) -> bool:
  G = cluster.gpus_per_node
  return ep_size % G == 0 or G % ep_size == 0


def _numbers(loads: _Array, replicas: int) -> _Array:
  """Returns the number of copies of each expert, [E]."""
  total = loads.sum(0)
  number = np.ones(total.size, int)
  most = [(-load, e) for e, load in enumerate(total.tolist())]
  heapq.heapify(most)
  for _ in range(replicas):
    _, e = most[0]
    number[e] += 1
    heapq.heapreplace(most, (-float(total[e]) / number[e], e))
  return number


def _placed(
  loads: _Array,
  num_ranks: int,
  num_nodes: int,
  replicas: int,
  old: _Array | None,
  move_cost: float,
) -> _Array:
  """Finds a placement of one layer; returns the expert of each slot, [V]."""
  number = _numbers(loads, replicas)
  numbers = [number]
  if old is not None and (np.bincount(old) != number).any():
    numbers.append(np.bincount(old))
  searches = [
    _Search(loads, number, num_ranks, num_nodes, old, move_cost)
    for number in numbers
  ]
  experts = min(searches, key=lambda search: search.cost).experts
  return experts if old is None else _settled(experts, old, num_ranks)


class _Search:
  """A search for the best order of the copies in the slots.

  A level is a division of the slots into blocks: into ranks, and into nodes.
  Swaps minimize a norm of the blocks' loads. Unlike a maximum, the norm also
  falls if only one of two equally busy blocks gets less load.

  Args:
    loads: [S, E], load of each expert in each step.
    number: [E], copies of each expert.
    num_ranks, num_nodes: blocks of the two levels.
    old: [V], the expert of each slot before, or None.
    move_cost: price of a copy on a rank that had no copy of its expert.

  Attributes:
    experts: [V], the expert of each slot in the best order.
    cost: the cost of the best order, as `place` defines it.
  """

  def __init__(
    self,
    loads: _Array,
    number: _Array,
    num_ranks: int,
    num_nodes: int,
    old: _Array | None,
    move_cost: float,
  ):
    totals = loads.sum(1)
    copies = np.arange(number.size).repeat(number)
    shares = (loads / number)[:, copies]
    self._weights = totals[totals > 0] / totals.sum()
    self._shares = (shares / np.maximum(totals, 1e-300)[:, None])[totals > 0]
    levels = [num_ranks]
    if 1 < num_nodes < num_ranks:
      levels.append(num_nodes)
    slot = np.arange(copies.size)
    self._blocks = {n: slot * n // slot.size for n in levels}
    self._rank = self._blocks[num_ranks]
    self._prices = np.zeros((copies.size, num_ranks))  # [copy, rank]
    load = self._weights @ self._shares
    if old is None:
      nodes = _spread(load, slot, num_nodes)
      ranks = [_spread(load, node, num_ranks // num_nodes) for node in nodes]
      first = np.concatenate(ranks).ravel()
    else:
      first = _from_old(load, copies, old, num_ranks)
      had = np.zeros((number.size, num_ranks), bool)
      had[old, self._rank] = True
      self._prices[~had[copies]] = move_cost
    self._search(first)
    self.experts = copies[self._best]

  def _search(self, first: _Array) -> None:
    """Improves the first order, then random variations of the best order."""
    self._best, self.cost = first, self._cost(first)
    enough = self._bound() * (1 + _TOLERANCE)
    rng = np.random.default_rng(_SEED)
    kicks = min(_KICKS, _KICK_WORK // (len(self._shares) * first.size**2))
    for kick in range(1 + kicks):
      if kick and self.cost <= enough:
        break
      order = self._best.copy()
      for _ in range(3 if kick else 0):
        i, j = rng.integers(order.size, size=2)
        order[[i, j]] = order[[j, i]]
      for power in _POWERS:
        self._improve(order, power)
      if (cost := self._cost(order)) < self.cost:
        self._best, self.cost = order, cost

  def _loads(self, order: _Array) -> Iterator[tuple[int, _Array]]:
    """Yields the number n of blocks of each level, and their loads [S, n].

    The mean load is 1.
    """
    for n in self._blocks:
      loads = self._shares[:, order].reshape(len(self._shares), n, -1)
      yield n, loads.sum(2) * n

  def _cost(self, order: _Array) -> float:
    """Returns the load of the busiest blocks, plus the prices of moves."""
    most = sum(self._weights @ y.max(1) for _, y in self._loads(order))
    return float(most + self._prices[order, self._rank].sum())

  def _bound(self) -> float:
    """Returns a lower bound of the cost of every order.

    At best, the block with the largest copy has the smallest other copies.
    """
    sizes = np.sort(self._shares)
    count = sizes.shape[1]
    least = (
      n * (sizes[:, -1] + sizes[:, : count // n - 1].sum(1))
      for n in self._blocks
    )
    return float(sum(self._weights @ np.maximum(1, x) for x in least))

  def _improve(self, order: _Array, power: int) -> None:
    """Swaps copies in `order` while a swap makes the norm smaller."""
    norm, loads = self._norm(order, power), [*self._loads(order)]
    is_better = True
    while is_better:
      is_better = False
      for i in range(order.size):
        if not any(
          (y[:, self._blocks[n][i]] > 1 + _TOLERANCE).any() for n, y in loads
        ):
          continue  # no block of this copy is above the mean
        norms = self._norms_after_swaps(order, loads, i, power)
        j = int(norms.argmin())
        if norms[j] < norm * (1 - 1e-9):
          order[[i, j]] = order[[j, i]]
          if (after := self._norm(order, power)) < norm:
            norm, is_better = after, True
            loads = [*self._loads(order)]
          else:
            order[[i, j]] = order[[j, i]]

  def _norm(self, order: _Array, power: int) -> float:
    """Returns a smooth maximum of the loads, plus the prices of moves."""
    norm = self._prices[order, self._rank].sum()
    for _, y in self._loads(order):
      most = y.max(1)
      powers = (y / most[:, None]) ** power
      norm += self._weights @ (most * powers.sum(1) ** (1 / power))
    return float(norm)

  def _norms_after_swaps(
    self, order: _Array, loads: Iterable[tuple[int, _Array]], i: int, power: int
  ) -> _Array:
    """Returns the norm [V] after a swap of slot i with each slot."""
    own, here = order[i], self._rank[i]
    price = self._prices[order, self._rank]
    norms: _Array = price.sum() - price - price[i]
    norms += self._prices[order, here] + self._prices[own, self._rank]
    placed = self._shares[:, order]
    for n, y in loads:
      block = self._blocks[n]
      a = block[i]
      most = y.max(1, keepdims=True)
      more = (placed - placed[:, [i]]) * n / most
      y = y / most
      powers = y**power
      total = powers.sum(1, keepdims=True)
      with np.errstate(over="ignore"):  # inf: the swap is never the best
        changed = (y[:, [a]] + more).clip(0) ** power
        changed += (y[:, block] - more).clip(0) ** power
      changed += (total - powers[:, [a]] - powers[:, block]).clip(0)
      after = np.where(block == a, total, changed)
      norms += self._weights @ (most * after ** (1 / power))
    return norms


def _from_old(
  load: _Array, copies: _Array, old: _Array, num_ranks: int
) -> _Array:
  """Returns an order that keeps copies in the slots of their experts in `old`.

  Each new copy, the largest first, is assigned to the rank with the least load.
  """
  order = np.full(old.size, -1)
  kept, at = _common(copies, old)
  order[at] = kept
  new = np.setdiff1d(np.arange(old.size), kept)
  for copy in new[(-load[new]).argsort(kind="stable")]:
    loads = np.where(order < 0, 0, load[order]).reshape(num_ranks, -1).sum(1)
    of_slot = loads.repeat(old.size // num_ranks)
    order[np.where(order < 0, of_slot, np.inf).argmin()] = copy
  return order


def _settled(experts: _Array, old: _Array, num_ranks: int) -> _Array:
  """Reorders each rank's slots: experts that stay on a rank keep their slot."""
  slot = np.arange(old.size)
  first = slot * num_ranks // old.size * (old.max() + 1)  # first key of a rank
  stays, at = _common(first + experts, first + old)
  settled = np.full(old.size, -1)
  settled[at] = experts[stays]
  settled[settled < 0] = experts[np.setdiff1d(slot, stays)]
  return settled


def _common(a: _Array, b: _Array) -> tuple[_Array, _Array]:
  """Matches the k-th occurrence of each number in a and in b.

  Returns their indices in a, and in b.
  """
  orders = [x.argsort(kind="stable") for x in (a, b)]
  a_keys, b_keys = (
    x * x.size + np.arange(x.size) - x.searchsorted(x)
    for x in (a[orders[0]], b[orders[1]])
  )
  _, in_a, in_b = np.intersect1d(a_keys, b_keys, return_indices=True)
  return orders[0][in_a], orders[1][in_b]


def _spread(load: _Array, copies: _Array, num_blocks: int) -> _Array:
  """Divides copies into blocks of equal length, [num_blocks, length].

  Each copy, the largest first, is assigned to the block with the least load.
  """
  length = len(copies) // num_blocks
  blocks: list[list[int]] = [[] for _ in range(num_blocks)]
  open_blocks = [(0.0, block) for block in range(num_blocks)]
  for copy in copies[(-load[copies]).argsort(kind="stable")]:
    total, block = heapq.heappop(open_blocks)
    blocks[block].append(copy)
    if len(blocks[block]) < length:
      heapq.heappush(open_blocks, (total + load[copy], block))
  return np.array(blocks)
