# SPDX-License-Identifier: Apache-2.0
"""The times of ep.plan against published figures, half of which it is fit to.

docs/planner.md names the sources, and shows each figure with its error.
"""

import functools
import itertools
import pathlib
import re
from typing import NamedTuple

import numpy as np
import pytest

import ep
from ep._src.planning import links
from ep._src.planning.demand import Expected, Layout

_HIDDEN, _TOP_K = 7168, 8
_FP8, _BF16 = _HIDDEN + 4 * _HIDDEN // 128, 2 * _HIDDEN  # bytes of a row


class Figure(NamedTuple):
  """A published figure.

  Attributes:
    source: as docs/planner.md names it.
    machine, num_nodes, gpus: whose links moved the rows.
    tokens, experts: of a rank, and of all.
    op: "dispatch" or "combine".
    row_bytes: of one row.
    value: GB/s of what `counts` says, or microseconds.
    counts: "nodes" for rows that a rank sends to nodes, its own included;
      "ranks" for all rows that a rank receives; "choices" for a row for each
      choice; or "us".
    transport: as in ep.plan.
    top_groups: of as many groups as nodes; None for no groups.
  """

  source: str
  machine: str
  num_nodes: int
  gpus: int
  tokens: int
  experts: int
  op: str
  row_bytes: int
  value: float
  counts: str
  transport: str = "hierarchical"
  top_groups: int | None = None

  @property
  def cluster(self):
    return ep.Cluster.named(self.machine, self.num_nodes, self.gpus)


def _both(row_bytes, values):
  """Returns dispatch with these bytes of a row, and combine in bfloat16."""
  ops = ("dispatch", row_bytes), ("combine", _BF16)
  return [(*op, value) for op, value in zip(ops, values, strict=True)]


def _figures():
  # DeepEP V2's README; a row has its ids and weights as well.
  for machine, nodes, counts, values in (
    ("dgx_h100", 2, "nodes", (90, 81)),
    ("dgx_h100", 4, "nodes", (61, 61)),
    ("dgx_b200", 2, "nodes", (90, 91)),
    ("dgx_b200", 1, "ranks", (726, 740)),
  ):
    for op, size, value in _both(_FP8 + 96, values):
      yield Figure(
        "DeepEP V2", machine, nodes, 8, 8192, 256, op, size, value, counts
      )
  # DeepEP's docs/legacy.md.
  for nodes, values in (
    (1, (153, 158)), (2, (43, 43)), (4, (58, 57)), (8, (51, 50)),
  ):  # fmt: skip
    for op, size, value in _both(_FP8, values):
      yield Figure(
        "DeepEP V1", "h800", nodes, 8, 4096, 256, op, size, value,
        "nodes" if nodes > 1 else "ranks", top_groups=min(nodes, 4),
      )  # fmt: skip
  for nodes, values in (
    (1, (77, 114)), (2, (118, 195)), (4, (155, 273)), (8, (173, 314)),
    (16, (192, 369)), (32, (194, 360)),
  ):  # fmt: skip
    for op, size, value in _both(_FP8, values):
      yield Figure(
        "DeepEP V1, low latency", "h800", nodes, 8, 128, 256, op, size, value,
        "us", "direct",
      )  # fmt: skip
  # HybridEP's docs/README_Hybrid-EP.md, "Kernel Only".
  for machine, nodes, gpus, values in (
    ("dgx_h100", 2, 8, (68.48, 71.71, 62.95)),
    ("dgx_h100", 4, 8, (55.35, 57.69, 57.46)),
    ("dgx_h100", 8, 8, (46.52, 49.97, 49.77)),
    ("dgx_b200", 1, 8, (599.27, 734.95, 673.84)),
    ("gb200_nvl72", 1, 8, (713.98, 764.03, 737.13)),
    ("gb200_nvl72", 1, 16, (650.48, 706.95, 666.26)),
    ("gb200_nvl72", 1, 24, (577.96, 665.97, 639.80)),
    ("gb200_nvl72", 1, 32, (538.86, 642.23, 605.15)),
    ("gb200_nvl72", 1, 36, (489.27, 632.31, 596.99)),
  ):
    ops = ("dispatch", _FP8), ("dispatch", _BF16), ("combine", _BF16)
    for (op, size), value in zip(ops, values, strict=True):
      yield Figure(
        "HybridEP", machine, nodes, gpus, 4096, 8 * gpus * nodes, op, size,
        value, "nodes" if nodes > 1 else "ranks",
      )  # fmt: skip
  # MORI's README, without the figures that it calls stale.
  for machine, nodes, counts, values in (
    ("mi300x", 1, "ranks", (307, 330)),
    ("mi300x", 2, "nodes", (52, 67)),
    ("mi355x", 1, "ranks", (345, 420)),
    ("mi355x", 2, "nodes", (54, 71)),
    ("mi355x", 4, "nodes", (46, 61)),
  ):
    for op, size, value in _both(_HIDDEN, values):
      yield Figure(
        "MORI", machine, nodes, 8, 4096, 256, op, size, value, counts
      )
  for machine, nodes, values in (
    ("mi300x", 1, (35, 47)), ("mi300x", 2, (76, 122)), ("mi355x", 1, (31, 36)),
    ("mi355x", 2, (84, 108)), ("mi355x", 4, (152, 187)),
  ):  # fmt: skip
    for op, size, value in _both(_HIDDEN, values):
      yield Figure(
        "MORI, low latency", machine, nodes, 8, 128, 256, op, size, value, "us",
        "direct",
      )  # fmt: skip
  # NCCL EP's README, which has figures of its low-latency mode only.
  for nodes, values in (
    (1, (224.3, 185.2)), (2, (76.7, 73.0)), (4, (53.6, 50.0)),
    (8, (48.8, 43.8)),
  ):  # fmt: skip
    for op, size, value in _both(_BF16, values):
      yield Figure(
        "NCCL EP, low latency", "dgx_h100", nodes, 8, 128, 256, op, size, value,
        "choices", "direct",
      )  # fmt: skip


