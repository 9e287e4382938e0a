# SPDX-License-Identifier: Apache-2.0
"""overflow="chunk" gives what a capacity for any routing gives.

The numbers are whole and small, so that XLA rounds none, in whatever order it
adds: all results have the same bits.
"""

import dataclasses
import functools
import re

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from cases import Case
from conftest import to_global
import ep
from groups import E, group, H, K, layer, spec, T

F = 9  # inner size of an expert

# Rows of capacities that need 3 and 2 chunks of the tokens of a rank.
CAPACITIES = {"ep4": 16, "dp2_ep2": 24}


def make_layers(mesh, **options):
  """Returns a layer that may send chunks, and one that never needs to."""
  rows = CAPACITIES[mesh]
  return (
    layer(mesh, overflow="chunk", recv_capacity_per_rank=rows, **options),
    layer(mesh, **options),
  )


def make_routings(mesh):
  """Returns a routing for which no domain needs chunks, one, and all.

  The last has a token without choices. With "dp2_ep2", the second domain alone
  needs chunks for the second routing.
  """
  tokens = np.arange(4 * T)[:, None]
  even = (tokens * K + np.arange(K)) % E
  busy = np.broadcast_to(np.arange(K), even.shape)
  last = tokens >= 2 * T
  unused = np.where(tokens == 7, -1, busy)
  return [
    x.astype(np.int32) for x in (even, np.where(last, busy, even), unused)
  ]


def make_arrays(case):
  rng = np.random.default_rng(1)

  def matrix(*shape):
    return rng.integers(-1, 2, shape).astype(np.float32)

  matrices = {
    "w_up": matrix(E, H, F),
    "w_gate": matrix(E, H, F),
    "w_down": matrix(E, F, H),
  }
  weights = rng.integers(1, 4, case.topk_idx.shape).astype(np.float32)
  return case.tokens(), weights, matrices


def put(case, *arrays):
  mesh, axis = case.layer.group.mesh, case.layer.group.axis_name
  *tokens, matrices = arrays
  return (
    *map(case.put, tokens),
    {n: to_global(w, mesh, PartitionSpec(axis)) for n, w in matrices.items()},
  )


moe_layer = functools.partial(ep.moe_layer, activation=jax.nn.relu)


def with_gradients(layer):
  """Returns a function to the output and the gradients of a loss of it."""

  def call(topk_idx, *arrays):
    def loss(tokens, weights, matrices):
      out = moe_layer(layer, tokens, topk_idx, weights, **matrices)
      return jnp.sum(out * (1 + jnp.arange(H) % 3)), out

    grads, out = jax.grad(loss, (0, 1, 2), has_aux=True)(*arrays)
    return out, *grads

  return call


def local(layer, check_vma):
  tokens, experts = spec(layer), PartitionSpec(layer.group.axis_name)
  return jax.shard_map(
    with_gradients(layer),
    mesh=layer.group.mesh,
    in_specs=(tokens, tokens, tokens, experts),
    out_specs=(tokens, tokens, tokens, experts),
    check_vma=check_vma,
  )


VIEWS = {
  "global": with_gradients,
  "local": lambda layer: local(layer, True),
  "local_unchecked": lambda layer: local(layer, False),
}


def assert_same(actual, expected):
  for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
    for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
      np.testing.assert_array_equal(
        np.asarray(x.data).view("u4"), np.asarray(y.data).view("u4")
      )


def assert_close(actual, expected):
  for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
    for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
      np.testing.assert_allclose(x.data, y.data, 1e-5, 1e-5)


@pytest.mark.parametrize(
  "mesh, view, alignment",
  [
    ("ep4", "global", 1),
    ("dp2_ep2", "local", 1),
    ("dp2_ep2", "global", 4),
    ("ep4", "local_unchecked", 1),
  ],
)
def test_results_are_those_of_a_capacity_for_any_routing(mesh, view, alignment):
  chunked, roomy = make_layers(mesh, alignment=alignment)
  programs = [jax.jit(VIEWS[view](x)) for x in (chunked, roomy)]
  branches = []
  for topk_idx in make_routings(mesh):
    case = Case(chunked, topk_idx, whole=True)
    branches.append(needs_chunks(case))
    arrays = put(case, topk_idx, *make_arrays(case))
    actual, expected = (program(*arrays) for program in programs)
    assert_same(actual, expected)
  assert not branches[0].any() and branches[2].all()
  assert (branches[1].any() and not branches[1].all()) or mesh == "ep4"


def needs_chunks(case):
  """Returns for each rank whether its domain needs chunks."""
  rows = np.asarray(case.oracle.sizes().max_recv_tokens)
  return rows > case.layer.capacity


