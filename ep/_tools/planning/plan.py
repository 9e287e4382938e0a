# SPDX-License-Identifier: Apache-2.0
"""Predicts the cost of a layer's exchanges on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import itertools
import math
import os
import pathlib
from typing import Any, Literal

import jax
import numpy as np

from ep._src.base import arguments, config
from ep._src.moe.config import MoEConfig
from ep._src.moe.placement import Placement
from ep._tools.planning import links, picture
from ep._tools.planning.cluster import Cluster
from ep._tools.planning.demand import Counted, Expected, Layout
from ep._tools.planning.forecast import Forecast, Forecaster
from ep._tools.planning.place import (
  checked_loads,
  checked_slots,
  default_ep_size,
  domain,
  NAMED,
  with_empty_slots,
)
from ep._tools.records import expert_loads
from ep._tools.records.replay import Replay, replay

Ids = np.ndarray | jax.Array
Routing = str | os.PathLike[str] | Replay | Ids | Sequence[Ids]


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
  """A comparison of forecasts, made by `plan`. Prints as a table.

  Attributes:
    cluster: the cluster.
    routing: the name of the routing.
    tokens_per_rank: T.
    forecasts: one for each choice of sizes.
  """

  cluster: Cluster
  routing: str
  tokens_per_rank: int
  forecasts: tuple[Forecast, ...]

  def __repr__(self) -> str:
    def most(forecast: Forecast, link: str) -> str:
      """Returns the GB that the busiest rank sends or receives in all ops."""
      ways = (forecast.sent, forecast.received)
      sums: list[Any] = [sum(x[link] for x in way.values()) for way in ways]
      return f"{np.max(sums) / 1e9:.2f}"

    head = (
      "EP replicas placement capacity recv_GB of_memory rows dropped NVLink_GB"
    )
    lines = [(*head.split(), "network_GB", "exchange_ms", "share")]
    for f in self.forecasts:
      size = f.receive_bytes / 1e9
      memory = f"{size:.2f}", f"{size / self.cluster.memory_gb:.0%}"
      moved = most(f, "nvlink"), most(f, "network")
      times = f"{f.exchange_s * 1e3:.2f}", f"{f.share:.0%}"
      sizes = map(str, (f.ep_size, f.replicas, f.placement, f.capacity))
      rows = f"{f.rows.max():.0f}", f"{f.dropped:.2%}"
      lines.append((*sizes, *memory, *rows, *moved, *times))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    title = (
      f"{self.cluster.num_ranks} ranks with {self.tokens_per_rank} tokens each,"
      f" routing {self.routing}; one layer, the rank with most:"
    )
    cells = (zip(line, widths, strict=True) for line in lines)
    return "\n".join(
      [title, *(" ".join(f"{c:>{w}}" for c, w in row) for row in cells)]
    )

  def picture(self, path: str | os.PathLike[str]) -> None:
    """Writes an SVG with the time of each op of each forecast."""
    bars = {f.label: f.seconds for f in self.forecasts}
    pathlib.Path(path).write_text(picture.bars(bars))


def plan(
  cfg: MoEConfig,
  cluster: Cluster,
  routing: Routing = "uniform",
  *,
  tokens_per_rank: int | None = None,
  ep_sizes: Sequence[int] | None = None,
  placements: Sequence[str | Placement] = ("linear",),
  replicas: Sequence[int] = (0,),
  capacity_factors: Sequence[float | None] | None = None,
  alignment: int = 1,
  dtype: str = "bfloat16",
  transport: Literal["hierarchical", "direct"] = "hierarchical",
  compute_s: float | None = None,
) -> Plan:
  """Predicts the bytes, rows, drops and times of a layer's exchanges.

      cluster = ep.Cluster.named("dgx_h100", num_nodes=32)
      print(ep.plan(
        ep.presets.DEEPSEEK_V3, cluster, "zipf:0.5", tokens_per_rank=4096,
        ep_sizes=[64, 256], replicas=[0, 256], placements=["balanced"],
      ))

  The plan has a forecast for each combination of the sequences. For given ids,
  bytes and rows are exact; for a distribution they are means. Times are a
  model. The function counts in NumPy, on this process alone, without devices.

  Args:
    cfg: the layer. Its sizes, groups, capacity_factor and drop_by count.
    cluster: the cluster, with a rank on each GPU. An EP domain is P consecutive
      ranks.
    routing: the choices of tokens, in one of five forms: "uniform"; "zipf:A"
      (the n-th largest load is proportional to n^-A, for A >= 0; a fixed seed
      shuffles the experts); loads [E]; expert ids of a step, int [R * T, K] in
      the order of the global view, or a list of such arrays; a folder of
      `ep.record` or its `ep.replay` (all complete steps of the layer `cfg.name`
      count).
    tokens_per_rank: T; ignored for expert ids.
    ep_sizes: values of P, each a divisor of the ranks, and a multiple or a
      divisor of the GPUs of a node. By default the largest such P that also
      divides the experts.
    placements: "linear", in the order of the experts; "balanced", by `place`
      for the routing's loads; or an `ep.Placement` of E + replicas slots.
    replicas: extra copies of experts; P must divide E + replicas, unless there
      are no replicas. The tokens of an expert alternate between its copies.
    capacity_factors: by default the factor of `cfg`; None fits any routing.
    alignment: each expert's segment of rows is padded to a multiple of this.
    dtype: dtype of all rows: "bfloat16", "float16" or "float32".
    transport: "hierarchical", as in high-throughput kernels: a token is sent
      once to each node of its experts, and there once to each of their ranks.
      "direct", as in low-latency kernels: a row is sent for each choice.
    compute_s: seconds of the rest of the layer in a step, forward and backward.
      None computes the time of the experts' products at the cluster's peak
      rate, a lower bound.

  Returns:
    A `Plan`. Its forecasts have the order of the arguments; the last argument
    varies fastest.

  Raises:
    ValueError: a size, a shape or an id does not fit.
    TypeError: an argument has another type.
  """
  for name, value, expected in (
    ("cfg", cfg, MoEConfig),
    ("cluster", cluster, Cluster),
  ):
    if not isinstance(value, expected):
      kind = f"an ep.{expected.__name__}"
      raise arguments.wrong_type("ep.plan", name, value, kind)
  if ep_sizes is None:
    ep_sizes = [default_ep_size(cluster, cfg.num_experts)]
  if capacity_factors is None:
    capacity_factors = [cfg.capacity_factor]
  sequences = dict(
    ep_sizes=ep_sizes,
    placements=placements,
    replicas=replicas,
    capacity_factors=capacity_factors,
  )
  for name, sequence in sequences.items():
    if not isinstance(sequence, list | tuple):
      raise TypeError(
        f"ep.plan: {name} is a {type(sequence).__name__}, but a list is"
        " expected; put a single value in brackets."
      )
    arguments.check(
      len(sequence) > 0, "ep.plan", f"{name} is empty; give a value or more."
    )
  capacity_factors = [
    f if f is None else arguments.capacity_factor("ep.plan", f)
    for f in capacity_factors
  ]
  if compute_s is not None:
    compute_s = arguments.number("ep.plan", "compute_s", compute_s)
    arguments.check(
      compute_s > 0,
      "ep.plan",
      f"compute_s = {compute_s:g}, but it must be positive.",
    )
  arguments.check(
    transport in tuple(links.TRANSPORTS),
    "ep.plan",
    f"transport = {transport!r}, but it must be one of"
    f" {tuple(links.TRANSPORTS)}.",
  )
  source = _source(cfg, cluster.num_ranks, routing, tokens_per_rank)
  forecaster = Forecaster(
    cfg=cfg,
    cluster=cluster,
    tokens_per_rank=source.tokens_per_rank,
    alignment=arguments.alignment("ep.plan", alignment),
    dtype=config.token_dtype("ep.plan", "dtype", dtype),
    transport=transport,
    compute_s=compute_s,
  )
  forecasts: list[Forecast] = []
  choices = itertools.product(ep_sizes, replicas, placements)
  for ep_size, extra, where in choices:
    layout = _layout(cluster, source.loads, ep_size, extra, where)
    forecasts += forecaster.forecasts(
      layout,
      list(source.demands(layout)),
      capacity_factors,
      replicas=extra,
      placement=where if isinstance(where, str) else "given",
    )
  return Plan(cluster, source.name, source.tokens_per_rank, tuple(forecasts))


def _source(
  cfg: MoEConfig, num_ranks: int, routing: Any, tokens_per_rank: int | None
) -> Counted | Expected:
  """Returns the demand of a routing: counted for ids, expected for loads."""
  E, name = cfg.num_experts, "given"
  if isinstance(routing, str):
    exponent = _exponent(routing)
    if exponent is not None:
      place = np.random.default_rng(0).permutation(E) + 1.0
      return _expected(cfg, routing, place**-exponent, tokens_per_rank)
    arguments.check(
      os.path.isdir(routing),
      "ep.plan",
      f'routing = {routing!r} is neither "uniform" nor "zipf:A" nor a folder of'
      " ep.record.",
    )
  if isinstance(routing, str | os.PathLike):
    routing = replay(routing)
  if isinstance(routing, Replay):
    name = f'of the record, layer "{cfg.name}"'
    routing = list(routing.routings(cfg.name))
  elif not isinstance(routing, list | tuple):
    if np.ndim(routing) == 1:
      return _expected(cfg, "of given loads", routing, tokens_per_rank)
    routing = [routing]
  arguments.check(
    len(routing) > 0, "ep.plan", "there is no step; give one that is complete."
  )
  steps = []
  for number, ids in enumerate(map(np.asarray, routing)):
    expert_loads.choices(f"ep.plan: step {number}", ids, E, num_ranks)
    arguments.check(
      ids.size > 0 and ids.shape[-1] == cfg.top_k,
      f"ep.plan: step {number}",
      f"topk_idx has shape {ids.shape}, but a token or more with top_k ="
      f" {cfg.top_k} choices are expected.",
    )
    steps.append(ids.reshape(-1, ids.shape[-1]).astype(np.int64))
  return Counted(name, steps, E, num_ranks)


def _exponent(routing: str) -> float | None:
  """Returns A of zipf:A, 0 for uniform, or None for a folder's name."""
  name, _, number = routing.lower().partition(":")
  if routing.lower() == "uniform":
    return 0.0
  if name != "zipf":
    return None
  try:
    exponent = float(number)
  except ValueError:
    exponent = math.nan
  arguments.check(
    0 <= exponent < math.inf,
    "ep.plan",
    f'routing = {routing!r}, but "zipf:A" has a finite number A >= 0, such as'
    ' "zipf:0.5"; pass a folder of that name as a pathlib.Path.',
  )
  return exponent


