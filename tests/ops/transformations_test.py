# SPDX-License-Identifier: Apache-2.0
"""JAX's transformations work on functions that exchange tokens.

See handle_test for handles in branches, concurrency_test for loops of unknown
length, and views_test for the views. One rank has no tokens to send, except in
the tests of derivatives.
"""

import jax
from jax import export, lax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np
import pytest

from cases import assert_same, Case, exchanges, expected, jit_quickly
from conftest import assert_alike, make_mesh, refused, to_global
import ep
from ep._src.base.backend import OPS
from groups import bootstrap, E, layer, not_with_xla, spec
from op_functions import block, block_and_back, Ops, round_trip

SCALES = np.arange(1, 3, dtype=np.float32)  # one per layer


@pytest.fixture(name="case")
def case_with_an_idle_rank():
  return Case(layer(top_k=2), "idle_rank", whole=True)


def inputs(case):
  """Draws tokens and weights whose products are exact in float32."""
  return case.tokens(), np.ceil(4 * case.weights())


def prepared(config, topk_idx):
  return Ops(ep.ep_prepare(config, topk_idx))


def shifted(topk_idx, step):
  """Returns another routing for each step; unused choices stay unused."""
  return jnp.where(topk_idx < 0, -1, (topk_idx + step) % E)


def with_grads(fn, primals, g):
  out, vjp = jax.vjp(fn, *primals)
  return out, vjp(g)


def residual_block(ops, x, weights, scale):
  recv, recv_weights = ops.dispatch(x, weights)
  return x + ops.combine(scale * recv, recv_weights)


@jit_quickly
def oracle_of_layers(oracles, g, *primals):
  def network(x, weights):
    for ops, scale in zip(oracles, SCALES, strict=True):
      x = residual_block(ops, x, weights, scale)
    return x

  return with_grads(network, primals, g)


def routings(case, count):
  ids = [shifted(case.topk_idx, i) for i in range(count)]
  return [Case(case.layer, np.asarray(x, np.int32)) for x in ids]


def stacked_handles(config):
  """Returns a network that prepares all handles in one scan."""

  def network(topk_idx, tokens, weights):
    def prepare(carry, step):
      return carry, ep.ep_prepare(config, shifted(topk_idx, step))

    def use(x, handle_and_scale):
      handle, scale = handle_and_scale
      return residual_block(Ops(handle), x, weights, scale), None

    _, handles = lax.scan(prepare, None, jnp.arange(len(SCALES)))
    return lax.scan(use, tokens, (handles, SCALES))[0]

  return network


def test_scan_over_layers_with_stacked_handles():
  config = layer("dp2_ep2", AxisType.Explicit, top_k=2)
  case = Case(config, "idle_rank", whole=True)
  network = stacked_handles(config)

  def program(topk_idx, g, *primals):
    return with_grads(lambda *x: network(topk_idx, *x), primals, g)

  arrays = case.tokens(), *inputs(case)
  args = [case.put(x) for x in (case.topk_idx, *arrays)]
  compiled = jax.jit(program).lower(*args).compile()
  oracles = [c.oracle for c in routings(case, len(SCALES))]
  assert_same(compiled(*args), oracle_of_layers(oracles, *arrays))
  assert exchanges(compiled).count("ep_prepare") == 1


def vmap_of_grad(f):
  return jax.vmap(
    lambda idx, x, w, g: with_grads(lambda *x: f(idx, *x), (x, w), g)
  )


def grad_of_vmap(f):
  return lambda idx, x, w, g: with_grads(
    lambda *x: jax.vmap(f)(idx, *x), (x, w), g
  )


@pytest.mark.parametrize(
  "transform, view", [(vmap_of_grad, "local"), (grad_of_vmap, "global")]
)
def test_each_example_has_its_gradients(case, transform, view):
  config = case.layer
  by_rank = PartitionSpec(None, *spec(config))
  cases = routings(case, 3)
  tokens, weights = inputs(case)
  batch = [
    (c.topk_idx, tokens + i, weights + i, case.tokens())
    for i, c in enumerate(cases)
  ]

  def example(topk_idx, tokens, weights):
    return block(prepared(config, topk_idx), tokens, weights)

  program, mesh = transform(example), config.group.mesh
  if view == "local":
    program = jax.shard_map(
      program, mesh=mesh, in_specs=by_rank, out_specs=by_rank
    )
  arrays = [np.stack(x) for x in zip(*batch, strict=True)]
  actual = jax.jit(program)(*(to_global(x, mesh, by_rank) for x in arrays))
  examples = [
    jit_quickly(block_and_back)(c.oracle, *x)
    for c, (_, *x) in zip(cases, batch, strict=True)
  ]
  assert_same(actual, jax.tree.map(lambda *x: np.stack(x), *examples))


def program_of(config):
  def round_trip_again(topk_idx, *x):
    return round_trip(prepared(config, topk_idx), *x)

  return jax.jit(round_trip_again)


def avals(case, *arrays):
  sharding = NamedSharding(case.layer.group.mesh, spec(case.layer))
  return [
    jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in arrays
  ]


