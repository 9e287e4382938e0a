# SPDX-License-Identifier: Apache-2.0
"""Describes a cluster: its nodes, link rates, memory and compute rate."""

from __future__ import annotations

import dataclasses
import math
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
    num_nodes: nodes, each a set of GPUs that NVLink or a similar link connects,
      or a slice of TPUs. Then a "GPU" is a JAX device, and "NVLink" is ICI.
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
      name: "dgx_h100", "h800", "dgx_b200", "gb200_nvl72", "mi300x", "mi355x",
        "v5e", "v5p", "v6e" or "tpu7x".
      num_nodes: number of nodes.
      gpus_per_node: GPUs used in each node; None for all. For TPUs, devices of
        a slice, which determine the rate of a device: the rows of an even
        exchange share the links across the middle of the slice. None is the
        smallest torus: a pod of v5e and v6e, 64 chips of v5p and tpu7x.

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
    if gpus_per_node is not None:
      node = dataclasses.replace(node, gpus_per_node=gpus_per_node)
      if name in _ICI:
        rate = _slice_gb_s(name, gpus_per_node)
        node = dataclasses.replace(node, nvlink_gb_s=rate)
    return node


# For each TPU: the dimensions of a slice, the GB/s of an ICI link in each
# direction, and the devices of a chip. A chip has two links in each dimension,
# and Google states the sum of both directions of all its links.
_ICI = types.MappingProxyType(
  {
    "v5e": (2, 50, 1),
    "v5p": (3, 100, 1),
    "v6e": (2, 100, 1),
    "tpu7x": (3, 100, 2),
  }
)


def _slice_gb_s(name: str, devices: int) -> float:
  """Returns the rate of a device if all devices of a slice exchange evenly.

  Half of the rows cross the middle of the slice's longest side. With n chips in
  a row, n / 2 chips on each side share one link, or two in a torus. The sides
  of a slice are powers of two, which differ by a factor of two at most.
  """
  dimensions, link_gb_s, devices_per_chip = _ICI[name]
  chips = devices / devices_per_chip
  side = 2.0 ** math.ceil(math.log2(max(chips, 1)) / dimensions)
  links = 2 if devices >= NODES[name].gpus_per_node else 1
  return 4 * links * link_gb_s / side / devices_per_chip


# One node of each machine. Vendors state the sum of both NVLink directions, so
# each rate here is half the vendor's. docs/planner.md links the sources.
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
    # Google's page of each TPU, per chip. v5e: 197 TFLOPS, 16 GB (819 GB/s),
    # 400 GB/s of ICI, and 6.4 Tb/s of network for the 256 chips of a pod.
    "v5e": Cluster(1, 256, 25, 3.1, 16, 197),
    # 459 TFLOPS, 95 GiB (2765 GB/s), 1200 GB/s of ICI, 50 Gb/s of network.
    "v5p": Cluster(1, 64, 200, 6.25, 95, 459),
    # 918 TFLOPS, 32 GB (1638 GB/s), 800 GB/s of ICI, 100 Gb/s of network.
    "v6e": Cluster(1, 256, 50, 12.5, 32, 918),
    # 2307 TFLOPS, 192 GiB (7380 GB/s), 1200 GB/s of ICI, 100 Gb/s of network. A
    # chip has two devices, so a device has half of each.
    "tpu7x": Cluster(1, 128, 100, 6.25, 96, 1153.5),
  }
)
