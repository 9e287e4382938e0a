# SPDX-License-Identifier: Apache-2.0
"""Tests groups and layers: bootstrap, resize, capacities, copies, closing."""

import copy
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
import threading

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np
import pytest

from cases import assert_same, Case, check, expected, global_view
from conftest import make_mesh, refused
import ep
from ep._src.backends.xla.backend import XlaConnection
from ep._src.native import ffi
import groups
from groups import (
  BACKEND,
  bootstrap,
  E,
  GPU,
  group,
  H,
  has_no_limits,
  K,
  layer,
  of_one_process,
  T,
)
from op_functions import everything, Ops, round_trip, sizes

of_host = pytest.mark.skipif(
  GPU or BACKEND == "xla", reason="only host has sockets and this library"
)


@has_no_limits
def test_a_group_needs_no_sizes():
  """Ops take any number of tokens, any hidden size and any dtype."""
  mesh = make_mesh({"dp": 2, "ep": 2})
  with ep.ep_bootstrap(mesh, num_experts=E, backend=BACKEND) as group:
    claims = []
    for lead, top_k, dtype in ((1,), 1, jnp.bfloat16), ((2, 9), K, jnp.float32):
      config = ep.EpLayerConfig(group, top_k=top_k, alignment=4)
      case = Case(config, "skewed", lead=lead, hidden=H + top_k)
      claims.append((case, everything, *case.inputs(dtype)))
    check(*claims)


