# SPDX-License-Identifier: Apache-2.0
"""Forecasts the cost of a layer's exchanges for one choice of sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
from typing import Any

import jax
import numpy as np

from ep._src.base.config import GroupConfig, LayerConfig
from ep._src.moe.config import MoEConfig
from ep._src.ops import drop_policy
from ep._tools.planning import links
from ep._tools.planning.cluster import Cluster
from ep._tools.planning.demand import Demand, Layout
from ep._tools.records import expert_loads

# For each op of a step, named as in ep.trace: whether it sends rows to experts,
# and whether it also sends routing weights or their gradients.
_OPS = {
  "ep_dispatch": (True, True),
  "ep_combine": (False, False),
  "ep_combine_bwd": (True, False),
  "ep_dispatch_bwd": (False, True),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Forecast:
  """The predicted cost of one choice of sizes. Made by `plan`.

  All arrays are numpy's. All counts and times are means over steps.

  Attributes:
    ep_size: P.
    replicas: extra copies of experts.
    placement: name of the placement, or "given".
    capacity_factor: as in `ep.MoEConfig`.
    capacity: C, rows that a rank can receive.
    receive_bytes: bytes of C rows and their weights.
    rows: float64 [R], rows that each rank receives, with padding and without
      dropped choices.
    bytes: float64 [R], bytes of `rows`, as `ep.trace` counts for each op.
    dropped: fraction of all choices that are dropped.
    sent, received: by op and kind of link ("local", "nvlink", "network"),
      float64 [R]: bytes that each rank sends or receives. Dropped
      choices are included.
    seconds: by op, time of the slowest rank.
    compute_s: time of the rest of the layer.
  """

  ep_size: int
  replicas: int
  placement: str
  capacity_factor: float | None
  capacity: int
  receive_bytes: int
  rows: np.ndarray
  bytes: np.ndarray
  dropped: float
  sent: Mapping[str, Mapping[str, np.ndarray]]
  received: Mapping[str, Mapping[str, np.ndarray]]
  seconds: Mapping[str, float]
  compute_s: float

  def __repr__(self) -> str:
    return (
      f"<ep.Forecast of {self.label}: {self.exchange_s * 1e3:.2f} ms,"
      f" {self.dropped:.2%} dropped>"
    )

  @property
  def label(self) -> str:
    """A name for the choice of sizes."""
    text = f"EP {self.ep_size}, {self.placement}"
    if self.replicas:
      text += f", {self.replicas} replicas"
    if self.capacity_factor is not None:
      text += f", capacity {self.capacity_factor:g}"
    return text

  @property
  def exchange_s(self) -> float:
    """Time of all four exchanges of a step."""
    return sum(self.seconds.values())

  @property
  def share(self) -> float:
    """Fraction of the layer's time in exchanges, if nothing overlaps."""
    return self.exchange_s / (self.exchange_s + self.compute_s)


@dataclasses.dataclass(frozen=True)
class Forecaster:
  """A maker of the forecasts of a plan. The fields are arguments of `plan`."""

  cfg: MoEConfig
  cluster: Cluster
  tokens_per_rank: int
  alignment: int
  dtype: np.dtype
  transport: str
  compute_s: float | None

  def forecasts(
    self,
    layout: Layout,
    demands: Sequence[Demand],
    capacity_factors: Sequence[float | None],
    **shown: Any,
  ) -> Iterator[Forecast]:
    """Yields a forecast of the steps for each capacity factor.

    Args:
      **shown: further fields of `Forecast`.
    """
    L = layout.experts.size // layout.ep_size
    tokens = np.concatenate([d.tokens for d in demands]).reshape(-1, L)
    exchanges = self._exchanges(layout, demands)
    for factor in capacity_factors:
      layer = self._layer(layout, factor)
      C, row_bytes = layer.capacity, self._row_bytes(layer)
      wanted = expert_loads.padded(tokens, layer.alignment).sum(1)
      rows = wanted.clip(max=C).reshape(-1, self.cluster.num_ranks)
      dropped = drop_policy.dropped(layer, tokens, C).sum()
      compute_s = self.compute_s
      if compute_s is None:
        compute_s = self._products_s(rows.max(1).mean())
      yield Forecast(
        ep_size=layout.ep_size,
        capacity_factor=factor,
        capacity=C,
        receive_bytes=C * (row_bytes + 4),
        rows=rows.mean(0),
        bytes=rows.mean(0) * row_bytes,
        dropped=float(dropped / max(tokens.sum(), 1)),
        compute_s=compute_s,
        **exchanges,
        **shown,
      )

  def _exchanges(
    self, layout: Layout, demands: Sequence[Demand]
  ) -> dict[str, Any]:
    """Returns the fields `sent`, `received` and `seconds` of a forecast."""
    row_bytes = self._row_bytes(self._layer(layout, None))
    weight_bytes, latency_us = 0, self.cluster.latency_us
    if self.transport == "hierarchical":  # prob_bytes in NCCL EP
      weight_bytes = 4 * layout.experts.size // layout.num_nodes
    if latency_us is None:
      latency_us = links.LATENCIES_US[self.transport]
    moved = np.array([links.TRANSPORTS[self.transport](d) for d in demands])
    sent, received, seconds = {}, {}, {}
    for op, (is_outward, is_weighted) in _OPS.items():
      factor = row_bytes + is_weighted * weight_bytes
      steps = moved[:, :: 1 if is_outward else -1] * factor
      times = [links.seconds(step, self.cluster, latency_us) for step in steps]
      seconds[op] = float(np.mean(times))
      ways = [dict(zip(links.LINKS, w, strict=True)) for w in steps.mean(0)]
      sent[op], received[op] = ways
    return dict(sent=sent, received=received, seconds=seconds)

  def _products_s(self, rows: float) -> float:
    """Returns the experts' forward and backward time at the peak rate."""
    cfg = self.cfg
    # Operations per row and inner dimension, forward and backward.
    flops = 6 * cfg.hidden * (3 if cfg.gated else 2)
    inner = rows * cfg.inner + self.tokens_per_rank * cfg.shared_inner
    return float(flops * inner / (self.cluster.tflops * 1e12))

  def _row_bytes(self, layer: LayerConfig) -> int:
    return self.cfg.hidden * layer.group.max_token_dtype.itemsize

  def _layer(
    self, layout: Layout, capacity_factor: float | None
  ) -> LayerConfig:
    """Returns the configuration of the layer, on an abstract mesh."""
    shape = layout.num_domains, layout.ep_size
    group = GroupConfig(
      name="plan",
      mesh=jax.sharding.AbstractMesh(shape, ("dp", "ep")),
      axis_name="ep",
      data_axes=("dp",),
      num_experts=layout.experts.size,
      max_tokens_per_rank=self.tokens_per_rank,
      hidden_dim=self.cfg.hidden,
      top_k=self.cfg.top_k,
      recv_capacity_per_rank=None,
      alignment=self.alignment,
      max_token_dtype=self.dtype,
      overflow="drop",
      drop_by=self.cfg.drop_by,
      backend="host",
      max_num_sms=0,
      timeout_s=1.0,
      exit_after_s=1.0,
    )
    return LayerConfig(
      group, capacity_factor=capacity_factor, name=self.cfg.name
    )
