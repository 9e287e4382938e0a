# SPDX-License-Identifier: Apache-2.0
"""Calls outside `jax.jit` compile each program once and keep no group open."""

import contextlib
import weakref

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from cases import assert_same, Case, expected, global_view
from conftest import make_mesh, to_global
import ep
from groups import bootstrap, E, H, layer, spec
from op_functions import dispatch, everything, round_trip

F = 6  # inner size of an expert

_COMPILED = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def compilations():
  """Yields a list that gets an entry for each program compiled in the block."""
  found = []

  def listen(event, duration, **_):
    if event == _COMPILED:
      found.append(duration)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield found
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)


def grad(fn):
  def call(*args):
    out, vjp = jax.vjp(fn, *args)
    return out, vjp(out)

  return call


def vmap(fn):
  return lambda *args: jax.vmap(fn)(*(jnp.stack([x, x + x]) for x in args))


def of_ops(case):
  """Returns a function of ops, and its arguments: a routing and arrays."""
  inputs = case.topk_idx, case.tokens(), case.weights()
  return global_view(case.layer, round_trip), [*map(case.put, inputs)]


def of_layer(case, activation=jax.nn.silu):
  def call(topk_idx, tokens, weights, experts):
    return ep.moe_layer(
      case.layer, tokens, topk_idx, weights, activation=activation, **experts
    )

  group = case.layer.group
  rng = np.random.default_rng(1)
  experts = {
    name: to_global(
      rng.normal(size=shape).astype(np.float32),
      group.mesh,
      PartitionSpec(group.axis_name),
    )
    for name, shape in dict(w_up=(E, H, F), w_down=(E, F, H)).items()
  }
  return call, [*of_ops(case)[1], experts]


def transformed(transform, fn):
  """Returns a function that transforms a new closure of `fn` in each call."""

  def call(topk_idx, *arrays):
    return transform(lambda *x: fn(topk_idx, *x))(*arrays)

  return call


def small_case():
  return Case(layer("dp2_ep2"), "with_unused_choices", whole=True)


@pytest.mark.parametrize(
  "of, transform", [(of_ops, lambda fn: fn), (of_ops, vmap), (of_layer, grad)]
)
def test_a_second_call_compiles_nothing(of, transform):
  fn, inputs = of(small_case())
  fn = transformed(transform, fn)
  with compilations() as found:
    fn(*inputs)
  assert found  # fails if JAX has renamed the event
  with compilations() as found:
    fn(*inputs)
  assert not found


def test_every_op_gives_the_bits_of_the_contract():
  case = Case(layer(), "skewed", whole=True)
  inputs = case.inputs()
  call = global_view(case.layer, everything)
  got = call(*map(case.put, (case.topk_idx, *inputs)))
  assert_same(got, expected(case, everything, *inputs))


def test_calls_that_differ_do_not_share_a_program():
  for lead, options in [
    ((5,), {}),
    ((2, 2), {}),
    ((5,), dict(top_k=2)),
    ((5,), dict(alignment=4)),
  ]:
    case = Case(layer(**options), "uniform", lead=lead, whole=True)
    inputs = case.tokens(), case.weights()
    got = global_view(case.layer, dispatch)(
      *map(case.put, (case.topk_idx, *inputs))
    )
    assert_same(got, expected(case, dispatch, *inputs))


def test_the_layer_depends_on_its_activation():
  case = Case(layer())
  for activation, is_zero in [(jnp.zeros_like, True), (jnp.tanh, False)]:
    fn, inputs = of_layer(case, activation)
    for shard in fn(*inputs).addressable_shards:
      assert np.any(shard.data) != is_zero


def test_a_layer_is_one_operation_of_an_eager_shard_map():
  """JAX compiles each operation of an eager shard_map in each call."""
  case = Case(layer())
  fn, inputs = of_layer(case)
  tokens = spec(case.layer)

  def call():
    return jax.shard_map(
      lambda *args: fn(*args),
      mesh=case.layer.group.mesh,
      in_specs=(tokens, tokens, tokens, PartitionSpec("ep")),
      out_specs=tokens,
    )(*inputs)

  call()
  with compilations() as found:
    call()
  # JAX compiles the layer and a reshard of each argument and of the result.
  assert 0 < len(found) <= len(jax.tree.leaves(inputs)) + 2


def test_a_group_closes_with_its_last_reference():
  """No program and no reference cycle keeps the group alive."""
  group = bootstrap(make_mesh({"ep": 4}))
  case = Case(ep.EpLayerConfig(group), whole=True)
  fn, inputs = of_ops(case)
  of_a_layer, inputs_of_layer = of_layer(case)
  jax.block_until_ready(transformed(grad, fn)(*inputs))
  jax.block_until_ready(of_a_layer(*inputs_of_layer))
  jax.block_until_ready(jax.jit(fn)(*inputs))
  lost = weakref.ref(group)
  del group, case, fn, of_a_layer
  assert lost() is None