FIGURES = list(_figures())
# The half of the figures that the constants of links.py are fit to: two figures
# in each four, so that both halves have both ops.
FIT = np.arange(len(FIGURES)) % 4 < 2


@functools.cache
def _demand(num_nodes, gpus, tokens, experts, top_groups):
  groups = num_nodes if top_groups else 1
  cfg = ep.MoEConfig(
    hidden=_HIDDEN,
    inner=1,
    num_experts=experts,
    top_k=_TOP_K,
    num_groups=groups,
    top_groups=min(top_groups or 1, groups),
    group_best=1,
  )
  layout = Layout(1, num_nodes * gpus, num_nodes, np.arange(experts))
  (demand,) = Expected("", cfg, np.ones(experts), tokens).demands(layout)
  return demand


def _times(figure):
  """Returns the seconds of each link at its full rate, and of the figure."""
  demand = _demand(*figure[2:6], figure.top_groups)
  traffic = links.TRANSPORTS[figure.transport](demand)
  rates = 1e9 * np.array(
    [figure.cluster.nvlink_gb_s, figure.cluster.network_gb_s]
  )
  full = traffic.max(axis=(0, 2))[1:] * figure.row_bytes / rates
  if figure.counts == "us":
    return *full, figure.value / 1e6
  rows = {
    "nodes": demand.nodes[0, 0].sum(),
    "ranks": demand.ranks[0].sum(0).mean(),
    "choices": figure.tokens * _TOP_K,
  }[figure.counts]
  return *full, rows * figure.row_bytes / figure.value / 1e9


TIMES = np.array([_times(figure) for figure in FIGURES])
IS_DIRECT = np.array([figure.transport == "direct" for figure in FIGURES])
CONSTANTS = links.NVLINK_PART, links.NETWORK_PART, *links.LATENCIES_US.values()


def predicted(constants):
  """Returns the predicted time of each figure, as links.seconds does."""
  nvlink, network, hierarchical, direct = constants
  latency_us = np.where(IS_DIRECT, direct, hierarchical)
  moved = np.maximum(TIMES[:, 0] / nvlink, TIMES[:, 1] / network)
  return latency_us / 1e6 + moved


def errors(constants):
  """Returns the predicted over the published time, less one."""
  return predicted(constants) / TIMES[:, 2] - 1


def fitted():
  """Returns the constants with the least mean of logarithms of errors."""

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
  """Returns the table of docs/planner.md."""
  lines = [
    "| source | machine | nodes x GPUs | op | bytes of a row | published |"
    " predicted | error of the time | |",
    "|---|---|---|---|---|---|---|---|---|",
  ]
  for figure, error, is_fit in zip(
    FIGURES, errors(CONSTANTS), FIT, strict=True
  ):
    unit = "us" if figure.counts == "us" else "GB/s"
    factor = 1 + error if unit == "us" else 1 / (1 + error)
    lines.append(
      f"| {figure.source} | {figure.machine} | {figure.num_nodes} x"
      f" {figure.gpus} | {figure.op} | {figure.row_bytes} |"
      f" {figure.value:g} {unit} | {figure.value * factor:.0f} |"
      f" {error:+.0%} | {'fit' if is_fit else 'predicted'} |"
    )
  return "\n".join(lines)


def test_the_constants_are_those_of_the_fit():
  np.testing.assert_allclose(CONSTANTS, fitted(), rtol=0.03)


def test_the_model_is_the_one_that_plan_uses():
  for figure, time in zip(FIGURES, predicted(CONSTANTS), strict=True):
    traffic = links.TRANSPORTS[figure.transport](
      _demand(*figure[2:6], figure.top_groups)
    )
    latency_us = links.LATENCIES_US[figure.transport]
    assert time == pytest.approx(
      links.seconds(traffic * figure.row_bytes, figure.cluster, latency_us)
    )


def test_the_other_half_is_predicted():
  assert np.abs(errors(CONSTANTS)[~FIT]).mean() < 0.15


_DOCS = pathlib.Path(__file__).parents[2] / "docs"


def test_the_page_has_every_error():
  page = (_DOCS / "planner.md").read_text()
  assert table() in page, table()
  found = [np.abs(errors(CONSTANTS)[half]).mean() for half in (FIT, ~FIT)]
  text = "{:.0%} of the fit half, and {:.0%} of the other".format(*found)
  assert text in " ".join(page.split()), text


def test_the_page_has_the_picture_of_its_program(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  page = (_DOCS / "planner.md").read_text()
  exec(re.search(r"```python\n(.*?)```", page, re.S)[1], {})
  drawn = (tmp_path / "plan.svg").read_text()
  assert drawn == (_DOCS / "images" / "plan.svg").read_text()
