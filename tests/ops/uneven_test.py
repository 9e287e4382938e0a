# SPDX-License-Identifier: Apache-2.0
"""The ranks need not divide the experts: the last ranks have fewer, or none.

All bits equal the bits of the oracle. On 4 ranks, 5 experts have the slots
01 23 4- --, and on 3 ranks 01 23 4-.
"""

import contextlib

import numpy as np
import pytest

from cases import assert_same, Case
from conftest import make_mesh
import ep
from ep.testing._routings import ROUTINGS
from groups import bootstrap, H, K, T
from op_functions import everything, round_trip, sizes

# (P, E)
UNEVEN = [(4, 5), (3, 5), (4, 3), (4, 6), (3, 4), (2, 1)]


@contextlib.contextmanager
def uneven_layer(ranks, experts, tokens=T, **options):
  sizes = dict(num_experts=experts, top_k=min(K, experts))
  sizes |= dict(max_tokens_per_rank=tokens)
  with bootstrap(make_mesh({"ep": ranks}), **sizes) as group:
    yield ep.EpLayerConfig(group, **options)


@pytest.mark.parametrize("ranks, experts", UNEVEN)
def test_every_op_has_the_bits_of_the_oracle(ranks, experts):
  with uneven_layer(ranks, experts, alignment=4) as layer:
    for routing in ROUTINGS:
      case = Case(layer, routing)
      case.check(everything, *case.inputs())


@pytest.mark.parametrize("ranks, experts", UNEVEN[:2])
def test_empty_slots_come_last_and_receive_no_rows(ranks, experts):
  with uneven_layer(ranks, experts, alignment=4) as layer:
    slots = ranks * layer.num_local_experts
    assert layer.group.num_expert_slots == slots > experts
    case = Case(layer, "uniform")
    of_slots = case.oracle.sizes().group_sizes.ravel()
    assert of_slots[:experts].all() and not of_slots[experts:].any()
    case.check(sizes)


@pytest.mark.parametrize("rule", ["slot", "fair"])
@pytest.mark.parametrize("ranks, experts", UNEVEN[:2])
def test_drops(ranks, experts, rule):
  options = dict(overflow="drop", drop_by=rule, recv_capacity_per_rank=4)
  with uneven_layer(ranks, experts, alignment=2, **options) as layer:
    weights = np.random.default_rng(1).random((ranks * T, layer.top_k))
    case = Case(layer, routing_weights=weights.astype(np.float32))
    assert case.oracle.sizes().dropped_counts.any()
    case.check(everything, *case.inputs())


@pytest.mark.parametrize("ranks, experts", UNEVEN[:2])
def test_the_id_of_an_empty_slot_is_refused(ranks, experts):
  with uneven_layer(ranks, experts) as layer:
    bad = Case(layer).topk_idx
    bad[T + 1, 2] = experts
    words = ["rank 1", "topk_idx[1, 2] = 5", "num_experts = 5", "-1..4"]
    Case(layer, bad).check_error(words, sizes)
    Case(layer).check_round_trip()


def test_bits_do_not_depend_on_the_number_of_ranks():
  rng = np.random.default_rng(0)
  tokens = rng.standard_normal((12, H)).astype(np.float32)
  topk_idx = ROUTINGS["uniform"](rng, (12, 3), 5)
  weights = rng.random((12, 3)).astype(np.float32)
  outs = []
  for ranks in 1, 3, 4:
    with uneven_layer(ranks, 5, tokens=12) as layer:
      case = Case(layer, topk_idx, lead=(12 // ranks,))
      outs.append(case.run(round_trip, tokens, weights))
  assert_same(outs[1], np.asarray(outs[0]))
  assert_same(outs[2], np.asarray(outs[0]))
