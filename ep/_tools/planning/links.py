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

import numpy as np

from ep._tools.planning.cluster import Cluster
from ep._tools.planning.demand import Demand

LINKS = ("local", "nvlink", "network")

# The parts of the vendors' rates, and the latency in microseconds that a
# transport has: tests/planning/published_test.py fits them.
NVLINK_PART, NETWORK_PART = 0.8, 0.875
LATENCIES_US = {"hierarchical": 73.0, "direct": 17.0}

# The traffic of a dispatch is an array [2, 3, R], of what each rank sends and
# receives over each of LINKS. That of a combine has both in the other order.


def hierarchical(demand: Demand) -> np.ndarray:
  """Returns rows that go once to a node, and there once to a rank."""
  D, P, N = demand.nodes.shape
  G = P // N
  # A token of GPU g enters a node at its GPU g: [domain, node, g, to node, to].
  fans_out = demand.ranks.reshape(D, N, G, N, G)
  local = np.einsum("dngmg->dmg", fans_out)
  crosses = demand.nodes.reshape(D, N, G, N) * (1 - np.eye(N))[:, None]
  sent = (
    local,
    np.einsum("dngmh->dmg", fans_out) - local,
    crosses.sum(3),
  )
  received = (
    local,
    np.einsum("dngmh->dmh", fans_out) - local,
    np.einsum("dngm->dmg", crosses),
  )
  return _of_all_domains(demand, sent, received)


def direct(demand: Demand) -> np.ndarray:
  """Returns a row for each choice, on its own way."""
  D, P, N = demand.nodes.shape
  goes = demand.choices.reshape(D, N, P // N, N, P // N)
  in_node = np.einsum("dngnh->dngh", goes)
  local = np.einsum("dngg->dng", in_node)
  sent = (
    local,
    in_node.sum(3) - local,
    np.einsum("dngmh->dng", goes) - in_node.sum(3),
  )
  received = (
    local,
    in_node.sum(2) - local,
    np.einsum("dngmh->dmh", goes) - in_node.sum(2),
  )
  return _of_all_domains(demand, sent, received)


TRANSPORTS = {"hierarchical": hierarchical, "direct": direct}


def seconds(traffic: np.ndarray, cluster: Cluster, latency_us: float) -> float:
  """Returns the time of an exchange of bytes."""
  _, nvlink, network = traffic.max(axis=(0, 2)) / 1e9
  slowest = max(
    nvlink / (cluster.nvlink_gb_s * NVLINK_PART),
    network / (cluster.network_gb_s * NETWORK_PART),
  )
  return latency_us / 1e6 + float(slowest)


def _of_all_domains(demand, *ways):
  """Returns [2, 3, R] of [D, N, G]; if D is 1, all domains are alike."""
  D = len(demand.nodes)
  rows = np.array(ways, float).reshape(2, len(LINKS), -1)
  return np.tile(rows, demand.num_domains // D)
