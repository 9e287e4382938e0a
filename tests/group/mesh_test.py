# SPDX-License-Identifier: Apache-2.0
"""Groups of a mesh in another order, and of an `AbstractMesh` without devices.

A program on a mesh in another order is exact, or fails on all ranks.
"""

import jax
from jax import export
import jax.numpy as jnp
from jax.sharding import (
  AbstractMesh,
  AxisType,
  Mesh,
  NamedSharding,
  PartitionSpec,
)
import numpy as np
import pytest

from cases import assert_same, Case, expected, run_on
from conftest import make_mesh, refused
import ep
from groups import (
  bootstrap,
  E,
  failing,
  H,
  K,
  of_one_process,
  T,
)
from op_functions import Ops, round_trip, Sizes

AXES = {"dp": 2, "ep": 2}


@pytest.fixture
def group():
  group = bootstrap(make_mesh(AXES), name="mesh_test")
  yield group
  ep.ep_finalize(group)


def mesh_of(order, names):
  """Returns a 2 x 2 mesh of the group's devices in the given order."""
  devices = np.array(jax.devices()[:4])[np.array(order)]
  return Mesh(devices.reshape(2, 2), names, axis_types=(AxisType.Auto,) * 2)


def case_of(group):
  case = Case(ep.EpLayerConfig(group, name="moe_3"), whole=True)
  return case, case.tokens(), case.weights()


OTHERS = {
  "devices": mesh_of([0, 2, 1, 3], ("dp", "ep")),
  "domains_mixed": mesh_of([0, 3, 2, 1], ("dp", "ep")),
  "axes": mesh_of([0, 1, 2, 3], ("ep", "dp")),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_orders_of_the_devices_are_refused(group, name):
  case, *arrays = case_of(group)
  if group.backend == "xla":  # xla only needs the index of a rank.
    actual = run_on(OTHERS[name], case, round_trip, *arrays)
    return assert_same(actual, expected(case, round_trip, *arrays))
  with failing(group) as error:
    jax.block_until_ready(run_on(OTHERS[name], case, round_trip, *arrays))
  for word in ["ep_prepare", "moe_3", "mesh", "ep_bootstrap"]:
    assert word in str(error.value)


def test_another_order_of_the_axes_is_accepted(group):
  """A mesh may order its axes differently if each device keeps its index."""
  case, *arrays = case_of(group)
  mesh = mesh_of([0, 2, 1, 3], ("ep", "dp"))
  actual = run_on(mesh, case, round_trip, *arrays)
  assert_same(actual, expected(case, round_trip, *arrays))


@pytest.mark.skipif(
  jax.process_count() == 1, reason="one process has one order of devices"
)
def test_processes_with_different_orders_do_not_bootstrap():
  odd = jax.process_index() == jax.process_count() - 1
  mesh = mesh_of([0, 1, 3, 2] if odd else [0, 1, 2, 3], ("dp", "ep"))
  with refused("ep_bootstrap", "mesh = "):
    bootstrap(mesh)


# --- Abstract meshes ----------------------------------------------------------


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


def exported(mesh):
  """Exports a program of `round_trip` from shapes alone."""
  with bootstrap(mesh, name="plan", backend=None) as group:
    layer = ep.EpLayerConfig(group)

    def program(topk_idx, *x):
      handle = ep.ep_prepare(layer, topk_idx)
      return round_trip(Ops(handle), *x), Ops(handle).sizes()

    tokens, ids, weights = inputs(layer)
    return export.export(jax.jit(program))(ids, tokens, weights)


@of_one_process
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
