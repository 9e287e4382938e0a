# SPDX-License-Identifier: Apache-2.0
"""A handle is plain data, usable like any pytree of arrays.

Its fields have documented shapes. The rule `sizes` of rules_test tests counts.
"""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import assert_same, Case, expected
import ep
from groups import K, layer, of_one_process, spec, T
from op_functions import everything, handle_of, Ops, round_trip


@pytest.fixture(name="case")
def skewed_case():
  return Case(layer(top_k=2, alignment=4), "skewed", whole=True)


def test_serialised_and_back(case):
  """Each process can pickle its shards of a handle and load them again."""
  handle = case.run(handle_of)
  leaves, structure = jax.tree.flatten(handle)
  dtypes = [jnp.uint8, *[jnp.int32] * 5, jnp.bool_]
  assert [leaf.dtype for leaf in leaves] == dtypes
  assert hash(structure) == hash(jax.tree.structure(case.run(handle_of)))
  places = [(x.shape, x.sharding) for x in leaves]
  saved = pickle.dumps(
    [
      {str(s.index): np.asarray(s.data) for s in x.addressable_shards}
      for x in leaves
    ]
  )
  for leaf in leaves:
    leaf.delete()
  loaded = [
    jax.make_array_from_callback(*place, lambda index, x=x: x[str(index)])
    for place, x in zip(places, pickle.loads(saved), strict=True)
  ]

  @jax.jit
  def with_handle(handle, *inputs):
    return everything(Ops(handle), *inputs)

  inputs = case.inputs()
  actual = with_handle(structure.unflatten(loaded), *map(case.put, inputs))
  assert_same(actual, expected(case, everything, *inputs))


@of_one_process
def test_donated_tokens_and_handle(case):
  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(handle, tokens, weights):
    return handle, round_trip(Ops(handle), tokens, weights)

  tokens, weights = case.tokens(), np.ceil(4 * case.weights())
  handle, x = case.run(handle_of), case.put(tokens)
  for _ in range(3):
    given = handle, x
    handle, x = step(*given, case.put(weights))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    tokens = expected(case, round_trip, tokens, weights)
    assert_same(x, tokens)


def test_kept_has_the_axes_and_the_sharding_of_the_choices():
  config = layer("dp2_ep2", overflow="drop", recv_capacity_per_rank=4)
  case = Case(config, "to_one_expert", lead=(2, 2))
  topk_idx = case.put(case.topk_idx)
  handle = ep.ep_prepare(config, topk_idx)
  assert_same(Ops(handle).sizes(), case.oracle.sizes())
  assert handle.kept.sharding.is_equivalent_to(topk_idx.sharding, topk_idx.ndim)


@pytest.mark.skipif(jax.__version__ == "0.11.2", reason="XLA crashes")
def test_a_step_without_tokens():
  """A rank without tokens still has rows for one token."""
  case = Case(layer(), np.zeros((0, K), np.int32), lead=(0,))
  case.check(everything, *case.inputs())


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
