# SPDX-License-Identifier: Apache-2.0
"""Compares the times of ep.plan with published figures.

The constants are fit to half of the figures. docs/planner.md names the sources,
and docs/published.csv lists each figure with its error.
"""

import csv
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
_DOCS = pathlib.Path(__file__).parents[2] / "docs"
# The tests read the columns source to published, and unit; table() writes the
# others. The file leaves out figures of MORI that MORI's README calls stale.
_PUBLISHED = (_DOCS / "published.csv").read_text()


class Figure(NamedTuple):
  """A published figure, a row of published.csv."""

  source: str
  machine: str
  cluster: ep.Cluster
  op: str
  row_bytes: int
  value: float
  unit: str

  @property
  def transport(self):
    return "direct" if "low latency" in self.source else "hierarchical"

  @property
  def tokens(self):
    """The number of tokens per rank."""
    if self.transport == "direct":
      return 128
    return 8192 if self.source == "DeepEP V2" else 4096

  @property
  def experts(self):
    return 8 * self.cluster.num_ranks if self.source == "HybridEP" else 256

  @property
  def top_groups(self):
    """The number of nodes that a token can choose."""
    nodes = self.cluster.num_nodes
    return min(nodes, 4) if self.source == "DeepEP V1" else nodes


def _figure(row):
  cluster = ep.Cluster.named(
    row["machine"], *map(int, row["nodes x GPUs"].split(" x "))
  )
  return Figure(
    row["source"],
    row["machine"],
    cluster,
    row["op"],
    int(row["bytes of a row"]),
    float(row["published"]),
    row["unit"],
  )


FIGURES = [_figure(row) for row in csv.DictReader(_PUBLISHED.splitlines())]
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
  """Returns each link's seconds at full rate, and the figure's seconds.

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


def test_the_pages_have_every_error():
  assert table() == _PUBLISHED, table()
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
