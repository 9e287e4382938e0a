# SPDX-License-Identifier: Apache-2.0
"""Tests several layers and groups in a program, capacities, and equality."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import pytest

from cases import Case, check
from conftest import make_mesh
import ep
from groups import (
  bootstrap,
  E,
  group,
  has_no_limits,
  K,
  layer,
  of_one_process,
  T,
)
from op_functions import everything, sizes


def claim(config):
  case = Case(config, "skewed", whole=True)
  return case, everything, *case.inputs()


def test_groups_over_different_axes_of_one_mesh():
  mesh = make_mesh({"x": 2, "y": 2})
  with bootstrap(mesh, axis_name="x") as x, bootstrap(mesh, axis_name="y") as y:
    check(claim(ep.EpLayerConfig(x)), claim(ep.EpLayerConfig(y)))


def test_groups_over_halves_of_the_devices():
  """Each process joins the groups that contain one of its devices."""
  groups = []
  for devices in jax.devices()[:2], jax.devices()[2:]:
    mesh = Mesh(devices, ("ep",))
    if jax.process_index() in {d.process_index for d in devices}:
      groups.append(bootstrap(mesh))
  for half in groups * 2:
    check(claim(ep.EpLayerConfig(half)))
  for half in groups:
    ep.ep_finalize(half)


@of_one_process
def test_a_layer_inherits_what_it_leaves_out():
  with bootstrap(
    make_mesh({"ep": 4}),
    top_k=2,
    alignment=4,
    overflow="drop",
    recv_capacity_per_rank=16,
  ) as group:
    config = ep.EpLayerConfig(group)
    assert (config.top_k, config.alignment) == (2, 4)
    assert (config.overflow, config.capacity) == ("drop", 16)
    Case(config, "to_one_expert").check_round_trip()


@pytest.mark.parametrize(
  "mesh, top_k, alignment",
  [("ep4", 1, 1), ("ep4", K, 4), ("dp2_ep2", 2, 128), ("dp4_ep1", K, 4)],
)
def test_the_default_capacity_is_the_worst_case(mesh, top_k, alignment):
  config = layer(mesh, top_k=top_k, alignment=alignment)
  local = E // config.ep_size
  rows = config.ep_size * T * min(top_k, local) + local * (alignment - 1)
  assert config.capacity == -(-rows // alignment) * alignment


@has_no_limits
@of_one_process
def test_without_a_limit_the_default_capacity_follows_the_tokens():
  config = ep.EpLayerConfig(
    group("dp2_ep2", max_tokens_per_rank=None), top_k=2, alignment=4
  )
  assert config.recv_capacity_per_rank is None
  for num_tokens in (1, 7):
    rows = 2 * num_tokens * 2 + 4 * 3  # P * T * K + L * (alignment - 1)
    assert config.capacity_for(num_tokens) == -(-rows // 4) * 4
  assert config.capacity_for(0) == config.capacity_for(1)
  with pytest.raises(ValueError, match="follows the tokens.*capacity_for"):
    _ = config.capacity
  case = Case(config, lead=(7,))
  handle = case.run(lambda ops: ops.handle)
  assert handle.capacity == ep.describe(handle).capacity == 40


@has_no_limits
@of_one_process
def test_a_capacity_factor_multiplies_the_even_load():
  """The capacity has at least one aligned segment for each expert of a rank."""
  unlimited = group("dp2_ep2", max_tokens_per_rank=None)
  config = ep.EpLayerConfig(unlimited, capacity_factor=1.25, alignment=4)
  assert config.capacity_for(8) == 32  # 1.25 * 8 * K, rounded up
  assert config.capacity_for(1) == 16  # a segment for each of 4 experts
  for large in 9.0, 1e308:
    assert config.replace(capacity_factor=large).capacity_for(8) == 60
  rounded = config.replace(capacity_multiple=24)
  assert rounded.capacity_for(8) == 48
  stated = config.replace(recv_capacity_per_rank=20)
  assert stated.capacity_for(8) == stated.capacity == 20
  limited = ep.EpLayerConfig(group("dp2_ep2"), capacity_factor=1.0)
  assert limited.capacity == limited.capacity_for(1) == T * K
  assert limited.replace(capacity_factor=2).capacity == 2 * T * K
  assert limited.replace(capacity_factor=None, top_k=1).capacity == 2 * T
  stated = ep.EpLayerConfig(limited.group, recv_capacity_per_rank=20)
  assert stated.replace(capacity_factor=2, alignment=4).capacity == 20
  drop = config.replace(overflow="drop")
  Case(drop, "skewed", lead=(8,)).check(sizes)


def test_repr_of_a_layer_and_its_group():
  config = ep.EpLayerConfig(group("dp2_ep2"), alignment=4, name="moe_3")
  shown = repr(config)
  assert shown.startswith("EpLayerConfig(name='moe_3', group='ep")
  assert f"top_k={K}, alignment=4, recv_capacity_per_rank=" in shown
  assert "overflow" not in shown and "Mesh" not in shown
  assert f"num_experts={E}, max_tokens_per_rank={T}" in repr(config.group)


@has_no_limits
def test_without_a_limit_an_explicit_capacity_stays():
  unlimited = group("dp2_ep2", max_tokens_per_rank=None)
  config = ep.EpLayerConfig(
    unlimited, recv_capacity_per_rank=24, overflow="drop"
  )
  assert config.capacity == config.capacity_for(99) == 24
  with pytest.raises(ValueError, match="at least 2, an aligned slab"):
    ep.EpLayerConfig(unlimited, top_k=1, recv_capacity_per_rank=1)


@has_no_limits
def test_without_a_limit_tokens_are_counted_in_32_bits():
  config = ep.EpLayerConfig(group(max_tokens_per_rank=None), name="moe_3")
  ids = jax.ShapeDtypeStruct((2**31 - 4, K), jnp.int32)
  with pytest.raises(ValueError, match=r'"moe_3".*tokens of a rank.*32 bits'):
    jax.eval_shape(lambda x: ep.ep_prepare(config, x), ids)


def test_configs_are_values():
  a, b = layer(top_k=2, name="a"), layer(top_k=2, name="a")
  assert a == b
  assert hash(a) == hash(b)
  assert a != layer(top_k=2, name="b")
  assert a != layer("dp2_ep2", top_k=2, name="a")


@pytest.mark.parametrize("bad", [-1, 2.5, True, "5"])
def test_capacity_for_refuses(bad):
  with pytest.raises((TypeError, ValueError), match="capacity_for: num_tokens"):
    layer().capacity_for(bad)


def test_a_layer_inherits_the_drop_policy_of_its_group():
  """`replace` keeps a drop policy, whether the group or the layer stated it."""
  fails = ep.EpLayerConfig(group(drop_by="fair"))
  drops = fails.replace(overflow="drop")
  chunks = fails.replace(overflow="chunk")
  assert {x.drop_by for x in (fails, drops, chunks)} == {"fair"}
  assert drops.replace(overflow="error") == fails
  stated = ep.EpLayerConfig(fails.group, drop_by="slot")
  assert stated.replace(overflow="drop").drop_by == "slot"
  assert drops.fingerprint == drops.replace().fingerprint
  other = group(drop_by="slot")
  copied = ep.EpLayerConfig(other, overflow="drop", drop_by=drops.drop_by)
  assert copied.drop_by == "fair"