def test_ep_resize_replaces_a_group():
  """After `ep_resize`, the old group's layers, handles and programs fail."""
  mesh = make_mesh({"ep": 4})
  old = bootstrap(mesh, name="grows", recv_capacity_per_rank=32)
  case = Case(ep.EpLayerConfig(old))
  arrays = case.tokens(), case.weights()
  want = expected(case, round_trip, *arrays)
  inputs = [case.put(x) for x in (case.topk_idx, *arrays)]
  program = (
    jax.jit(global_view(case.layer, round_trip)).lower(*inputs).compile()
  )
  handle = jax.block_until_ready(ep.ep_prepare(case.layer, inputs[0]))
  in_flight = [program(*inputs) for _ in range(3)]
  with jax.set_mesh(mesh):
    group = ep.ep_resize(old, max_tokens_per_rank=2 * T, hidden_dim=2 * H)
  with group:
    for outputs in in_flight:
      assert_same(outputs, want)
    kept = ("name", "mesh", "top_k", "overflow", "backend", "exit_after_s")
    assert all(getattr(group, name) == getattr(old, name) for name in kept)
    case = Case(ep.EpLayerConfig(group), lead=(2 * T,), hidden=2 * H)
    assert case.layer.capacity == 4 * 2 * T * (E // 4)
    case.check_round_trip()
    with pytest.raises(RuntimeError, match='"grows" was finalized'):
      ep.ep_prepare(ep.EpLayerConfig(old), inputs[0])
    with pytest.raises(RuntimeError, match='"grows" was finalized'):
      ep.ep_dispatch(handle, *inputs[1:])
    with pytest.raises(
      RuntimeError, match='ep_resize: .*"grows" was finalized'
    ):
      ep.ep_resize(old, top_k=1)
    if BACKEND == "xla":  # The program has only XLA collectives.
      assert_same(program(*inputs), want)
    else:
      with pytest.raises(ep.EpError, match='ep_prepare.*"grows" was finalized'):
        jax.block_until_ready(program(*inputs))


def test_an_alignment_of_zero_is_one():
  """TransformerEngine's default alignment is 0."""
  with bootstrap(make_mesh({"ep": 4}), alignment=0) as group:
    assert group.alignment == 1
    config = ep.EpLayerConfig(group, alignment=0)
    for alignment in None, 1:
      assert config == ep.EpLayerConfig(group, alignment=alignment)
    Case(config).check_round_trip()


@pytest.mark.parametrize("data_axes", [None, (), ("tp",)])
def test_a_model_axis_that_shards_tokens_by_default(data_axes, recwarn):
  """The caller gets a warning, unless `data_axes` is explicit."""
  with bootstrap(make_mesh({"ep": 2, "tp": 2}), data_axes=data_axes) as group:
    assert group.data_axes == (("tp",) if data_axes is None else data_axes)
  found = [w for w in recwarn if "data_axes" in str(w.message)]
  assert len(found) == (data_axes is None)
  for warning in found:
    assert warning.filename == groups.__file__
    for word in ["['tp']", "data_axes=()", "data_axes=('tp',)"]:
      assert word in str(warning.message)


def test_other_axes_shard_tokens_without_a_warning(recwarn):
  for axes in {"dp": 2, "ep": 2}, {"fsdp": 4, "ep": 1}, {"ep": 4, "tp": 1}:
    ep.ep_finalize(bootstrap(make_mesh(axes)))
  assert not [w for w in recwarn if "data_axes" in str(w.message)]


def test_integers_of_numpy_are_integers():
  sizes = dict(num_experts=np.int16(E), top_k=np.uint8(2))
  with bootstrap(make_mesh({"ep": 4}), **sizes) as group:
    config = ep.EpLayerConfig(group, recv_capacity_per_rank=np.array(32))
    found = group.num_experts, config.top_k, config.capacity
    assert found == (E, 2, 32)
    assert all(type(size) is int for size in found)


def test_names_of_groups():
  """A failed bootstrap frees the group's name. Open groups keep their names."""
  mesh = make_mesh({"ep": 4})
  with pytest.raises(ValueError, match="overflow"):
    bootstrap(mesh, name="owner", overflow="wrap")
  with bootstrap(mesh, name="owner") as group:
    with pytest.raises(ValueError, match="owner"):
      bootstrap(mesh, name="owner")
    # Another thread may have checked the name before this group took the name.
    with pytest.raises(ValueError, match='"owner" belongs to a live group'):
      XlaConnection(group.connection.group)
    Case(ep.EpLayerConfig(group)).check_round_trip()
  ep.ep_finalize(group)  # Closing twice is no error.


def test_only_one_of_several_threads_finalizes_a_group(monkeypatch):
  group = bootstrap(make_mesh({"ep": 4}))
  raise_failures = group.connection.raise_failures

  def raise_slowly():
    other = threading.Thread(target=group.connection.close)
    other.start()
    other.join()
    raise_failures()

  monkeypatch.setattr(group.connection, "raise_failures", raise_slowly)
  ep.ep_finalize(group)
  assert not group.connection.is_open


def test_copies():
  """Copying a group or layer returns the original; handles share the layer."""
  case = Case(layer())
  for value in case.layer, case.layer.group:
    assert copy.copy(value) is value
    assert copy.deepcopy([value])[0] is value
  handle = ep.ep_prepare(case.layer, case.put(case.topk_idx))
  for other in copy.copy(handle), copy.deepcopy(handle):
    assert other.layer is case.layer
    assert_same(Ops(other).sizes(), case.oracle.sizes())


def test_groups_layers_and_handles_refuse_pickle():
  case = Case(layer(name="moe_3"))
  handle = jax.tree.map(
    lambda x: x.addressable_data(0),
    ep.ep_prepare(case.layer, case.put(case.topk_idx)),
  )
  for value, words in [
    (case.layer.group, ["group", case.layer.group.name, "ep_bootstrap"]),
    (case.layer, ["layer", '"moe_3"', "EpLayerConfig"]),
    (handle, ['"moe_3"', "handle", "jax.tree.leaves", "EpHandle"]),
  ]:
    with refused(*words):
      ForkingPickler.dumps(value)


def test_groups_over_halves_of_the_devices():
  """Each process joins the groups that contain one of its devices."""
  halves = []
  for devices in jax.devices()[:2], jax.devices()[2:]:
    mesh = Mesh(devices, ("ep",))
    if jax.process_index() in {d.process_index for d in devices}:
      halves.append(bootstrap(mesh))
  for half in halves * 2:
    Case(ep.EpLayerConfig(half), "skewed").check_round_trip()
  for half in halves:
    ep.ep_finalize(half)


@pytest.mark.parametrize(
  "mesh, top_k, alignment",
  [("ep4", 1, 1), ("ep4", K, 4), ("dp2_ep2", 2, 128), ("dp4_ep1", K, 4)],
)
def test_the_default_capacity_is_the_worst_case(mesh, top_k, alignment):
  config = layer(mesh, top_k=top_k, alignment=alignment)
  local = E // config.group.ep_size
  rows = config.group.ep_size * T * min(top_k, local) + local * (alignment - 1)
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
  with pytest.raises(TypeError, match="capacity_for: num_tokens = 2.5"):
    config.capacity_for(2.5)
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
    assert replace(config, capacity_factor=large).capacity_for(8) == 60
  rounded = replace(config, capacity_multiple=24)
  assert rounded.capacity_for(8) == 48
  stated = replace(config, recv_capacity_per_rank=20)
  assert stated.capacity_for(8) == stated.capacity == 20
  limited = ep.EpLayerConfig(group("dp2_ep2"), capacity_factor=1.0)
  assert limited.capacity == limited.capacity_for(1) == T * K
  same = replace(limited, recv_capacity_per_rank=T * K)
  assert (same, same.fingerprint) == (limited, limited.fingerprint)
  assert replace(limited, capacity_factor=2).capacity == 2 * T * K
  assert replace(limited, capacity_factor=None, top_k=1).capacity == 2 * T
  stated = ep.EpLayerConfig(limited.group, recv_capacity_per_rank=20)
  assert replace(stated, capacity_factor=2, alignment=4).capacity == 20
  drop = replace(config, overflow="drop")
  Case(drop, "skewed", lead=(8,)).check(sizes)


def test_a_layer_inherits_the_drop_policy_of_its_group():
  """`replace` keeps a drop policy, whether the group or the layer stated it."""
  fails = ep.EpLayerConfig(group(drop_by="fair"))
  drops = replace(fails, overflow="drop")
  chunks = replace(fails, overflow="chunk")
  assert {x.drop_by for x in (fails, drops, chunks)} == {"fair"}
  assert replace(drops, overflow="error") == fails
  stated = ep.EpLayerConfig(fails.group, drop_by="slot")
  assert replace(stated, overflow="drop").drop_by == "slot"
  assert drops.fingerprint == replace(drops).fingerprint
  assert ep.EpLayerConfig(group(overflow="drop")).overflow == "drop"
  other = group(drop_by="slot")
  copied = ep.EpLayerConfig(other, overflow="drop", drop_by=drops.drop_by)
  assert copied.drop_by == "fair"


def refusal(monkeypatch, library):
  """Returns the error of a bootstrap with `library` as the native library."""
  monkeypatch.setenv("EP_FFI_LIBRARY_PATH", str(library))
  monkeypatch.setattr(ffi, "library", ffi.library.__wrapped__)  # loads anew
  with pytest.raises((RuntimeError, OSError)) as error:
    bootstrap(make_mesh({"ep": 1}))
  return str(error.value)


@of_host
@of_one_process
def test_a_library_of_another_name(tmp_path, monkeypatch):
  library = tmp_path / "mine.so"
  library.touch()
  message = refusal(monkeypatch, library)
  assert "libep_ffi_cpu.so was not found; looked in $EP" in message
  assert str(library) in message


@of_host
@of_one_process
def test_a_library_of_another_version(tmp_path, monkeypatch):
  """The error names both versions and a cure; ep does not call the library."""
  library = tmp_path / "libep_ffi_cpu.so"
  library.write_bytes(ffi.find_library("host").read_bytes())
  found = f"the library is {ffi.INTERFACE_VERSION}."
  monkeypatch.setattr(ffi, "INTERFACE_VERSION", 999)
  message = refusal(monkeypatch, library)
  for word in [
    str(library),
    found,
    "calls the interface 999",
    "EP_FFI_LIBRARY_PATH",
    "//ep_ffi:libep_ffi_cpu.so",
  ]:
    assert word in message
