# SPDX-License-Identifier: Apache-2.0
"""place: finds where experts should be for their loads.

The busiest rank decides how long experts compute, and the busiest node how long
the network between nodes is in use. Both are measured in parts of their mean,
and their sum is minimized. First the copy with most load goes to the node with
least, and so it does within each node; then copies are swapped.
"""

from __future__ import annotations

import heapq
import math

import jax
import numpy as np

from ep._src.base import arguments
from ep._src.moe.placement import Placement
from ep._src.planning.cluster import Cluster

_POWER = 24  # of the norm that stands for a maximum while copies are swapped
_TOLERANCE = 2e-3  # a part of the mean that is not worth a swap
_SEED = 0
_KICKS, _KICK_WORK = 100, 10**6


def place(
  loads: np.ndarray | jax.Array,
  cluster: Cluster,
  *,
  ep_size: int | None = None,
  replicas: int = 0,
) -> Placement:
  """Finds a placement that balances the loads of ranks and nodes.

      loads = np.stack([m.load for m in metrics_of_steps])
      placement = ep.place(loads, ep.Cluster.named("dgx_h100", num_nodes=4))

  It minimizes the mean over steps of the busiest rank's load over the mean
  rank's; to this the same of nodes is added where an EP domain has several with
  several ranks each. Each rank has as many slots. The search begins with nodes,
  goes on within each, and then swaps. In small cases the sum is within 5% of
  the least. It is the same on all processes, since it draws with a fixed seed.

  Copies go one by one to the expert whose copies have most load, as in
  DeepSeek's EPLB; an expert's load is split evenly between its copies.

  Args:
    loads: [E], of each expert, or [S, E] of several steps, such as
      `ep.moe.Metrics.load`. Only ratios count.
    cluster: which consecutive ranks are a node.
    ep_size: P; by default the largest that divides the slots and the ranks, and
      is a multiple or a divisor of the GPUs of a node.
    replicas: copies of experts besides one of each; P must divide E + replicas.

  Returns:
    A `Placement` of V = E + replicas slots.

  Raises:
    ValueError: a size does not fit, or a load is negative or not finite.
    TypeError: an argument has another type.
  """
  if not isinstance(cluster, Cluster):
    raise TypeError(
      f"ep.place: cluster is a {type(cluster).__name__}, but an ep.Cluster is"
      " expected."
    )
  loads = checked_loads("ep.place", loads)
  P, N = domain("ep.place", cluster, loads.shape[1], replicas, ep_size)
  copies, shares = _copies(loads, replicas)
  return Placement(copies[_Search(shares, P, N).best])


def _linear(
  loads: np.ndarray | jax.Array,
  cluster: Cluster,
  *,
  ep_size: int | None = None,
  replicas: int = 0,
) -> Placement:
  """Returns the same copies as `place`, in the order of the experts."""
  del cluster, ep_size
  return Placement(_copies(np.atleast_2d(loads), replicas)[0])


# The placements that `plan` knows by name.
NAMED = {"linear": _linear, "balanced": place}


def checked_loads(
  what: str, loads: np.ndarray | jax.Array, num_experts: int | None = None
) -> np.ndarray:
  """Returns loads as float64 [S, E]; those of a plan are of one step."""
  try:
    loads = np.asarray(loads, float)
  except (TypeError, ValueError) as e:
    raise ValueError(f"{what}: numbers are expected as loads: {e}.") from None
  fits = loads.ndim in (1, 2) and loads.size > 0
  expected = "[E] of the experts, or [S, E] of steps"
  if num_experts is not None:
    fits = loads.shape == (num_experts,)
    expected = f"[{num_experts}] of the experts"
  arguments.check(
    fits and loads.min() >= 0 and 0 < loads.sum() < np.inf,
    what,
    f"loads have shape {loads.shape}, but {expected}, all finite, none negative"
    " and not all zero, are expected.",
  )
  return np.atleast_2d(loads)


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


def _copies(loads, replicas):
  """Returns the expert [V] and the load [S, V] of each copy, by expert."""
  total = loads.sum(0)
  number = np.ones(total.size, int)
  most = [(-load, e) for e, load in enumerate(total.tolist())]
  heapq.heapify(most)
  for _ in range(replicas):
    _, e = most[0]
    number[e] += 1
    heapq.heapreplace(most, (-float(total[e]) / number[e], e))
  copies = np.arange(total.size).repeat(number)
  return copies, (loads / number)[:, copies]


