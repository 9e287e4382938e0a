# SPDX-License-Identifier: Apache-2.0
"""ep_prepare counts each expert's rows; outputs have documented shapes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import assert_same, Case, expected
import ep
from ep.testing._routings import ROUTINGS
from groups import K, layer, of_one_process, spec, T
from op_functions import Ops, round_trip, sizes


@pytest.mark.parametrize(
  "mesh, alignment",
  [("dp2_ep2", 4), ("ep4", 1), ("ep2_dp2", 1), ("dp4_ep1", 4)],
)
def test_counts_of_every_routing(mesh, alignment):
  for routing in ROUTINGS:
    Case(layer(mesh, alignment=alignment), routing).check(sizes)


def test_kept_has_the_axes_and_the_sharding_of_the_choices():
  config = layer("dp2_ep2", overflow="drop", recv_capacity_per_rank=4)
  case = Case(config, "to_one_expert", lead=(2, 2))
  topk_idx = case.put(case.topk_idx)
  handle = ep.ep_prepare(config, topk_idx)
  assert_same(Ops(handle).sizes(), case.oracle.sizes())
  assert handle.kept.sharding.is_equivalent_to(topk_idx.sharding, topk_idx.ndim)


def test_a_step_without_tokens():
  no_tokens = np.zeros((0, K), np.int32)
  Case(layer(), no_tokens, lead=(0,)).check(sizes)


def test_ranks_can_branch_on_the_largest_load():
  """All ranks take the same branch, so a branch may contain exchanges."""
  busy, idle = Case(layer(), "to_one_expert"), Case(layer(), "idle")

  @jax.jit
  @functools.partial(
    jax.shard_map,
    mesh=busy.layer.group.mesh,
    in_specs=spec(busy.layer),
    out_specs=spec(busy.layer),
  )
  def program(topk_idx, tokens, weights):
    handle = ep.ep_prepare(busy.layer, topk_idx)

    def rest(tokens):
      return jnp.zeros_like(tokens)

    def work(tokens):
      return ep.ep_combine(handle, *ep.ep_dispatch(handle, tokens, weights))

    return jax.lax.cond(handle.max_recv_tokens[0] > T, work, rest, tokens)

  for case in busy, idle:
    inputs = case.tokens(), case.weights()
    out = program(*map(case.put, (case.topk_idx, *inputs)))
    assert_same(out, expected(case, round_trip, *inputs))


@of_one_process
def test_int64_ids_give_the_results_of_int32():
  case = Case(layer(), "with_unused_choices")
  with jax.enable_x64(True):
    wide = Case(case.layer, case.topk_idx.astype(np.int64))
    assert wide.put(wide.topk_idx).dtype == jnp.int64
    actual = wide.run(sizes)
  assert_same(actual, case.oracle.sizes())