EXPORTED = dict(name="exported", top_k=2)
DISABLED_CHECKS = [export.DisabledSafetyCheck.custom_call(op) for op in OPS]


def exported_case(group):
  return Case(ep.EpLayerConfig(group), "idle_rank", whole=True)


def export_program(case):
  arrays = case.topk_idx, *inputs(case)
  make = export.export(program_of(case.layer), disabled_checks=DISABLED_CHECKS)
  return make(*avals(case, *arrays))


def check_call(case, fn):
  """Checks that `fn`, an exported program, gives the results of `case`."""
  tokens, weights = inputs(case)
  args = [case.put(x) for x in (case.topk_idx, tokens, weights)]
  assert_same(fn(*args), expected(case, round_trip, tokens, weights))


def test_exported():
  """A loaded program uses the open group of the same name."""
  pytest.importorskip("flatbuffers", reason="the format of jax.export's files")
  mesh = make_mesh({"ep": 4})
  with bootstrap(mesh, **EXPORTED) as group:
    saved = export_program(exported_case(group)).serialize(vjp_order=1)
  loaded = export.deserialize(saved)
  with bootstrap(mesh, **EXPORTED) as group:
    case = exported_case(group)
    check_call(case, loaded.call)
    check_call(
      case, jax.jit(lambda *x: loaded.call(*x) / 2 + loaded.call(*x) / 2)
    )

    def grads(fn):
      return jax.jit(
        jax.grad(lambda x, idx, w: jnp.sum(jnp.square(fn(idx, x, w))))
      )

    tokens, weights = inputs(case)
    args = [case.put(x) for x in (tokens, case.topk_idx, weights)]
    programs = loaded.call, program_of(case.layer)
    assert_alike(*(grads(fn)(*args) for fn in programs))


@not_with_xla("its programs need no group to run")
def test_a_loaded_program_refuses_a_group_of_other_sizes():
  mesh = make_mesh({"ep": 4})
  with bootstrap(mesh, **EXPORTED) as group:
    case = exported_case(group)
    exported = export_program(case)
  args = [case.put(x) for x in (case.topk_idx, *inputs(case))]
  other = dict(EXPORTED, num_experts=2 * group.num_experts)
  words = 'group "exported"', "num_experts = 8", "num_experts = 16"
  with bootstrap(mesh, **other), refused(*words):
    jax.block_until_ready(jax.jit(exported.call)(*args))


# --- Derivatives -------------------------------------------------------------

# The function is a polynomial of whole numbers. float32 evaluates it exactly,
# so the order of JAX's sums does not matter.


@pytest.fixture(name="small")
def small_case():
  return Case(layer(top_k=2), "with_unused_choices", whole=True)


def polynomial(ops, tokens, weights):
  """Returns a polynomial of degree 2 in the tokens and in the weights."""
  recv, recv_weights = ops.dispatch(tokens, weights)
  rows = recv * recv * recv_weights[..., None]
  return ops.combine(rows, recv_weights)


def forward(ops, tokens, weights, g):
  primals, tangents = (tokens, weights), (g, weights)
  return jax.jvp(lambda *x: polynomial(ops, *x), primals, tangents)


def linearized(ops, tokens, weights, g):
  out, f = jax.linearize(lambda *x: polynomial(ops, *x), tokens, weights)
  return out, f(g, weights), f(tokens, weights)


def reverse_over_forward(ops, tokens, weights, g):
  primals = tokens, weights, g
  _, vjp = jax.vjp(lambda *x: forward(ops, *x), *primals)
  return vjp((g, tokens))


@pytest.mark.parametrize(
  "derivative",
  [
    linearized,
    reverse_over_forward,
  ],
)
def test_derivative(small, derivative):
  """The rule `second_order` of rules_test tests reverse over reverse mode."""
  small_weights = np.ceil(4 * small.weights())
  small.check(derivative, small.tokens(), small_weights, small.tokens())


def test_hessian(small):
  """jax.hessian is forward over reverse mode, with a `vmap` in each."""

  def loss(scales, ops, tokens, weights):
    recv, recv_weights = ops.dispatch(tokens, weights * scales[0])
    return jnp.sum(ops.combine(recv * scales[1], recv_weights) ** 2)

  def hessian(ops, *x):
    return jax.hessian(loss)(jnp.ones(2), ops, *x)

  arrays = small.tokens(), np.ceil(4 * small.weights())
  want = jit_quickly(hessian)(small.oracle, *arrays)
  assert_same(small.run(hessian, *arrays), np.asarray(want))


def test_dispatch_has_a_gradient_if_one_output_is_used(small):
  def of_rows(ops, tokens, weights, g):
    return jax.vjp(lambda x: ops.dispatch(x, weights)[0], tokens)[1](g)

  def of_weights(ops, tokens, weights, g):
    return jax.vjp(lambda w: ops.dispatch(tokens, w)[1], weights)[1](g)

  small.check(of_rows, small.tokens(), small.weights(), small.rows())
  small.check(of_weights, small.tokens(), small.weights(), small.row_weights())
