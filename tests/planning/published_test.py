# SPDX-License-Identifier: Apache-2.0
"""Compares the times of ep.plan with published figures.

The constants are fit to half of the figures. docs/planner.md names the sources,
and docs/published.csv lists each figure with its error.
"""

import functools
import itertools
import pathlib
from typing import NamedTuple

import numpy as np
import pytest

import ep
from ep._tools.planning import links
from ep._tools.planning.demand import Expected, Layout

_HIDDEN, _TOP_K = 7168, 8
# Bytes per row, and the ops that the sources measure.
_FP8, _BF16 = _HIDDEN + 4 * _HIDDEN // 128, 2 * _HIDDEN
_COMBINE = "combine", _BF16
_PAIR = ("dispatch", _FP8), _COMBINE
_V2 = ("dispatch", _FP8 + 96), _COMBINE  # Rows include ids and weights.
_MORI = ("dispatch", _HIDDEN), _COMBINE
_HYBRID = ("dispatch", _FP8), ("dispatch", _BF16), _COMBINE
_NCCL = ("dispatch", _BF16), _COMBINE

# The source (as in docs/planner.md), machine, tokens per rank, ops, transport,
# unit, and figures by (nodes, GPUs per node). MORI's README calls its other
# figures stale.
_SOURCES = [
  (
    "DeepEP V2", "dgx_h100", 8192, _V2, "hierarchical", "GB/s",
    {(2, 8): (90, 81), (4, 8): (61, 61)},
  ),
  (
    "DeepEP V2", "dgx_b200", 8192, _V2, "hierarchical", "GB/s",
    {(2, 8): (90, 91), (1, 8): (726, 740)},
  ),
  (
    "DeepEP V1", "h800", 4096, _PAIR, "hierarchical", "GB/s",
    {(1, 8): (153, 158), (2, 8): (43, 43), (4, 8): (58, 57), (8, 8): (51, 50)},
  ),
  (
    "DeepEP V1, low latency", "h800", 128, _PAIR, "direct", "us",
    {
      (1, 8): (77, 114), (2, 8): (118, 195), (4, 8): (155, 273),
      (8, 8): (173, 314), (16, 8): (192, 369), (32, 8): (194, 360),
    },
  ),
  (
    "HybridEP", "dgx_h100", 4096, _HYBRID, "hierarchical", "GB/s",
    {
      (2, 8): (68.48, 71.71, 62.95), (4, 8): (55.35, 57.69, 57.46),
      (8, 8): (46.52, 49.97, 49.77),
    },
  ),
  (
    "HybridEP", "dgx_b200", 4096, _HYBRID, "hierarchical", "GB/s",
    {(1, 8): (599.27, 734.95, 673.84)},
  ),
  (
    "HybridEP", "gb200_nvl72", 4096, _HYBRID, "hierarchical", "GB/s",
    {
      (1, 8): (713.98, 764.03, 737.13), (1, 16): (650.48, 706.95, 666.26),
      (1, 24): (577.96, 665.97, 639.80), (1, 32): (538.86, 642.23, 605.15),
      (1, 36): (489.27, 632.31, 596.99),
    },
  ),
  (
    "MORI", "mi300x", 4096, _MORI, "hierarchical", "GB/s",
    {(1, 8): (307, 330), (2, 8): (52, 67)},
  ),
  (
    "MORI", "mi355x", 4096, _MORI, "hierarchical", "GB/s",
    {(1, 8): (345, 420), (2, 8): (54, 71), (4, 8): (46, 61)},
  ),
  (
    "MORI, low latency", "mi300x", 128, _MORI, "direct", "us",
    {(1, 8): (35, 47), (2, 8): (76, 122)},
  ),
  (
    "MORI, low latency", "mi355x", 128, _MORI, "direct", "us",
    {(1, 8): (31, 36), (2, 8): (84, 108), (4, 8): (152, 187)},
  ),
  (
    "NCCL EP, low latency", "dgx_h100", 128, _NCCL, "direct", "GB/s",
    {
      (1, 8): (224.3, 185.2), (2, 8): (76.7, 73.0), (4, 8): (53.6, 50.0),
      (8, 8): (48.8, 43.8),
    },
  ),
]  # fmt: skip


class Figure(NamedTuple):
  """A published figure, as _SOURCES has it."""

  source: str
  cluster: ep.Cluster
  tokens: int
  op: str
  row_bytes: int
  transport: str
  unit: str
  value: float
  machine: str

  @property
  def experts(self):
    return 8 * self.cluster.num_ranks if self.source == "HybridEP" else 256

  @property
  def top_groups(self):
    """The number of nodes that a token can choose."""
    nodes = self.cluster.num_nodes
    return min(nodes, 4) if self.source == "DeepEP V1" else nodes


FIGURES = [
  Figure(
    source,
    ep.Cluster.named(machine, *size),
    tokens,
    *op,
    transport,
    unit,
    value,
    machine,
  )
  for source, machine, tokens, ops, transport, unit, figures in _SOURCES
  for size, values in figures.items()
  for op, value in zip(ops, values, strict=True)
]
# The constants of links.py are fit to this half of the figures: two of each
# four figures, so that both halves contain both ops.
FIT = np.arange(len(FIGURES)) % 4 < 2


