# SPDX-License-Identifier: Apache-2.0
"""ep.suggest_capacity counts the drops for each candidate capacity."""

import sys

import numpy as np
import pytest

from conftest import make_mesh
import ep
from ep._src.ops import reference
from ep._tools.records import files
from ep.testing._routings import draw
from groups import BACKEND, E, has_no_limits, K, layer, T
from oracle import make_oracle

STEPS = 6


def routings():
  """Draws steps whose load concentrates on the first experts."""
  rng = np.random.default_rng(0)
  return [
    draw(rng, (4 * T, K), np.exp(-step / STEPS * np.arange(E)))
    for step in range(STEPS)
  ]


def dropped(a_layer, capacity, topk_idx):
  """Computes the number of dropped choices per rank with the oracle."""
  P, L = a_layer.ep_size, a_layer.num_local_experts
  counts = []
  for ids in topk_idx.reshape(-1, P, T, K):
    kept = reference.assign(
      ids,
      np.ones(ids.shape),
      num_experts=E,
      capacity=capacity,
      alignment=a_layer.alignment,
      drop_by=a_layer.drop_by or "fair",
    )
    lost = ids[(ids >= 0) & ~kept]
    counts.append(np.bincount(lost, minlength=E).reshape(P, L).sum(axis=1))
  return np.concatenate(counts)


@pytest.mark.parametrize("limit", [0.0, 0.05])
@pytest.mark.parametrize(
  "mesh, alignment, drop_by",
  [
    ("ep4", 1, "slot"),
    ("ep4", 1, "weight"),
    ("dp2_ep2", 4, "slot"),
    ("dp2_ep2", 4, "fair"),
    ("dp4_ep1", 3, "fair"),
    ("dp2_ep2", 4, None),
  ],
)
def test_drops_are_those_of_the_contract(mesh, alignment, drop_by, limit):
  """Drop counts are exact; with less capacity, drops would exceed the limit."""
  policy = dict(overflow="drop", drop_by=drop_by) if drop_by else {}
  a_layer = layer(mesh, alignment=alignment, **policy)
  steps = routings()
  got = ep.suggest_capacity(a_layer, steps, drop_probability=limit)
  total = sum((idx >= 0).sum() for idx in steps)

  def drops(capacity):
    return np.stack([dropped(a_layer, capacity, idx) for idx in steps])

  for i, capacity in enumerate(got.candidates.tolist()):
    expected = drops(capacity)
    assert got.dropped_choices[i] == expected.sum() / total
    assert got.dropped_steps[i] == expected.any(axis=1).mean()
  assert got.capacity in got.candidates
  assert drops(got.capacity).sum() <= limit * total
  assert drops(got.capacity - alignment).sum() > limit * total
  for idx, demand in zip(steps, got.demand, strict=True):
    wanted = np.asarray(make_oracle(a_layer, idx).sizes()[2])
    np.testing.assert_array_equal(demand, wanted.ravel())


def test_a_recorded_folder_and_its_table(tmp_path):
  """A job with other ranks wrote the record; all complete steps count."""
  steps, a_layer = routings(), layer(name="moe_3")
  files.Writer(tmp_path, 0).write(
    files.Call("moe_3", 2, 1, rank, step, 0, "jit_f#0/1", step, half)
    for step, idx in enumerate(steps)
    for rank, half in enumerate(np.split(idx, 2))
  )
  got = ep.suggest_capacity(a_layer, tmp_path, drop_probability=0.05)
  replayed = ep.replay(tmp_path)
  again = ep.suggest_capacity(a_layer, replayed, drop_probability=0.05)
  expected = ep.suggest_capacity(a_layer, steps, drop_probability=0.05)
  assert repr(got) == str(got) == str(again) == str(expected)
  title, heads, *rows = str(got).splitlines()
  assert title.startswith('layer "moe_3": 6 steps')
  assert "choices dropped" in heads and len(rows) == len(got.candidates)
  (marked,) = (row.split() for row in rows if "suggested" in row)
  assert int(marked[0]) == got.capacity
  assert rows[-1].split()[3] == "0.0000%"
  assert max(map(len, str(got).splitlines())) <= 80


@has_no_limits
def test_a_group_without_sizes():
  """Without sizes, routings give the token counts, and bytes are unknown."""
  steps, mesh = routings(), make_mesh({"ep": 4})
  expected = ep.suggest_capacity(layer(), steps)
  with ep.ep_bootstrap(
    mesh, num_experts=E, top_k=K, backend=BACKEND
  ) as unlimited:
    a_layer = ep.EpLayerConfig(unlimited)
    got = ep.suggest_capacity(a_layer, steps)
    assert got.balanced == expected.balanced == T * K
    assert got.capacity == expected.capacity
    np.testing.assert_array_equal(got.candidates, expected.candidates)
    assert got.bytes is None
    assert "bytes" in str(expected) and "bytes" not in str(got)
    assert len(str(got).splitlines()) == 2 + len(got.candidates)
    # The minimum capacity is a row per expert, and the layer accepts it.
    none = np.full((4, K), -1)
    assert ep.suggest_capacity(a_layer, [none]).capacity == E // 4
    a_layer.replace(recv_capacity_per_rank=E // 4)


def test_pictures_need_matplotlib(tmp_path, monkeypatch):
  got = ep.suggest_capacity(layer(), routings())
  with monkeypatch.context() as patch:
    patch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match="matplotlib is not .*; inst"):
      got.plot(tmp_path / "drops.png")
  pytest.importorskip("matplotlib", reason="pictures need matplotlib")
  got.plot(tmp_path / "drops.png")
  assert (tmp_path / "drops.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_arguments_are_refused():
  for steps, limit, error, words in [
    ([], 0, ValueError, "there is no step"),
    (routings(), 1.0, ValueError, "drop_probability = 1.0"),
    (routings(), "0", TypeError, "drop_probability = '0'"),
    ([np.full((4, K), E)], 0, ValueError, "ids in 8..8"),
    ([np.zeros((4, K), int)], 0, ValueError, "repeats an expert"),
    ([np.zeros((3, K), int)], 0, ValueError, "R = 4 ranks"),
    ([np.zeros((4, K + 1), int)], 0, ValueError, "has 3 columns; pass the"),
    ([np.zeros((4, K - 1), int)], 0, ValueError, "has 3 columns; pass the"),
    ([np.int32(3)], 0, ValueError, r"shape \(\), but the layer \"moe\""),
  ]:
    with pytest.raises(error, match=f"suggest_capacity: .*{words}"):
      ep.suggest_capacity(layer(), steps, drop_probability=limit)
