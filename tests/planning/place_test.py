# SPDX-License-Identifier: Apache-2.0
"""The placements of ep.place are close to optimal."""

import time

import jax
import numpy as np
import pytest
from scipy import optimize, sparse

import ep

DRAWS = {
  "uniform": lambda rng, shape: rng.random(shape),
  "zipf": lambda rng, shape: rng.permuted(
    np.broadcast_to(1 / np.arange(1.0, shape[1] + 1), shape), axis=1
  ),
  "lognormal": lambda rng, shape: rng.lognormal(size=shape),
  "idle": lambda rng, shape: rng.integers(0, 3, shape) * rng.random(shape),
}


def cluster(num_nodes, gpus_per_node):
  return ep.Cluster.named("dgx_h100", num_nodes, gpus_per_node)


def levels(num_nodes, gpus_per_node):
  """Returns the numbers of ranks and of nodes, if they exceed 1."""
  return {num_nodes * gpus_per_node, num_nodes} - {1}


def cost(experts, loads, num_nodes, gpus_per_node):
  """Returns maximum / mean load, averaged over steps, summed over `levels`."""
  placed = loads[:, experts]
  most = [
    n * placed.reshape(len(loads), n, -1).sum(2).max(1)
    for n in levels(num_nodes, gpus_per_node)
  ]
  return np.sum(most) / placed.sum()


def moves(experts, old, ranks):
  """Returns the number of slots whose expert is new on their rank."""
  pairs = zip(experts.reshape(ranks, -1), old.reshape(ranks, -1), strict=True)
  return sum((~np.isin(now, before)).sum() for now, before in pairs)


