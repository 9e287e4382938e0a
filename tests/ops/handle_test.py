# SPDX-License-Identifier: Apache-2.0
"""A handle is plain data: it can be used wherever a pytree of arrays can."""

import pickle

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import assert_same, Case, expected
import ep
from groups import layer
from op_functions import block, block_and_back, everything, Ops, round_trip

STEPS = np.arange(1, 4)


@pytest.fixture(name="case")
def skewed_case():
  return Case(layer(top_k=2, alignment=4), "skewed", whole=True)


def handle_of(ops):
  return ops.handle


def check_handle(case, handle):
  """Checks that all ops work on a handle that another program has made."""
  inputs = case.inputs()
  with_handle = jax.jit(lambda handle, *x: everything(Ops(handle), *x))
  actual = with_handle(handle, *map(case.put, inputs))
  assert_same(actual, expected(case, everything, *inputs))


def test_jit_boundary(case):
  check_handle(case, case.run(handle_of))


def test_flattened_and_back(case):
  leaves, structure = jax.tree.flatten(case.run(handle_of))
  dtypes = [jnp.uint8, *[jnp.int32] * 5, jnp.bool_]
  assert [leaf.dtype for leaf in leaves] == dtypes
  assert hash(structure) == hash(jax.tree.structure(case.run(handle_of)))
  check_handle(case, structure.unflatten(leaves))


def test_serialised_and_back(case):
  """Each process can pickle its shards of a handle and load them again."""
  handle = case.run(handle_of)
  leaves, structure = jax.tree.flatten(handle)
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
  check_handle(case, structure.unflatten(loaded))


def test_donated(case):
  """A training step can take a donated handle and return it."""
  step = jax.jit(
    lambda handle, *x: (handle, round_trip(Ops(handle), *x)),
    donate_argnums=0,
  )
  tokens, weights = case.tokens(), case.weights()
  handle = case.run(handle_of)
  for scale in STEPS:
    given = handle
    x = tokens * np.float32(scale)
    handle, out = step(given, case.put(x), case.put(weights))
    assert given.mem.is_deleted()
    assert_same(out, expected(case, round_trip, x, weights))


def closed_over(ops, tokens, weights):
  def step(carry, scale):
    return carry, round_trip(ops, tokens * scale, weights)

  return lax.scan(step, None, jnp.float32(STEPS))[1]


def carried(ops, tokens, weights):
  def step(handle, scale):
    return handle, round_trip(Ops(handle), tokens * scale, weights)

  return lax.scan(step, ops.handle, jnp.float32(STEPS))[1]


@pytest.mark.parametrize("scan", [closed_over, carried])
def test_scan(case, scan):
  tokens, weights = case.tokens(), case.weights()
  steps = [
    expected(case, round_trip, tokens * np.float32(step), weights)
    for step in STEPS
  ]
  assert_same(case.run(scan, tokens, weights), np.stack(steps))


@pytest.mark.parametrize("scan", [closed_over, carried])
def test_backward_of_scan(case, scan):
  def grads(ops, tokens, weights, g):
    _, vjp = jax.vjp(lambda *x: scan(ops, *x), tokens, weights)
    return vjp(jnp.stack([g] * len(STEPS)))

  def grads_of_one_step(oracle, tokens, weights, g):
    _, vjp = jax.vjp(lambda *x: round_trip(oracle, *x), tokens, weights)
    return jax.tree.map(lambda x: x * STEPS.sum(dtype=np.float32), vjp(g))

  inputs = case.tokens(), case.weights(), case.tokens()
  assert_same(
    case.run(grads, *inputs), expected(case, grads_of_one_step, *inputs)
  )


def shifted(topk_idx, step):
  """Returns another routing for each step."""
  return jnp.where(topk_idx < 0, -1, (topk_idx + step) % 8)


def test_stacked(case):
  """One loop can prepare a handle per step, and another loop use them."""

  @jax.jit
  def program(topk_idx, tokens, weights):
    def prepare(carry, step):
      return carry, ep.ep_prepare(case.layer, shifted(topk_idx, step))

    def use(carry, handle):
      return carry, round_trip(Ops(handle), tokens, weights)

    _, handles = lax.scan(prepare, None, STEPS)
    return lax.scan(use, None, handles)[1]

  tokens, weights = case.tokens(), case.weights()
  actual = program(*map(case.put, (case.topk_idx, tokens, weights)))
  steps = []
  for step in STEPS:
    ids = np.asarray(shifted(case.topk_idx, step), np.int32)
    at_step = Case(case.layer, ids, whole=True)
    steps.append(expected(at_step, round_trip, tokens, weights))
  assert_same(actual, np.stack(steps))


@pytest.mark.parametrize("inside", [False, True])
def test_checkpoint(case, inside):
  """A rematerialised block can take the handle, or prepare it inside."""

  def prepared(topk_idx):
    return Ops(ep.ep_prepare(case.layer, topk_idx))

  @jax.checkpoint
  def checkpointed(routing, *x):
    return block(prepared(routing) if inside else Ops(routing), *x)

  @jax.jit
  def program(topk_idx, tokens, weights, g):
    routing = topk_idx if inside else prepared(topk_idx).handle
    out, vjp = jax.vjp(lambda *x: checkpointed(routing, *x), tokens, weights)
    return out, vjp(g)

  inputs = case.tokens(), case.weights(), case.tokens()
  actual = program(*map(case.put, (case.topk_idx, *inputs)))
  assert_same(actual, expected(case, block_and_back, *inputs))