def test_layers_of_a_model_in_a_scan():
  """A scan of whole layers gives what roomy ones do, and drops nothing."""
  config = ep.MoEConfig(
    H, F, E, K, biases=True, shared_inner=3, capacity_factor=1.5
  )
  chunked = dataclasses.replace(config, overflow="chunk")
  roomy = dataclasses.replace(config, capacity_factor=None)
  params = ep.moe.init(jax.random.key(0), config)
  rng = np.random.default_rng(0)
  # The router of the second layer prefers the experts of one rank.
  params = {n: np.stack([p, p]) for n, p in params.items()}
  params["router"][1, :, :K] += 9
  x = np.abs(rng.normal(size=(4 * T, H))).astype(np.float32)
  mesh_group = group("ep4")
  specs = {
    n: PartitionSpec(None, *s)
    for n, s in ep.moe.partition_specs(config, "ep").items()
  }
  mesh = mesh_group.mesh
  params = {n: to_global(p, mesh, specs[n]) for n, p in params.items()}
  x = to_global(x, mesh, PartitionSpec("ep"))

  def loss_fn(config, params, x):
    layer = ep.MoE(config, mesh_group)

    @functools.partial(
      jax.checkpoint,
      policy=jax.checkpoint_policies.save_only_these_names("ep_routing"),
    )
    def block(x, params):
      y, metrics = layer(params, x)
      return jnp.abs(x + y), metrics

    y, metrics = lax.scan(block, x, params)
    return jnp.sum(y * y), (y, metrics)

  def run(config):
    grad = jax.value_and_grad(loss_fn, argnums=(1, 2), has_aux=True)
    return jax.jit(functools.partial(grad, config))(params, x)

  (_, (y, metrics)), (of_params, of_x) = run(chunked)
  (_, (expected, _)), (want_params, want_x) = run(roomy)
  capacity = ep.MoE(chunked, mesh_group).ep_layer.capacity
  rows = np.asarray(metrics.max_rank_rows)
  assert rows[0] <= capacity < rows[1]
  assert not np.asarray(metrics.dropped).any()
  assert_close((y, of_params, of_x), (expected, want_params, want_x))


@pytest.mark.skipif(
  jax.process_count() > 1,
  reason="each process would compile each operation by itself",
)
def test_eager_calls_and_their_handle():
  """The handle is that of one exchange of all tokens, which drops rows."""
  chunked, roomy = make_layers("ep4")
  case = Case(chunked, make_routings("ep4")[1], whole=True)
  tokens, weights, matrices = make_arrays(case)
  out, handle = moe_layer(
    chunked, tokens, case.topk_idx, weights, **matrices, return_handle=True
  )
  expected = moe_layer(roomy, tokens, case.topk_idx, weights, **matrices)
  assert_same(out, expected)
  assert handle.layer == chunked
  assert handle.max_recv_tokens[0, 0] > chunked.capacity
  assert np.asarray(handle.dropped_counts).any()


def test_gradients_of_gradients():
  chunked, roomy = make_layers("ep4")
  case = Case(chunked, make_routings("ep4")[1], whole=True)

  @functools.partial(jax.jit, static_argnums=0)
  def product(layer, topk_idx, tokens, *rest):
    """Returns the Hessian of the loss of tokens, times its gradient."""

    def grad(tokens):
      return with_gradients(layer)(topk_idx, tokens, *rest)[1]

    out, vjp = jax.vjp(grad, tokens)
    return vjp(out)

  arrays = put(case, case.topk_idx, *make_arrays(case))
  assert_close(product(chunked, *arrays), product(roomy, *arrays))


def test_memory_is_that_of_the_capacity():
  """The program has no array of the rows that any routing may need."""
  chunked, roomy = make_layers("ep4")
  case = Case(chunked, make_routings("ep4")[1], whole=True)
  shapes = []
  for config in (chunked, roomy):
    arrays = put(case, case.topk_idx, *make_arrays(case))
    text = jax.jit(with_gradients(config)).lower(*arrays).as_text()
    found = re.findall(rf"tensor<(\d+)x(?:{H}|{F})xf32>", text)
    shapes.append(set(map(int, found)))
  assert chunked.capacity in shapes[0] and roomy.capacity not in shapes[0]
  assert roomy.capacity in shapes[1]


@pytest.mark.parametrize(
  "change, message",
  [
    (dict(recv_capacity_per_rank=2), "may need 8 rows"),
    (dict(num_candidates=K + 1), "num_candidates = 4"),
    (dict(deterministic=True), "deterministic = True"),
    (dict(activation=True), "closes over values that are traced"),
  ],
)
def test_what_chunks_cannot_do(change, message):
  chunked, _ = make_layers("ep4", name="moe_3")
  case = Case(chunked, make_routings("ep4")[1], whole=True)
  tokens, weights, matrices = make_arrays(case)
  with pytest.raises(ValueError, match=rf'"moe_3".*{message}'):
    if "deterministic" in change:
      config = ep.MoEConfig(
        H,
        F,
        E,
        K,
        deterministic=True,
        capacity_factor=1.0,
        overflow="chunk",
        name="moe_3",
      )
      layer = ep.MoE(config, group("ep4", max_tokens_per_rank=None))
      many = np.zeros((4 * 200, H), np.float32)
      layer(ep.moe.init(jax.random.key(0), config), many)
    elif "activation" in change:

      def loss(slope):
        out = ep.moe_layer(
          chunked,
          tokens,
          case.topk_idx,
          weights,
          **matrices,
          activation=lambda x: slope * x,
        )
        return out.sum()

      jax.grad(loss)(1.0)
    else:
      small = dataclasses.replace(chunked, **change)
      ep.moe_layer(small, tokens, case.topk_idx, weights, **matrices)


def test_forward_mode_is_refused_in_a_sentence():
  """JAX would say that it cannot differentiate a `custom_vjp`."""
  case = Case(make_layers("ep4")[0], whole=True)
  tokens, weights, matrices = put(case, *make_arrays(case))
  args = tokens, case.put(case.topk_idx), weights, matrices

  def of_tokens(idx, weights, matrices):
    return lambda x: moe_layer(case.layer, x, idx, weights, **matrices)

  def jvp(tokens, *others):
    return jax.jvp(of_tokens(*others), (tokens,), (tokens,))

  def linearize(tokens, *others):
    _, linear = jax.linearize(of_tokens(*others), tokens)
    return linear(tokens)

  calls = [jax.jit(jvp), jax.jit(linearize)]
  if jax.process_count() == 1:  # of several, none closes over global arrays
    calls += [jvp, linearize]
  for call in calls:
    with pytest.raises(
      TypeError,
      match='overflow="chunk" .layer "moe".: the layer has reverse mode alone',
    ):
      call(*args)
