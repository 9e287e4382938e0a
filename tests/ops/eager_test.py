# SPDX-License-Identifier: Apache-2.0
"""Calls outside of `jax.jit` compile once, and keep no group open."""

import contextlib
import weakref

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import pytest

from cases import assert_same, Case, expected, global_view
from conftest import assert_shards_close, make_mesh, to_global
import ep
from groups import bootstrap, E, H, layer, spec
from op_functions import block, everything, round_trip

F = 6  # inner size of an expert

_COMPILED = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def compilations():
  """Yields a list with an entry for each program compiled in the block."""
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
  """Returns `fn`'s result and the transpose of its derivative."""

  def call(*args):
    out, vjp = jax.vjp(fn, *args)
    return out, vjp(out)

  return call


def jvp(fn):
  return lambda *args: jax.jvp(fn, args, args)


def vmap(fn):
  return lambda *args: jax.vmap(fn)(*(jnp.stack([x, x + x]) for x in args))


def plain(fn):
  return fn


def of_ops(case):
  """Returns a function of a routing and arrays, and the arrays."""
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
  """Returns `fn` with its arrays transformed, by closures of each call."""

  def call(topk_idx, *arrays):
    return transform(lambda *x: fn(topk_idx, *x))(*arrays)

  return call


@pytest.mark.parametrize(
  "of, transform",
  [(of_ops, t) for t in (plain, grad, jvp, vmap)]
  + [(of_layer, t) for t in (plain, grad, jvp)],
)
def test_a_second_call_compiles_nothing(of, transform):
  """Its results are those of a jitted call."""
  case = Case(layer("dp2_ep2"), "with_unused_choices", whole=True)
  fn, inputs = of(case)
  fn = transformed(transform, fn)
  everywhere = NamedSharding(case.layer.group.mesh, PartitionSpec())
  with compilations() as found:
    want = jax.jit(fn, out_shardings=everywhere)(*inputs)
  assert found  # or JAX has another name for the event
  fn(*inputs)
  with compilations() as found:
    got = fn(*inputs)
  assert not found
  for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
    assert_shards_close(a, np.asarray(b), rtol=1e-5, atol=1e-5)


def test_every_op_gives_the_bits_of_the_contract():
  case = Case(layer(), "skewed", whole=True)
  inputs = case.inputs()
  call = global_view(case.layer, everything)
  got = call(*map(case.put, (case.topk_idx, *inputs)))
  assert_same(got, expected(case, everything, *inputs))


def test_calls_that_differ_do_not_share_a_program():
  """Layers, routings and shapes may differ from call to call."""
  for lead, options in [
    ((5,), {}),
    ((2, 2), {}),
    ((5,), dict(top_k=2)),
    ((5,), dict(alignment=4)),
    ((5,), dict(name="other")),
  ]:
    case = Case(layer(**options), "uniform", lead=lead, whole=True)
    inputs = case.tokens(), case.weights()
    got = global_view(case.layer, block)(
      *map(case.put, (case.topk_idx, *inputs))
    )
    assert_same(got, expected(case, block, *inputs))


def test_the_layer_depends_on_its_activation():
  case = Case(layer())
  for activation, is_zero in [(jnp.zeros_like, True), (jnp.tanh, False)]:
    fn, inputs = of_layer(case, activation)
    for shard in fn(*inputs).addressable_shards:
      assert np.any(shard.data) != is_zero


def test_the_layer_is_one_step_of_an_eager_shard_map():
  """JAX compiles each step of it anew in each call."""
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
  assert 0 < len(found) <= len(jax.tree.leaves(inputs)) + 2  # and the result


def test_a_group_closes_with_its_last_reference():
  """Neither a program nor a cycle of references keeps it."""
  group = bootstrap(make_mesh({"ep": 4}))
  case = Case(ep.EpLayerConfig(group), whole=True)
  for of in of_ops, of_layer:
    fn, inputs = of(case)
    for call in fn, transformed(grad, fn), jax.jit(fn):
      jax.block_until_ready(call(*inputs))
  lost = weakref.ref(group)
  del group, case, fn, call
  assert lost() is None
