# SPDX-License-Identifier: Apache-2.0
"""place: finds where experts should be for their loads.

The busiest rank decides how long experts compute, and the busiest node how long
the network between nodes is in use. Both are measured in parts of their mean,
and their sum is minimized. First the copy with most load goes to the node with
least, and so it does within each node; then copies are swapped. Where there is
an old placement, swaps begin there, and each moved expert has a price.
"""

from __future__ import annotations

from collections.abc import Sequence
import heapq
import math

import jax
import numpy as np

from ep._src.base import arguments
from ep._src.moe.placement import Placement
from ep._tools.planning.cluster import Cluster

# These are the powers of the norms that replace a maximum while copies are
# swapped. The first norm sees all parts that are far too large; the second norm
# weighs small gains.
_POWERS = (24, 384)
_TOLERANCE = 2e-3  # a part of the mean that is not worth a swap
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

  It minimizes the mean over steps of the busiest rank's load over the mean
  rank's; to this the same of nodes is added where an EP domain has several with
  several ranks each. Each rank has as many slots. The search begins with nodes,
  goes on within each, and then swaps. In small cases the sum is within 5% of
  the least. It is the same on all processes, since it draws with a fixed seed.

  With `old`, the search begins there, and adds `move_cost` for each slot whose
  rank had no copy of its expert. So experts move only for what they save:

      new = ep.place(loads, cluster, old=placement)

  Copies go one by one to the expert whose copies have most load, as in
  DeepSeek's EPLB; an expert's load is split evenly between its copies. With
  `old`, each expert keeps its number of copies if this costs less.

  Args:
    loads: [E], of each expert, or [S, E] of several steps, such as
      `ep.moe.Metrics.load`, or [layers, S, E] of several layers. Only ratios
      count.
    cluster: which consecutive ranks are a node.
    ep_size: P; by default the largest that divides the slots and the ranks, and
      is a multiple or a divisor of the GPUs of a node.
    replicas: copies of experts besides one of each; P must divide E + replicas.
    old: where the experts are now, a placement of the same shape.
    move_cost: the price of an expert that moves from `old`, in loads of the
      mean rank in a step: a move has to lower the busiest rank's load by more.
      In training, a fair price is the bytes of an expert's weights and of their
      optimizer's moments, divided by the bytes that the mean rank exchanges in
      a step, and by the steps until the next placement.

  Returns:
    A `Placement` of V = E + replicas slots: [V], or [layers, V] for loads of
    layers.

  Raises:
    ValueError: a size does not fit, or a load or the price is negative or not
      finite.
    TypeError: an argument has another type.
  """
  if not isinstance(cluster, Cluster):
    raise TypeError(
      f"ep.place: cluster is a {type(cluster).__name__}, but an ep.Cluster is"
      " expected."
    )
  loads = checked_loads("ep.place", loads)
  layers = np.atleast_2d(loads)
  layers = layers.reshape(-1, *layers.shape[-2:])
  E = layers.shape[-1]
  P, N = domain("ep.place", cluster, E, replicas, ep_size)
  move_cost = arguments.number("ep.place", "move_cost", move_cost)
  arguments.check(
    move_cost >= 0,
    "ep.place",
    f"move_cost = {move_cost:g}, but it must not be negative.",
  )
  shape = (*loads.shape[:-2], E + replicas)
  olds: Sequence[np.ndarray | None] = [None] * len(layers)
  if old is not None:
    slots = checked_slots("ep.place", "old", old, shape, E)
    olds = [*slots.reshape(-1, shape[-1])]
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
  """Returns the same copies as `place`, in the order of the experts."""
  del cluster, ep_size
  number = _numbers(np.atleast_2d(loads), replicas)
  return Placement(np.arange(number.size).repeat(number))


# The placements that `plan` knows by name.
NAMED = {"linear": _linear, "balanced": place}


def checked_loads(
  what: str, loads: np.ndarray | jax.Array, num_experts: int | None = None
) -> np.ndarray:
  """Returns loads as float64; a plan, which names E, takes [E] alone."""
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
  """Returns the experts of a placement, or raises if they do not fit."""
  if not isinstance(placement, Placement):
    raise arguments.wrong_type(what, name, placement, "an ep.Placement")
  # A placement has not checked an array of JAX's.
  experts = np.asarray(Placement(np.asarray(placement.experts)).experts)
  arguments.check(
    experts.shape == shape and bool((experts.max(-1) == num_experts - 1).all()),
    what,
    f"{name} has shape {experts.shape} and experts up to {experts.max()}, but"
    f" it must be {[*shape]}, with all of 0..{num_experts - 1}.",
  )
  return experts


def default_ep_size(cluster: Cluster, num_experts: int) -> int:
  """Returns the largest P that divides the experts, and that fits the nodes."""
  common = math.gcd(num_experts, cluster.num_ranks)
  sizes = (P for P in range(1, common + 1) if common % P == 0)
  return max(P for P in sizes if _fits_nodes(P, cluster))


def domain(
  what: str,
  cluster: Cluster,
  num_experts: int,
  replicas: int,
  ep_size: int | None,
) -> tuple[int, int]:
  """Returns P and the nodes of an EP domain, or raises."""
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
    replicas >= 0 and V % P == 0,
    what,
    f"{num_experts} experts and {replicas} replicas are {V} copies, but they"
    f" must be a multiple of the EP size {P}; change replicas or the EP size.",
  )
  return P, max(1, P // G)


def _fits_nodes(ep_size, cluster):
  G = cluster.gpus_per_node
  return ep_size % G == 0 or G % ep_size == 0


def _numbers(loads, replicas):
  """Returns [E], how many copies each expert should have."""
  total = loads.sum(0)
  number = np.ones(total.size, int)
  most = [(-load, e) for e, load in enumerate(total.tolist())]
  heapq.heapify(most)
  for _ in range(replicas):
    _, e = most[0]
    number[e] += 1
    heapq.heapreplace(most, (-float(total[e]) / number[e], e))
  return number


def _placed(loads, num_ranks, num_nodes, replicas, old, move_cost):
  """Returns the experts [V] of one layer's slots."""
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
  """Searches an order of copies, whose consecutive parts are ranks and nodes.

  A swap is judged by a norm of the parts' loads, which, unlike their maximum,
  also falls when one of two busiest parts becomes smaller. The best order is
  that of the least maximum and moves.

  Args:
    loads: [S, E], of each expert.
    number: [E], copies of each expert.
    num_ranks, num_nodes: parts.
    old: [V], the expert of each slot before, or None.
    move_cost: of a copy on a rank that had none of its expert.

  Attributes:
    experts: [V], the expert of each slot in the best order.
    cost: what is minimized.
  """

  def __init__(self, loads, number, num_ranks, num_nodes, old, move_cost):
    totals = loads.sum(1)
    copies = np.arange(number.size).repeat(number)
    shares = (loads / number)[:, copies]
    self._weights = totals[totals > 0] / totals.sum()
    self._shares = (shares / np.maximum(totals, 1e-300)[:, None])[totals > 0]
    levels = [num_ranks]
    if 1 < num_nodes < num_ranks:
      levels.append(num_nodes)
    slot = np.arange(copies.size)
    self._parts = {n: slot * n // slot.size for n in levels}
    self._rank = self._parts[num_ranks]
    self._prices = np.zeros((copies.size, num_ranks))  # of each copy there
    size = self._weights @ self._shares
    if old is None:
      first = _from_nodes(size, num_ranks, num_nodes)
    else:
      first = _from_old(size, copies, old, num_ranks)
      had = np.zeros((number.size, num_ranks), bool)
      had[old, self._rank] = True
      self._prices[~had[copies]] = move_cost
    self._search(first)
    self.experts = copies[self._best]

  def _search(self, first):
    """Improves the first order, then others near the best."""
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

  def _loads(self, order):
    """Yields, for each level, the loads [S, n] over the mean, and n."""
    for n in self._parts:
      loads = self._shares[:, order].reshape(len(self._shares), n, -1)
      yield n, loads.sum(2) * n

  def _cost(self, order):
    """Returns what is minimized."""
    most = sum(self._weights @ y.max(1) for _, y in self._loads(order))
    return most + self._prices[order, self._rank].sum()

  def _bound(self):
    """Returns what no order is below: the largest copy is in some part."""
    sizes = np.sort(self._shares)
    count = sizes.shape[1]
    least = (
      n * (sizes[:, -1] + sizes[:, : count // n - 1].sum(1))
      for n in self._parts
    )
    return sum(self._weights @ np.maximum(1, each) for each in least)

  def _improve(self, order, power):
    """Swaps copies as long as a swap makes the norm and prices smaller."""
    norm, loads = self._norm(order, power), [*self._loads(order)]
    is_better = True
    while is_better:
      is_better = False
      for i in range(order.size):
        if not self._is_busy(loads, i):
          continue
        norms = self._norms_after_swaps(order, loads, i, power)
        j = norms.argmin()
        if norms[j] < norm * (1 - 1e-9):
          order[[i, j]] = order[[j, i]]
          if (after := self._norm(order, power)) < norm:
            norm, is_better = after, True
            loads = [*self._loads(order)]
          else:
            order[[i, j]] = order[[j, i]]

  def _norm(self, order, power):
    norm = self._prices[order, self._rank].sum()
    for _, y in self._loads(order):
      most = y.max(1)
      powers = (y / most[:, None]) ** power
      norm += self._weights @ (most * powers.sum(1) ** (1 / power))
    return norm

  def _is_busy(self, loads, i):
    """Returns whether a part that has the copy i is above the mean."""
    return any(
      (y[:, self._parts[n][i]] > 1 + _TOLERANCE).any() for n, y in loads
    )

  def _norms_after_swaps(self, order, loads, i, power):
    """Returns the norm [V], with prices, after a swap of i with each."""
    own, here = order[i], self._rank[i]
    price = self._prices[order, self._rank]
    norms = price.sum() - price - price[i]
    norms += self._prices[order, here] + self._prices[own, self._rank]
    placed = self._shares[:, order]
    for n, y in loads:
      part = self._parts[n]
      a = part[i]
      most = y.max(1, keepdims=True)
      more = (placed - placed[:, [i]]) * n / most
      y = y / most
      powers = y**power
      total = powers.sum(1, keepdims=True)
      with np.errstate(over="ignore"):  # such a swap is not made
        changed = (y[:, [a]] + more).clip(0) ** power
        changed += (y[:, part] - more).clip(0) ** power
      changed += (total - powers[:, [a]] - powers[:, part]).clip(0)
      after = np.where(part == a, total, changed)
      norms += self._weights @ (most * after ** (1 / power))
    return norms


def _from_nodes(size, num_ranks, num_nodes):
  """Returns the greedy order: nodes, then the ranks of each."""
  nodes = _spread(size, np.arange(size.size), num_nodes)
  ranks = [_spread(size, node, num_ranks // num_nodes) for node in nodes]
  return np.concatenate(ranks).ravel()


def _from_old(size, copies, old, num_ranks):
  """Returns an order in which a copy is where its expert has been.

  Copies that are new go where the load is least, the largest first.
  """
  order = np.full(old.size, -1)
  kept, at = _common(copies, old)
  order[at] = kept
  new = np.setdiff1d(np.arange(old.size), kept)
  for copy in new[(-size[new]).argsort(kind="stable")]:
    loads = np.where(order < 0, 0, size[order]).reshape(num_ranks, -1).sum(1)
    there = loads.repeat(old.size // num_ranks)
    order[np.where(order < 0, there, np.inf).argmin()] = copy
  return order


def _settled(experts, old, num_ranks):
  """Returns the slots with those that stay on a rank in their old slots."""
  slot = np.arange(old.size)
  first = slot * num_ranks // old.size * (old.max() + 1)  # a key of each rank
  stays, at = _common(first + experts, first + old)
  settled = np.full(old.size, -1)
  settled[at] = experts[stays]
  settled[settled < 0] = experts[np.setdiff1d(slot, stays)]
  return settled


def _common(a, b):
  """Returns where a has the k-th of a number, and where b has it."""
  orders = [x.argsort(kind="stable") for x in (a, b)]
  a_keys, b_keys = (
    x * x.size + np.arange(x.size) - x.searchsorted(x)
    for x in (a[orders[0]], b[orders[1]])
  )
  _, in_a, in_b = np.intersect1d(a_keys, b_keys, return_indices=True)
  return orders[0][in_a], orders[1][in_b]


def _spread(size, copies, num_parts):
  """Returns [n, len(copies) / n]: the largest goes where least is, and room."""
  room = len(copies) // num_parts
  parts: list[list[int]] = [[] for _ in range(num_parts)]
  least = [(0.0, part) for part in range(num_parts)]
  for copy in copies[(-size[copies]).argsort(kind="stable")]:
    load, part = heapq.heappop(least)
    parts[part].append(copy)
    if len(parts[part]) < room:
      heapq.heappush(least, (load + size[copy], part))
  return np.array(parts)
