# SPDX-License-Identifier: Apache-2.0
"""The placements of ep.place are close to optimal."""

import itertools

import numpy as np
import pytest

import ep

DRAWS = {
  "uniform": lambda rng, shape: rng.random(shape),
  "zipf": lambda rng, shape: rng.permuted(
    np.broadcast_to(1 / np.arange(1.0, shape[1] + 1), shape), axis=1
  ),
  "lognormal": lambda rng, shape: rng.lognormal(size=shape),
  "idle": lambda rng, shape: rng.integers(0, 3, shape) * rng.random(shape),
}


def ratio(experts, loads, num_blocks):
  """Returns maximum / mean load of blocks of slots, averaged over steps."""
  placed = loads[:, experts].reshape(
    len(loads), *experts.shape[:-1], num_blocks, -1
  )
  return num_blocks * placed.sum(-1).max(-1).sum(0) / loads.sum()


def cost(experts, loads, ranks, nodes=1):
  """Returns the sum of the ratios of ranks and of nodes, if they exceed 1."""
  return sum(ratio(experts, loads, n) for n in {ranks, nodes} - {1})


def moves(experts, old, ranks):
  """Returns the number of experts whose rank is new."""
  now, before = (e.argsort(-1) // (len(old) // ranks) for e in (experts, old))
  return (now != before).sum(-1)


def drifted(rng, loads, part):
  return loads * (1 + part * rng.standard_normal(loads.shape))


@pytest.mark.parametrize(
  "draw, ranks, nodes, steps",
  [
    ("uniform", 4, 1, 1),
    ("idle", 4, 1, 1),
    ("lognormal", 2, 1, 3),
    ("lognormal", 4, 2, 1),
    ("uniform", 4, 2, 2),
    ("zipf", 4, 2, 1),
  ],
)
def test_no_placement_is_much_better(draw, ranks, nodes, steps):
  """Compares with all placements of 8 experts, also with the price of moves."""
  every = np.array([*itertools.permutations(range(8))])
  for seed in range(3):
    rng = np.random.default_rng(seed)
    loads = DRAWS[draw](rng, (steps, 8))
    old = ep.place(loads, ranks, nodes=nodes)
    got = cost(old.experts, loads, ranks, nodes)
    assert got <= 1.05 * cost(every, loads, ranks, nodes).min()
    loads = drifted(rng, loads, 0.2).clip(0)
    for move_cost in (0.003, 0.03):
      options = dict(nodes=nodes, old=old, move_cost=move_cost)
      found = ep.place(loads, ranks, **options).experts
      got, *others = (
        cost(x, loads, ranks, nodes) + move_cost * moves(x, old.experts, ranks)
        for x in (found, every)
      )
      assert got <= 1.02 * np.min(others)


def test_experts_move_only_for_what_they_save():
  """After a 2% drift of loads, a search without `old` moves most experts."""
  rng = np.random.default_rng(0)
  loads = rng.lognormal(sigma=0.5, size=(1, 256))
  old = ep.place(loads, 32)
  loads = drifted(rng, loads, 0.02)
  kept = cost(old.experts, loads, 32)

  def of(**options):
    found = ep.place(loads, 32, **options).experts
    moved = moves(found, old.experts, 32)
    if options:  # An expert that stays on its rank stays in its slot.
      assert (found != old.experts).sum() == moved
    return moved, cost(found, loads, 32)

  anew = of()
  assert anew[0] > 200 and anew[1] < 1.003 < 1.02 < kept
  few = of(old=old)
  assert 0 < few[0] <= 16 and few[1] <= kept - 1e-3 * few[0]
  more = of(old=old, move_cost=1e-4)
  assert few[0] < more[0] <= 64 and more[1] < few[1]
  assert of(old=old, move_cost=0)[1] < 1.003
  assert of(old=old, move_cost=1) == (0, kept)


def test_layers_are_placed_in_one_call():
  loads = np.random.default_rng(0).lognormal(size=(2, 3, 8))
  found = ep.place(loads, 4)
  assert found.experts.shape == (2, 8)
  again = ep.place(loads[::-1], 4, old=found, move_cost=0.01)
  for layer, experts, from_old in zip(
    range(2), found.experts, again.experts, strict=True
  ):
    alone = ep.place(loads[layer], 4)
    np.testing.assert_array_equal(experts, alone.experts)
    alone = ep.place(loads[1 - layer], 4, old=alone, move_cost=0.01)
    np.testing.assert_array_equal(from_old, alone.experts)


def test_a_rank_alone_has_all_experts():
  for nodes in 1, 3:  # with three nodes, a rank is a node
    found = ep.place(np.ones(6), nodes, nodes=nodes)
    assert sorted(found.experts) == [*range(6)]


def test_empty_slots_relieve_the_rank_of_a_hot_expert():
  """Seven experts have 3 x 3 slots, and the numbers 7 and 8 are empty."""
  loads = np.array([1, 1, 8, 1, 1, 1, 1])
  found = ep.place(loads, 3)
  ranks = [set(own) for own in found.experts.reshape(3, 3).tolist()]
  assert {2, 7, 8} in ranks
  again = ep.place(loads, 3, old=found)
  np.testing.assert_array_equal(again.experts, found.experts)
