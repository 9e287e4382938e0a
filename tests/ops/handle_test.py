# SPDX-License-Identifier: Apache-2.0
"""A handle is plain data, usable like any pytree of arrays."""

import functools
import pickle

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import assert_same, Case, expected
from groups import layer, of_one_process
from op_functions import everything, handle_of, Ops, round_trip

STEPS = np.arange(1, 4)


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
  for _ in STEPS:
    given = handle, x
    handle, x = step(*given, case.put(weights))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    tokens = expected(case, round_trip, tokens, weights)
    assert_same(x, tokens)


def closed_over(ops, tokens, weights):
  def step(carry, scale):
    return carry, round_trip(ops, tokens * scale, weights)

  return lax.scan(step, None, jnp.float32(STEPS))[1]


def carried(ops, tokens, weights):
  def step(handle, scale):
    return handle, round_trip(Ops(handle), tokens * scale, weights)

  return lax.scan(step, ops.handle, jnp.float32(STEPS))[1]


def checkpointed(ops, *inputs):
  fn = jax.checkpoint(lambda handle, *x: closed_over(Ops(handle), *x))
  return fn(ops.handle, *inputs)


def with_grads(scan):
  def call(ops, tokens, weights, g):
    out, vjp = jax.vjp(lambda *x: scan(ops, *x), tokens, weights)
    return out, vjp(jnp.stack([g] * len(STEPS)))

  return call


@pytest.mark.parametrize("scan", [closed_over, carried, checkpointed])
def test_scan(case, scan):
  inputs = case.tokens(), case.weights(), case.tokens()
  actual = case.run(with_grads(scan), *inputs)
  assert_same(actual, expected(case, with_grads(closed_over), *inputs))
