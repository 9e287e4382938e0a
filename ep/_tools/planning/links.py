# SPDX-License-Identifier: Apache-2.0
"""Computes an exchange's time, and the rows that each kind of link transfers.

"local" rows stay on their GPU, "nvlink" rows stay in their node, and "network"
rows go to another node. Two transports differ in the path of a token:

* "hierarchical": the path of the high-throughput kernels of NCCL EP
  (dispatch_N2N_warp in its ht_ep.cuh), DeepEP, HybridEP and MORI. The source
  sends a token once to each other node that has an expert of the token. There
  the token arrives at the GPU with the source's index in the node, which sends
  it once to each rank of the node with such an expert. A combine uses the path
  backward: it sums the rows of a token on each rank, then in each node.
* "direct": the path of low-latency kernels of these libraries. The source sends
  a row for each choice to the rank of the expert.

The time is a model, which docs/planner.md compares with published figures: a
GPU uses all its links in parallel at a fixed fraction of their rate, and the
slowest rank determines the time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ep._tools.planning.cluster import Cluster
from ep._tools.planning.demand import Demand

LINKS = ("local", "nvlink", "network")

# Fractions of the vendors' rates that exchanges achieve, and the latencies of
# transports, which tests/planning/published_test.py fits to published figures.
NVLINK_FRACTION, NETWORK_FRACTION = 0.8, 0.875
LATENCIES_US = {"hierarchical": 73.0, "direct": 17.0}

# The traffic of a dispatch is an array [2, 3, R]: the rows that each rank sends
# and receives over each of LINKS. A combine swaps the two directions.


def hierarchical(demand: Demand) -> np.ndarray:
  """Returns the traffic of tokens sent once per node, then once per rank."""
  D, P, N = demand.nodes.shape
  G = P // N
  # GPU g of a node sends tokens to GPU g of other nodes. The axes are
  # [domain, source node, g, destination node, destination GPU].
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
  """Returns the traffic if the source sends a row for each choice."""
  D, P, N = demand.nodes.shape
  choices = demand.choices.reshape(D, N, P // N, N, P // N)
  in_node = np.einsum("dngnh->dngh", choices)
  local = np.einsum("dngg->dng", in_node)
  sent = (
    local,
    in_node.sum(3) - local,
    np.einsum("dngmh->dng", choices) - in_node.sum(3),
  )
  received = (
    local,
    in_node.sum(2) - local,
    np.einsum("dngmh->dmh", choices) - in_node.sum(2),
  )
  return _of_all_domains(demand, sent, received)


TRANSPORTS = {"hierarchical": hierarchical, "direct": direct}


def seconds(traffic: np.ndarray, cluster: Cluster, latency_us: float) -> float:
  """Returns the seconds of an exchange, from its traffic in bytes."""
  _, nvlink, network = traffic.max(axis=(0, 2)) / 1e9
  slowest = max(
    nvlink / (cluster.nvlink_gb_s * NVLINK_FRACTION),
    network / (cluster.network_gb_s * NETWORK_FRACTION),
  )
  return latency_us / 1e6 + float(slowest)


def _of_all_domains(
  demand: Demand, sent: Sequence[np.ndarray], received: Sequence[np.ndarray]
) -> np.ndarray:
  """Returns the traffic of all domains, from arrays [D, N, G] of each link."""
  D = len(demand.nodes)
  rows = np.array([sent, received], float).reshape(2, len(LINKS), -1)
  return np.tile(rows, demand.num_domains // D)
