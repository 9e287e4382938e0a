# SPDX-License-Identifier: Apache-2.0
"""ep.debug.plot_routing returns a text, and writes the text or a picture."""

import sys

import jax
import numpy as np
import pytest

from cases import Case
import ep
from ep.debug import plot_routing, RoutingSizes
from groups import layer, ranks

SIZES = RoutingSizes(num_experts=4, ep_size=2, alignment=2, capacity=4)
# The example of docs/semantics.md: two ranks with two tokens each.
IDS = np.array([[0, 2], [0, 3], [0, 1], [2, -1]])


def test_text():
  assert plot_routing(SIZES, IDS).splitlines() == [
    "routing: choices of experts 0 to 3 (across) by source rank (down)",
    "     0 |@ ++|",
    "     1 |+++ |",
    "        ' ' is none, '@' is 2",
    "rows wanted by each rank, mean 5.0, capacity 4",
    f"     0 |{'#' * 56}| 6!",
    f"     1 |{'#' * 38:<56}| 4",
  ]
  ids = IDS.reshape(2, 2, 1, 2)
  assert plot_routing(SIZES, ids) == plot_routing(SIZES, IDS)


def test_loads_are_the_rows_that_prepare_would_count():
  for mesh in "ep4", "dp2_ep2":
    case = Case(layer(mesh, alignment=4), "skewed")
    bars = plot_routing(case.layer, case.topk_idx).splitlines()[-4:]
    total = case.oracle.sizes().total_recv_tokens
    assert [int(b.split()[-1]) for b in bars] == np.ravel(total).tolist()


def test_the_last_rank_may_have_fewer_experts():
  sizes = RoutingSizes(num_experts=3, ep_size=2)
  bars = plot_routing(sizes, np.array([[0, 2], [1, 0]])).splitlines()[-2:]
  assert [bar.split()[-1] for bar in bars] == ["3", "1"]


def test_many_experts_and_ranks_fit_a_screen():
  sizes = RoutingSizes(num_experts=256, ep_size=64, num_ranks=128)
  ids = np.arange(128 * 4).reshape(128, 4) % 256
  lines = plot_routing(sizes, ids).splitlines()
  assert len(lines) == 32 + 32 + 3
  assert max(map(len, lines)) <= 80
  assert "column is 4" in lines[33] and "line is 4" in lines[33]


def test_png(tmp_path):
  pytest.importorskip("matplotlib", reason="pictures need matplotlib")
  path = tmp_path / "routing.png"
  assert plot_routing(SIZES, IDS, path) == plot_routing(SIZES, IDS)
  assert path.read_bytes().startswith(b"\x89PNG")


def test_text_where_there_is_no_matplotlib(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
  with pytest.warns(UserWarning, match="routing.txt"):
    text = plot_routing(SIZES, IDS, tmp_path / "routing.png")
  assert [p.name for p in tmp_path.iterdir()] == ["routing.txt"]
  assert (tmp_path / "routing.txt").read_text() == text + "\n"


@pytest.mark.parametrize(
  "sizes, ids, error, words",
  [
    (SIZES, IDS[:3], ValueError, "R = 2"),
    (SIZES, IDS + 2, ValueError, "1..5.*-1..3"),
    (SIZES, IDS.clip(2), ValueError, r"idx\[0\] = \[2, 2\] repeats an"),
    (SIZES, IDS / 2, TypeError, "float64.*integers"),
    (None, IDS, TypeError, "NoneType"),
  ],
)
def test_wrong_arguments(sizes, ids, error, words):
  with pytest.raises(error, match=f"plot_routing: .*{words}"):
    plot_routing(sizes, ids)


@pytest.mark.parametrize(
  "sizes, words",
  [
    (dict(ep_size=3, num_ranks=4), "multiple of ep_size = 3"),
    (dict(ep_size=0), "ep_size = 0, but it must be positive"),
    (dict(ep_size=2, alignment=0), "alignment = 0, but it must be positive"),
    (dict(ep_size=2.5), "ep_size = 2.5 is a float"),
  ],
)
def test_sizes_that_do_not_fit(sizes, words):
  with pytest.raises((TypeError, ValueError), match=f"RoutingSizes: .*{words}"):
    RoutingSizes(num_experts=8, **sizes)


def test_tracing():
  config = layer()
  ids = jax.ShapeDtypeStruct((ranks(config), config.top_k), np.int32)
  with pytest.raises(TypeError, match="traced"):
    jax.eval_shape(lambda x: ep.debug.plot_routing(config, x), ids)
