# SPDX-License-Identifier: Apache-2.0
"""Describes a GPU cluster: its nodes, link rates, memory and compute rate."""

from __future__ import annotations

import dataclasses
import types

from ep._src.base import arguments

_COUNTS = ("num_nodes", "gpus_per_node")
_RATES = ("nvlink_gb_s", "network_gb_s", "memory_gb", "tflops")


@dataclasses.dataclass(frozen=True)
class Cluster:
  """GPUs in nodes, and the rates of the links between them. Hashable.

      cluster = ep.Cluster.named("dgx_h100", num_nodes=32)
      cluster = ep.Cluster(
        num_nodes=4, gpus_per_node=8, nvlink_gb_s=450, network_gb_s=50,
        memory_gb=80, tflops=989,
      )

  Args:
    num_nodes: nodes, each a set of GPUs that NVLink or a similar link connects.
    gpus_per_node: GPUs of a node. Rank r is GPU `r % gpus_per_node` of node
      `r // gpus_per_node`.
    nvlink_gb_s: NVLink rate of a GPU in each direction, in 10^9 bytes per
      second. A GPU sends and receives at the same time.
    network_gb_s: network rate of a GPU in each direction, in the same unit.
    memory_gb: memory of a GPU, in 10^9 bytes.
    tflops: peak rate of a GPU for dense bfloat16 products, in 10^12 flops.
    latency_us: fixed time of an exchange, in microseconds; None takes the
      latency that published figures show.

  Raises:
    ValueError: a value is not positive, or the latency is negative.
    TypeError: a value is not a number.
  """

  num_nodes: int
  gpus_per_node: int
  nvlink_gb_s: float
  network_gb_s: float
  memory_gb: float
  tflops: float
  latency_us: float | None = None

  def __post_init__(self) -> None:
    for field in _COUNTS + _RATES:
      read = arguments.integer if field in _COUNTS else arguments.number
      value = read("ep.Cluster", field, getattr(self, field))
      arguments.check(
        value > 0,
        "ep.Cluster",
        f"{field} = {value:g}, but it must be positive.",
      )
    if self.latency_us is not None:
      value = arguments.number("ep.Cluster", "latency_us", self.latency_us)
      arguments.check(
        value >= 0,
        "ep.Cluster",
        f"latency_us = {value:g}, but it must not be negative.",
      )

  @property
  def num_ranks(self) -> int:
    """The number of ranks, R: one rank for each GPU."""
    return self.num_nodes * self.gpus_per_node

  @classmethod
  def named(
    cls, name: str, num_nodes: int, gpus_per_node: int | None = None
  ) -> Cluster:
    """Returns a cluster of a published machine.

    Args:
      name: "dgx_h100", "h800", "dgx_b200", "gb200_nvl72", "mi300x" or "mi355x".
      num_nodes: number of nodes.
      gpus_per_node: GPUs used in each node; None for all.

    Raises:
      ValueError: the machine is not known.
    """
    arguments.check(
      name in NODES,
      "ep.Cluster.named",
      f"{name!r} is not known; name one of {', '.join(NODES)}, or describe the"
      " machine with ep.Cluster(...).",
    )
    node = dataclasses.replace(NODES[name], num_nodes=num_nodes)
    if gpus_per_node is None:
      return node
    return dataclasses.replace(node, gpus_per_node=gpus_per_node)


# One node of each machine. Vendors state the NVLink rate of both directions
# together, so each rate here is half of it. docs/planner.md links the sources.
NODES = types.MappingProxyType(
  {
    # NVIDIA's user guide of the DGX H100: 8 GPUs with 900 GB/s of NVLink each,
    # and 8 ConnectX-7 with 400 Gb/s each. The H100 SXM's data sheet: 1,979
    # TFLOPS with sparsity.
    "dgx_h100": Cluster(1, 8, 450, 50, 80, 989),
    # DeepEP's legacy.md: H800, "~160 GB/s NVLink maximum bandwidth" and "~50
    # GB/s" of a ConnectX-7. The H800 has the H100's memory and tensor cores.
    "h800": Cluster(1, 8, 160, 50, 80, 989),
    # NVIDIA's user guide of the DGX B200: 8 GPUs with 180 GB each, 14.4 TB/s of
    # NVLink in all, and 8 ConnectX-7 with 400 Gb/s each. HGX's data sheet: 36
    # PFLOPS of 8 GPUs with sparsity.
    "dgx_b200": Cluster(1, 8, 900, 50, 180, 2250),
    # NVIDIA's page of the GB200 NVL72: 72 GPUs; in all 130 TB/s of NVLink, 13.4
    # TB of memory and 360 PFLOPS with sparsity. Each GPU has a ConnectX-7.
    "gb200_nvl72": Cluster(1, 72, 900, 50, 186, 2500),
    # AMD's page of the MI300X: 192 GB, and 7 links to the other GPUs of a node,
    # each with 128 GB/s in both directions together. MORI's README measures a
    # MI300X with ConnectX-7.
    "mi300x": Cluster(1, 8, 448, 50, 192, 1307),
    # AMD's page of the MI355X: 288 GB, and 7 links of 153 GB/s. MORI's README
    # measures a MI355X with a network card of 400 Gb/s.
    "mi355x": Cluster(1, 8, 537, 50, 288, 2500),
  }
)
