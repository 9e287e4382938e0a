# SPDX-License-Identifier: Apache-2.0
"""A group of an `AbstractMesh` traces and exports programs without devices."""

import jax
from jax import export
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
import numpy as np
import pytest

from cases import assert_same, Case, expected
from conftest import make_mesh
import ep
from groups import bootstrap, E, H, K, T
from op_functions import Ops, round_trip, Sizes

pytestmark = pytest.mark.skipif(
  jax.process_count() > 1, reason="one process shows it"
)

RANKS = 64
# By default jax.export refuses all custom calls, even those of XLA.
RAGGED = export.DisabledSafetyCheck.custom_call("ragged_all_to_all")


@pytest.fixture
def layer():
  mesh = AbstractMesh((8, 8), ("dp", "ep"))
  with bootstrap(mesh, num_experts=RANKS, backend=None) as group:
    yield ep.EpLayerConfig(group)


def inputs(layer):
  """Returns the global shapes of tokens, ids and weights."""
  group = layer.group
  sharding = NamedSharding(group.mesh, PartitionSpec(group.token_axes))
  return [
    jax.ShapeDtypeStruct(
      (group.num_token_ranks * T, width), dtype, sharding=sharding
    )
    for width, dtype in ((H, jnp.float32), (K, jnp.int32), (K, jnp.float32))
  ]


def loss(layer):
  def fn(tokens, topk_idx, weights):
    ops = Ops(ep.ep_prepare(layer, topk_idx))
    return jnp.sum(round_trip(ops, tokens, weights))

  return fn


def test_shapes_of_every_op(layer):
  def ops(tokens, topk_idx, weights):
    handle = ep.ep_prepare(layer, topk_idx)
    recv, recv_weights = ep.ep_dispatch(handle, tokens, weights)
    out = ep.ep_combine(handle, recv, weights=recv_weights)
    return handle, recv, recv_weights, out

  C, L = layer.capacity, layer.num_local_experts
  mem, *shapes = jax.tree.leaves(jax.eval_shape(ops, *inputs(layer)))
  assert (mem.shape[0], mem.dtype) == (RANKS, jnp.uint8)
  assert [(x.shape, x.dtype) for x in shapes] == [
    *(((RANKS, n), jnp.int32) for n in (L, L, 1, L, 1)),
    ((RANKS * T, K), jnp.bool_),
    ((RANKS, C, H), jnp.float32),
    ((RANKS, C), jnp.float32),
    ((RANKS * T, H), jnp.float32),
  ]


def test_shapes_of_gradients(layer):
  """Gradients have known shapes, inside shard_map and for a MoE layer."""
  spec = PartitionSpec(layer.group.token_axes)
  grad = jax.shard_map(
    jax.grad(loss(layer), argnums=(0, 2)),
    mesh=layer.group.mesh,
    in_specs=spec,
    out_specs=spec,
  )
  tokens, _, weights = args = inputs(layer)
  out = jax.eval_shape(grad, *args)
  assert [x.shape for x in out] == [tokens.shape, weights.shape]

  def value(w_up, w_down, *x):
    return jnp.sum(ep.moe_layer(layer, *x, w_up=w_up, w_down=w_down))

  w = [jax.ShapeDtypeStruct((RANKS, *x), jnp.float32) for x in ((H, 9), (9, H))]
  grads = jax.eval_shape(jax.grad(value, argnums=(0, 1)), *w, *args)
  assert [x.shape for x in grads] == [x.shape for x in w]


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_export_for_other_machines(layer, platform):
  result = export.export(
    jax.jit(jax.grad(loss(layer))),
    platforms=[platform],
    disabled_checks=[RAGGED],
  )(*inputs(layer))
  assert result.nr_devices == RANKS
  text = result.mlir_module()
  assert ("@ragged_all_to_all" in text) == (platform != "cpu")


def exported(mesh):
  """Exports a program of `round_trip` from shapes alone."""
  with bootstrap(mesh, name="plan", backend=None) as group:
    layer = ep.EpLayerConfig(group)

    def program(topk_idx, *x):
      handle = ep.ep_prepare(layer, topk_idx)
      return round_trip(Ops(handle), *x), Ops(handle).sizes()

    tokens, ids, weights = inputs(layer)
    return export.export(jax.jit(program))(ids, tokens, weights)


def test_an_exported_program_runs():
  program = jax.jit(exported(AbstractMesh((2, 2), ("dp", "ep"))).call)
  with bootstrap(make_mesh({"dp": 2, "ep": 2}), backend="xla") as group:
    case = Case(ep.EpLayerConfig(group), "skewed", whole=True)
    tokens, weights = case.tokens(), case.weights()
    args = [case.put(x) for x in (case.topk_idx, tokens, weights)]
    want = expected(case, round_trip, tokens, weights), case.oracle.sizes()
    assert_same(program(*args), want)

    # An exported program cannot call Python to raise an error. Instead, all
    # ranks of the domain return NaN outputs, and sizes of 0 or -1.
    refused = np.nan, Sizes(0, 0, -1, 0, -1, False)
    wrong = case.topk_idx.copy()
    wrong[0, 0] = E
    args[0] = case.put(wrong)
    want = jax.tree.map(np.array, want)
    for array, value in zip(
      *map(jax.tree.leaves, (want, refused)), strict=True
    ):
      array[: len(array) // 2] = value
    assert_same(program(*args), want)


def test_native_backends_need_devices():
  with pytest.raises(ValueError, match="AbstractMesh"):
    bootstrap(AbstractMesh((4,), ("ep",)), backend="host")