def _expected(
  cfg: MoEConfig, name: str, loads: Ids, tokens_per_rank: int | None
) -> Expected:
  loads = checked_loads("ep.plan", loads, cfg.num_experts)
  arguments.check(
    tokens_per_rank is not None,
    "ep.plan",
    "tokens_per_rank is None, but a distribution has no number of tokens; pass"
    " how many a rank has in a step.",
  )
  count = arguments.integer("ep.plan", "tokens_per_rank", tokens_per_rank)
  arguments.check(
    count > 0, "ep.plan", f"tokens_per_rank = {count}, but it must be positive."
  )
  return Expected(name, cfg, loads, count)


def _layout(
  cluster: Cluster,
  loads: np.ndarray,
  ep_size: int,
  replicas: int,
  where: str | Placement,
) -> Layout:
  P, N, V = domain("ep.plan", cluster, loads.size, replicas, ep_size)
  loads = with_empty_slots(loads, V - replicas)
  if not isinstance(where, Placement):
    arguments.check(
      isinstance(where, str) and where in NAMED,
      "ep.plan",
      f"placement {where!r} is not known; name one of {', '.join(NAMED)}, or"
      " pass an ep.Placement.",
    )
    where = NAMED[where](loads, cluster, ep_size=P, replicas=replicas)
  experts = checked_slots("ep.plan", "a placement", where, (V,), loads.size)
  return Layout(cluster.num_ranks // P, P, N, experts)