def least_cost(loads, num_nodes, gpus_per_node, old=None, move_cost=0.0):
  """Computes a lower bound of the cost of any placement with SciPy's HiGHS.

  The variables are: whether rank r has expert e, and the maximum load of a part
  per step. The bound is the minimum cost if the solver finishes in time.
  """
  S, E = loads.shape
  R = num_nodes * gpus_per_node
  parts = levels(num_nodes, gpus_per_node)
  has = np.arange(E * R).reshape(E, R)
  busiest = E * R + np.arange(len(parts) * S).reshape(len(parts), S)
  size = E * R + busiest.size
  rows, low, high = [], [], []

  def add(terms, least, most):
    row = np.zeros(size)
    for columns, factor in terms:
      row[columns] += factor
    rows.append(row)
    low.append(least)
    high.append(most)

  for e in range(E):
    add([(has[e], 1)], 1, 1)
  for r in range(R):
    add([(has[:, r], 1)], E // R, E // R)
  for most, n in zip(busiest, parts, strict=True):
    for s in range(S):
      for part in np.split(np.arange(R), n):
        loads_of = [(has[:, r], loads[s]) for r in part]
        add([*loads_of, (most[s], -1)], -np.inf, 0)
  weights = np.zeros(size)
  for most, n in zip(busiest, parts, strict=True):
    weights[most] = n / loads.sum()
  upper = np.where(np.arange(size) < E * R, 1, np.inf)
  for e in range(min(E, R)):  # Break the symmetry of the ranks of a node.
    if num_nodes == 1 and old is None:
      upper[has[e, e + 1 :]] = 0
  if old is not None:
    weights[has] = move_cost
    weights[has[old, np.arange(E) * R // E]] = 0
  found = optimize.milp(
    weights,
    constraints=optimize.LinearConstraint(sparse.csr_array(rows), low, high),
    integrality=np.arange(size) < E * R,
    bounds=optimize.Bounds(0, upper),
    options=dict(time_limit=20, mip_rel_gap=0.01),
  )
  return found.mip_dual_bound


@pytest.mark.parametrize(
  "draw, num_nodes, gpus_per_node, experts, steps",
  [
    ("uniform", 1, 4, 8, 1),
    ("idle", 1, 4, 12, 1),
    ("lognormal", 1, 3, 12, 3),
    ("lognormal", 2, 2, 8, 1),
    ("uniform", 2, 2, 12, 2),
    ("zipf", 2, 3, 12, 1),
    ("idle", 3, 2, 12, 2),
  ],
)
def test_no_placement_is_better_by_more_than_5_percent(
  draw, num_nodes, gpus_per_node, experts, steps
):
  for seed in range(3 if steps == 1 else 1):  # Several steps take long.
    loads = DRAWS[draw](np.random.default_rng(seed), (steps, experts))
    found = ep.place(loads, cluster(num_nodes, gpus_per_node)).experts
    np.testing.assert_array_equal(np.sort(found), np.arange(experts))
    got = cost(found, loads, num_nodes, gpus_per_node)
    least = least_cost(loads, num_nodes, gpus_per_node)
    assert 0.999 * least <= got <= 1.05 * least
    in_order = cost(np.arange(experts), loads, num_nodes, gpus_per_node)
    assert got < in_order


def drifted(rng, loads, part):
  return loads * (1 + part * rng.standard_normal(loads.shape))


@pytest.mark.parametrize(
  "num_nodes, gpus_per_node, experts, steps, drift",
  [(1, 4, 12, 1, 0.02), (1, 3, 9, 2, 0.2), (2, 2, 8, 1, 0.2)],
)
def test_no_sum_of_cost_and_moves_is_less_by_more_than_2_percent(
  num_nodes, gpus_per_node, experts, steps, drift
):
  ranks = num_nodes * gpus_per_node
  where = num_nodes, gpus_per_node
  for seed in range(2):
    rng = np.random.default_rng(seed)
    loads = rng.lognormal(size=(steps, experts))
    old = ep.place(loads, cluster(*where))
    loads = drifted(rng, loads, drift).clip(0)
    for move_cost in (0.003, 0.03):
      found = ep.place(loads, cluster(*where), old=old, move_cost=move_cost)
      got = cost(found.experts, loads, *where)
      got += move_cost * moves(found.experts, old.experts, ranks)
      assert got <= cost(old.experts, loads, *where)
      least = least_cost(loads, *where, old.experts, move_cost)
      assert 0.989 * least <= got <= 1.02 * least


def test_experts_move_only_for_what_they_save():
  """After a 2% drift of loads, a search without `old` moves most experts."""
  rng = np.random.default_rng(0)
  loads = rng.lognormal(sigma=0.5, size=(1, 256))
  here = cluster(1, 32)
  old = ep.place(loads, here)
  loads = drifted(rng, loads, 0.02)
  kept = cost(old.experts, loads, 1, 32)

  def of(**options):
    found = ep.place(loads, here, **options).experts
    moved = moves(found, old.experts, 32)
    if options:  # An expert that stays on its rank stays in its slot.
      assert (found != old.experts).sum() == moved
    return moved, cost(found, loads, 1, 32)

  anew = of()
  assert anew[0] > 200 and anew[1] < 1.003 < 1.02 < kept
  few = of(old=old)
  assert 0 < few[0] <= 16 and few[1] <= kept - 1e-3 * few[0]
  more = of(old=old, move_cost=1e-4)
  assert few[0] < more[0] <= 64 and more[1] < few[1]
  assert of(old=old, move_cost=0)[1] < 1.003
  assert of(old=old, move_cost=1) == (0, kept)


def test_copies_stay_where_they_are():
  rng = np.random.default_rng(0)
  loads, here = 1 / np.arange(1.0, 33), cluster(1, 8)
  old = ep.place(loads, here, replicas=16)
  drift = drifted(rng, loads, 0.02)
  found = ep.place(drift, here, replicas=16, old=old)
  assert moves(found.experts, old.experts, 8) <= 2
  # An expert that becomes hot gets copies, and most other experts stay.
  loads[-1] = 2.0
  found = ep.place(loads, here, replicas=16, old=old).experts
  number = np.bincount(found)
  assert number.min() == 1 and number.argmax() == 31
  assert cost(found, (loads / number)[None], 1, 8) < 1.1
  anew = ep.place(loads, here, replicas=16).experts
  moved, of_all = (moves(x, old.experts, 8) for x in (found, anew))
  assert moved < 0.6 * of_all


def test_layers_are_placed_in_one_call():
  loads = np.random.default_rng(0).lognormal(size=(2, 3, 8))
  here = cluster(1, 4)
  found = ep.place(loads, here)
  assert found.experts.shape == (2, 8)
  again = ep.place(loads[::-1], here, old=found, move_cost=0.01)
  for layer, experts, from_old in zip(
    range(2), found.experts, again.experts, strict=True
  ):
    alone = ep.place(loads[layer], here)
    np.testing.assert_array_equal(experts, alone.experts)
    alone = ep.place(loads[1 - layer], here, old=alone, move_cost=0.01)
    np.testing.assert_array_equal(from_old, alone.experts)
  of_ones = ep.place(np.ones((2, 1, 8)), here, replicas=4, old=None)
  assert of_ones.experts.shape == (2, 12)


def test_the_busiest_ranks_of_steps_count_and_not_of_their_sum():
  """All experts have the same total load, but not the same load per step."""
  first = np.array([3.0, 3.0, 3.0, 3.0, 1.0, 1.0, 1.0, 1.0])
  loads = np.stack([first, 4 - first])
  found = ep.place(loads, cluster(1, 4)).experts
  assert cost(found, loads, 1, 4) == 1
  assert cost(np.arange(8), loads, 1, 4) == 1.5


def test_nodes_are_balanced_where_ranks_cannot_be():
  """The node of an expert above a rank's mean load gets the idle experts."""
  loads = np.array([4.0, 1, 1, 1, 1, 0, 0, 0])
  found = ep.place(loads, cluster(2, 2)).experts
  nodes = loads[found].reshape(2, 4).sum(1)
  np.testing.assert_array_equal(nodes, [4, 4])
  assert loads[found].reshape(4, 2).sum(1).max() == 4


def test_copies_take_the_load_of_an_expert():
  loads = np.array([8.0, 1, 1, 1, 1, 1, 1, 2])
  found = ep.place(loads, cluster(1, 4), replicas=4).experts
  number = np.bincount(found)
  assert number.sum() == 12 and number[0] >= 4
  assert cost(found, (loads / number)[None], 1, 4) <= 1.05


def test_only_ratios_count_and_all_nodes_are_equal():
  loads = np.random.default_rng(0).random((2, 8))
  of_node = ep.place(loads, cluster(1, 4))
  for other in (
    ep.place(1e9 * jax.numpy.asarray(loads), cluster(1, 4)),
    ep.place(loads, cluster(4, 4), ep_size=4),
  ):
    np.testing.assert_array_equal(other.experts, of_node.experts)


def test_many_experts_take_seconds():
  loads = 1 / np.arange(1.0, 257)
  start = time.process_time()
  found = ep.place(loads, cluster(8, 8), replicas=64).experts
  assert time.process_time() - start < 20
  shares = (loads / np.bincount(found))[None]
  assert cost(found, shares, 8, 8) < 2.02 < cost(np.sort(found), shares, 8, 8)


def test_empty_slots_relieve_the_rank_of_a_hot_expert():
  """Seven experts have 3 x 3 slots, and the numbers 7 and 8 are empty."""
  loads = np.array([1, 1, 8, 1, 1, 1, 1])
  found = ep.place(loads, cluster(1, 3), ep_size=3)
  ranks = [set(own) for own in found.experts.reshape(3, 3).tolist()]
  assert {2, 7, 8} in ranks
  again = ep.place(loads, cluster(1, 3), ep_size=3, old=found)
  np.testing.assert_array_equal(again.experts, found.experts)


def test_wrong_arguments_are_refused():
  here, in_order = cluster(2, 4), ep.Placement(range(8))
  for loads, options, words in [
    (np.ones((1, 2, 2, 8)), {}, r"loads have shape \(1, 2, 2, 8\), but \[E\]"),
    (np.stack([np.ones((3, 8)), np.zeros((3, 8))]), {}, "not all zero"),
    (-np.ones(8), {}, "none negative"),
    (np.zeros(8), {}, "not all zero"),
    (np.full(8, np.nan), {}, "all finite"),
    (["many"] * 8, {}, "numbers are expected"),
    ([], {}, "loads have shape"),
    (np.ones(8), dict(ep_size=3), "must divide the 8 ranks"),
    (np.ones(8), dict(ep_size=8, replicas=1), "a multiple of the EP size 8"),
    (np.ones(8), dict(replicas=-8), "a multiple of the EP size"),
    (np.ones(8), dict(old=ep.Placement(range(4))), r"old has shape \(4,\)"),
    (np.ones((2, 1, 8)), dict(old=in_order), r"must be \[2, 8\]"),
    (np.ones(8), dict(replicas=8, old=in_order), r"must be \[16\]"),
    (np.ones(8), dict(move_cost=-1), "must not be negative"),
    (np.ones(8), dict(move_cost=np.inf), "a finite number"),
  ]:
    with pytest.raises(ValueError, match=f"ep.place: .*{words}"):
      ep.place(loads, here, **options)
  with pytest.raises(TypeError, match="cluster = 8 is a int, but an ep.Cl"):
    ep.place(np.ones(8), 8)
  with pytest.raises(TypeError, match="ep.place: old = .* an ep.Placement is"):
    ep.place(np.ones(8), here, old=range(8))
  with pytest.raises(ValueError, match=r"each of 0\.\.E-1 once or more"):
    ep.place(np.ones(8), here, old=ep.Placement(jax.numpy.arange(8) // 2 * 2))
