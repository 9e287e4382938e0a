# SPDX-License-Identifier: Apache-2.0
"""Tests argument checks of bootstrap, layers and resize, and closing groups."""

import contextlib
import copy
import math
from multiprocessing.reduction import ForkingPickler
import secrets
import socket
import threading
import time

import jax
import jax.numpy as jnp
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
  H,
  has_no_limits,
  K,
  layer,
  MESHES,
  of_one_process,
  T,
)
from op_functions import everything, Ops, round_trip

of_host = pytest.mark.skipif(
  GPU or BACKEND == "xla", reason="only host has sockets and this library"
)


def test_layers_may_set_top_k_instead_of_the_group():
  mesh = make_mesh({"ep": 4})
  with bootstrap(mesh, top_k=None, recv_capacity_per_rank=E * T) as group:
    assert group.top_k is None
    for top_k in 1, K:
      Case(ep.EpLayerConfig(group, top_k=top_k)).check_round_trip()
    with pytest.raises(ValueError, match="group has a top_k; give the layer"):
      ep.EpLayerConfig(group, name="moe_3")


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
  sizes = dict(num_experts=E, max_tokens_per_rank=5, hidden_dim=8, top_k=K)
  sizes |= dict(recv_capacity_per_rank=64, alignment=2, max_num_sms=0)
  as_numpy = {name: np.int16(size) for name, size in sizes.items()}
  with bootstrap(make_mesh({"ep": 4}), **as_numpy) as group:
    config = ep.EpLayerConfig(
      group,
      top_k=np.uint8(2),
      alignment=np.int64(4),
      recv_capacity_per_rank=np.array(32),
    )
    assert all(type(getattr(group, name)) is int for name in sizes)
    assert all(getattr(group, name) == size for name, size in sizes.items())
    own = (config.top_k, config.alignment, config.capacity)
    assert own == (2, 4, 32)
    assert all(type(size) is int for size in own)


def test_a_timeout_without_end():
  """The deadline of a very long timeout does not overflow into the past."""
  with contextlib.ExitStack() as stack:
    groups = [
      stack.enter_context(bootstrap(make_mesh({"ep": 4}), timeout_s=timeout_s))
      for timeout_s in (math.inf, 1e300, 10**309)
    ]
    if jax.process_index() == 0:
      time.sleep(1.5)  # longer than the interval between deadline checks
    for group in groups:
      Case(ep.EpLayerConfig(group)).check_round_trip()


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


@pytest.mark.parametrize("mesh", MESHES)
def test_the_attributes_of_a_group(mesh):
  axes = MESHES[mesh]
  with bootstrap(make_mesh(axes)) as group:
    assert group.axis_name == "ep"
    assert group.data_axes == tuple(axis for axis in axes if axis != "ep")
    assert group.ep_size == axes["ep"]
    assert group.num_experts == E
    assert group.num_local_experts == E // axes["ep"]
    assert group.top_k == K
    native = "host" if not GPU else "nccl" if group.ep_size > 1 else "xla"
    assert group.backend == (BACKEND or native)
    hash(group)


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


@of_host
def test_bootstrap_avoids_a_taken_address(monkeypatch):
  name = secrets.token_hex(8)  # process ids repeat in containers
  names = iter([name, name, f"{name}-free"])
  monkeypatch.setattr(secrets, "token_hex", lambda _: next(names))
  with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as taken:
    taken.bind(f"\0ep_ffi-{name}")
    with bootstrap(make_mesh({"ep": 4})) as group:
      assert not list(names)
      Case(ep.EpLayerConfig(group)).check_round_trip()


def refusal(monkeypatch, library):
  """Returns the error of a bootstrap with `library` as the native library."""
  monkeypatch.setenv("EP_FFI_LIBRARY_PATH", str(library))
  monkeypatch.setattr(ffi, "library", ffi.library.__wrapped__)  # loads anew
  with pytest.raises((RuntimeError, OSError)) as error:
    bootstrap(make_mesh({"ep": 1}))
  return str(error.value)


@of_host
@of_one_process
def test_no_library(tmp_path, monkeypatch):
  """The error names cures, and the places where ep looks for the library."""
  message = refusal(monkeypatch, tmp_path / "nowhere.so")
  places = ["EP_FFI_LIBRARY_PATH", "nowhere.so", "runfiles", "package"]
  for word in [*places, "//ep_ffi:libep_ffi_cpu.so", 'backend="xla"']:
    assert word in message


@of_host
@of_one_process
def test_a_library_of_another_name(tmp_path, monkeypatch):
  library = tmp_path / "mine.so"
  library.touch()
  message = refusal(monkeypatch, library)
  assert f"{library}, but the library of backend 'host' has the name" in message


@of_host
@of_one_process
@pytest.mark.parametrize("age", ["stale", "older"])
def test_a_library_of_another_version(tmp_path, monkeypatch, age):
  """The error names both versions and a cure; ep does not call the library."""
  found = f"the library is {ffi.INTERFACE_VERSION}."
  native = ffi.find_library("host").read_bytes()
  if age == "older":  # An older library lacks the function.
    found = "none"
    assert b"ep_interface_version\0" in native
    native = native.replace(b"ep_interface_version", b"ep_interfere_version")
  library = tmp_path / "libep_ffi_cpu.so"
  library.write_bytes(native)
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