class _Search:
  """Searches an order of copies, whose consecutive parts are ranks and nodes.

  A swap is judged by a norm of the parts' loads, which, unlike their maximum,
  also falls when one of two busiest parts becomes smaller. The best order is
  that of the least maximum.

  Args:
    shares: [S, V], the load of each copy.
    num_ranks, num_nodes: parts.
  """

  def __init__(self, shares: np.ndarray, num_ranks: int, num_nodes: int):
    totals = shares.sum(1)
    self._weights = totals[totals > 0] / totals.sum()
    self._shares = (shares / np.maximum(totals, 1e-300)[:, None])[totals > 0]
    levels = [num_ranks]
    if 1 < num_nodes < num_ranks:
      levels.append(num_nodes)
    copy = np.arange(shares.shape[1])
    self._parts = {n: copy * n // copy.size for n in levels}
    self.best = self._first(num_ranks, num_nodes)
    self._improve(self.best)
    least, enough = self._most(self.best), self._bound() * (1 + _TOLERANCE)
    rng = np.random.default_rng(_SEED)
    for _ in range(min(_KICKS, _KICK_WORK // (len(shares) * copy.size**2))):
      if least <= enough:
        break
      order = self.best.copy()
      for _ in range(3):
        i, j = rng.integers(order.size, size=2)
        order[[i, j]] = order[[j, i]]
      self._improve(order)
      if self._most(order) < least:
        self.best, least = order, self._most(order)

  def _first(self, num_ranks, num_nodes):
    """Returns the greedy order: nodes, then the ranks of each."""
    size = self._weights @ self._shares
    nodes = _spread(size, np.arange(size.size), num_nodes)
    ranks = [_spread(size, node, num_ranks // num_nodes) for node in nodes]
    return np.concatenate(ranks).ravel()

  def _loads(self, order):
    """Yields, for each level, the loads [S, n] over the mean, and n."""
    for n in self._parts:
      loads = self._shares[:, order].reshape(len(self._shares), n, -1)
      yield n, loads.sum(2) * n

  def _most(self, order):
    """Returns what is minimized."""
    return sum(self._weights @ y.max(1) for _, y in self._loads(order))

  def _bound(self):
    """Returns what no order is below: the largest copy is in some part."""
    sizes = np.sort(self._shares)
    count = sizes.shape[1]
    least = (
      n * (sizes[:, -1] + sizes[:, : count // n - 1].sum(1))
      for n in self._parts
    )
    return sum(self._weights @ np.maximum(1, each) for each in least)

  def _improve(self, order):
    """Swaps copies as long as a swap makes the norm smaller."""
    norm, loads = self._norm(order), [*self._loads(order)]
    is_better = True
    while is_better:
      is_better = False
      for i in range(order.size):
        if not self._is_busy(loads, i):
          continue
        norms = self._norms_after_swaps(order, loads, i)
        j = norms.argmin()
        if norms[j] < norm * (1 - 1e-9):
          order[[i, j]] = order[[j, i]]
          if (after := self._norm(order)) < norm:
            norm, is_better = after, True
            loads = [*self._loads(order)]
          else:
            order[[i, j]] = order[[j, i]]

  def _norm(self, order):
    return sum(
      self._weights @ (y**_POWER).sum(1) ** (1 / _POWER)
      for _, y in self._loads(order)
    )

  def _is_busy(self, loads, i):
    """Returns whether a part that has the copy i is above the mean."""
    return any(
      (y[:, self._parts[n][i]] > 1 + _TOLERANCE).any() for n, y in loads
    )

  def _norms_after_swaps(self, order, loads, i):
    """Returns the norm [V] after a swap of i with each."""
    norms = np.zeros(order.size)
    placed = self._shares[:, order]
    for n, y in loads:
      part = self._parts[n]
      a = part[i]
      more = (placed - placed[:, [i]]) * n
      powers = y**_POWER
      total = powers.sum(1, keepdims=True)
      changed = (y[:, [a]] + more).clip(0) ** _POWER
      changed += (y[:, part] - more).clip(0) ** _POWER
      changed += (total - powers[:, [a]] - powers[:, part]).clip(0)
      after = np.where(part == a, total, changed)
      norms += self._weights @ after ** (1 / _POWER)
    return norms


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