@functools.cache
def _demand(cluster, tokens, experts, top_groups):
  cfg = ep.MoEConfig(
    hidden=_HIDDEN,
    inner=1,
    num_experts=experts,
    top_k=_TOP_K,
    num_groups=cluster.num_nodes,
    top_groups=top_groups,
    group_best=1,
  )
  nodes = cluster.num_nodes
  layout = Layout(1, cluster.num_ranks, nodes, np.arange(experts))
  (demand,) = Expected("", cfg, np.ones(experts), tokens).demands(layout)
  return demand


def _traffic(figure):
  """Returns the demand of all ranks, and the bytes sent."""
  demand = _demand(
    figure.cluster, figure.tokens, figure.experts, figure.top_groups
  )
  return demand, links.TRANSPORTS[figure.transport](demand) * figure.row_bytes


def _times(figure):
  """Returns the seconds of each link at its full rate, and of the figure.

  Sources count GB/s of different rows. Between nodes: the rows that a rank
  sends to all nodes, including the rank's node. Within a node: all rows that a
  rank receives. For "direct": a row per choice.
  """
  cluster = figure.cluster
  demand, traffic = _traffic(figure)
  rates = 1e9 * np.array([cluster.nvlink_gb_s, cluster.network_gb_s])
  full = traffic.max(axis=(0, 2))[1:] / rates
  if figure.unit == "us":
    return *full, figure.value / 1e6
  rows = figure.tokens * _TOP_K
  if figure.transport == "hierarchical":
    counted = demand.nodes if cluster.num_nodes > 1 else demand.ranks
    rows = counted[0].sum() / cluster.num_ranks
  return *full, rows * figure.row_bytes / figure.value / 1e9


TIMES = np.array([_times(figure) for figure in FIGURES])
IS_DIRECT = np.array([figure.transport == "direct" for figure in FIGURES])
CONSTANTS = (
  links.NVLINK_FRACTION,
  links.NETWORK_FRACTION,
  *links.LATENCIES_US.values(),
)


def predicted(constants):
  """Returns the predicted time of each figure, as links.seconds does."""
  nvlink, network, hierarchical, direct = constants
  latency_us = np.where(IS_DIRECT, direct, hierarchical)
  moved = np.maximum(TIMES[:, 0] / nvlink, TIMES[:, 1] / network)
  return latency_us / 1e6 + moved


def errors(constants):
  """Returns predicted / published time - 1."""
  return predicted(constants) / TIMES[:, 2] - 1


def fitted():
  """Returns the constants with the minimum mean logarithm of errors."""

  def loss(constants):
    return np.abs(np.log1p(errors(constants)))[FIT].mean()

  best, step = np.array([0.8, 0.8, 50.0, 50.0]), 0.5
  while step > 1e-3:
    tries = [best]
    for n, sign in itertools.product(range(best.size), (1, -1)):
      tries.append(best * (1 + step) ** (sign * np.eye(best.size)[n]))
    found = min(tries, key=loss)
    step = step / 2 if found is best else step
    best = found
  return best


def table():
  """Returns the text of docs/published.csv."""
  lines = [
    "source,machine,nodes x GPUs,op,bytes of a row,published,predicted,unit,"
    "error of the time,half\n"
  ]
  for figure, error, is_fit in zip(
    FIGURES, errors(CONSTANTS), FIT, strict=True
  ):
    factor = 1 + error if figure.unit == "us" else 1 / (1 + error)
    cluster = figure.cluster
    lines.append(
      f'"{figure.source}",{figure.machine},{cluster.num_nodes} x'
      f" {cluster.gpus_per_node},{figure.op},{figure.row_bytes},"
      f"{figure.value:g},{figure.value * factor:.0f},{figure.unit},"
      f"{error:+.0%},{'fit' if is_fit else 'predicted'}\n"
    )
  return "".join(lines)


def test_the_constants_equal_the_fit():
  np.testing.assert_allclose(CONSTANTS, fitted(), rtol=0.03)


def test_the_model_is_the_one_that_plan_uses():
  for figure, time in zip(FIGURES, predicted(CONSTANTS), strict=True):
    latency_us = links.LATENCIES_US[figure.transport]
    _, traffic = _traffic(figure)
    assert time == pytest.approx(
      links.seconds(traffic, figure.cluster, latency_us)
    )


def test_the_other_half_is_predicted():
  assert np.abs(errors(CONSTANTS)[~FIT]).mean() < 0.15


_DOCS = pathlib.Path(__file__).parents[2] / "docs"


def test_the_pages_have_every_error():
  assert (_DOCS / "published.csv").read_text() == table(), table()
  page = " ".join((_DOCS / "planner.md").read_text().split())
  found = [np.abs(errors(CONSTANTS)[half]).mean() for half in (FIT, ~FIT)]
  text = "{:.0%} of the fit half, and {:.0%} of the other".format(*found)
  assert text in page, text
  of_machines = {}
  for figure, error in zip(FIGURES, errors(CONSTANTS), strict=True):
    of_machines.setdefault((figure.source, figure.machine), []).append(error)
  for (_, machine), found in of_machines.items():
    row = f"| `{machine}` | {len(found)} | {np.abs(found).mean():.0%} |"
    row += f" {min(found):+.0%} to {max(found):+.0%} |"
    assert row in page, row
