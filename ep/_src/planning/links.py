# SPDX-License-Identifier: Apache-2.0
"""Counts the rows that an exchange moves over each kind of link, and its time.

There are three kinds: "local" rows stay on their GPU, "nvlink" rows stay in
their node, and "network" rows go to another one. Two transports differ in the
path of a token:

* "hierarchical" is what NCCL EP's high-throughput kernels do (dispatch_N2N_warp
  and what follows in its ht_ep.cuh), and DeepEP's, HybridEP's and MORI's. A
  token goes once to each other node of its experts, to the GPU that has its
  source's number there. That GPU sends it once to each rank of its experts in
  the node. A combine goes the same ways back: the rows of a token are summed on
  each rank, then in each node.
* "direct" is what their low-latency kernels do: a row for each choice goes from
  its source to its expert's rank.

The time is a model, which docs/planner.md compares with published figures: a
GPU uses all of its links at once, a part of their rate, and the rank that takes
longest is the time of all.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ep._src.planning.cluster import Cluster
from ep._src.planning.demand import Demand

# The parts of the vendors' rates, and the latency in microseconds that a
# transport has: tests/planning/published_test.py fits them.
NVLINK_PART, NETWORK_PART = 0.8, 0.875
LATENCIES_US = {"hierarchical": 73.0, "direct": 17.0}

LINKS = ("local", "nvlink", "network")


class Traffic(NamedTuple):
  """Rows, or bytes, [R] of each rank and link that a dispatch moves."""

  sent: dict[str, np.ndarray]
  received: dict[str, np.ndarray]

  @property
  def reverse(self) -> Traffic:
    """What a combine moves."""
    return Traffic(self.received, self.sent)

  def times(self, factor: float) -> Traffic:
    """Multiplies all rows by what a row has, or a step's part of a mean."""
    sent, received = (
      {link: rows * factor for link, rows in way.items()} for way in self
    )
    return Traffic(sent, received)

  def plus(self, other: Traffic) -> Traffic:
    """Adds the rows of another exchange."""
    sent, received = (
      {link: rows + more[link] for link, rows in way.items()}
      for way, more in zip(self, other, strict=True)
    )
    return Traffic(sent, received)


def hierarchical(demand: Demand) -> Traffic:
  """Counts rows that go once to a node, and there once to a rank."""
  D, P, N = demand.nodes.shape
  G = P // N
  # A token of GPU g enters a node at its GPU g: [domain, node, g, to node, to].
  fans_out = demand.ranks.reshape(D, N, G, N, G)
  local = np.einsum("dngmg->dmg", fans_out)
  crosses = demand.nodes.reshape(D, N, G, N) * (1 - np.eye(N))[:, None]
  return _traffic(
    demand,
    local=(local, local),
    nvlink=(
      np.einsum("dngmh->dmg", fans_out) - local,
      np.einsum("dngmh->dmh", fans_out) - local,
    ),
    network=(crosses.sum(3), np.einsum("dngm->dmg", crosses)),
  )


def direct(demand: Demand) -> Traffic:
  """Counts a row for each choice, on its own way."""
  D, P, N = demand.nodes.shape
  G = P // N
  goes = demand.choices.reshape(D, N, G, N, G)
  in_node = np.einsum("dngnh->dngh", goes)
  local = np.einsum("dngg->dng", in_node)
  return _traffic(
    demand,
    local=(local, local),
    nvlink=(in_node.sum(3) - local, in_node.sum(2) - local),
    network=(
      np.einsum("dngmh->dng", goes) - in_node.sum(3),
      np.einsum("dngmh->dmh", goes) - in_node.sum(2),
    ),
  )


TRANSPORTS = {"hierarchical": hierarchical, "direct": direct}


def seconds(traffic: Traffic, cluster: Cluster, latency_us: float) -> float:
  """Returns the time of an exchange of bytes."""
  rates = {
    "nvlink": cluster.nvlink_gb_s * NVLINK_PART,
    "network": cluster.network_gb_s * NETWORK_PART,
  }
  slowest = max(
    way[link].max() / rate for link, rate in rates.items() for way in traffic
  )
  return latency_us * 1e-6 + float(slowest) / 1e9


def _traffic(demand, **links):
  """Returns the traffic of [D, N, G] sent and received, for all domains."""
  times = demand.num_domains // len(demand.nodes)
  ways = [
    {link: np.tile(rows[way].ravel(), times) for link, rows in links.items()}
    for way in range(2)
  ]
  return Traffic(*ways)
