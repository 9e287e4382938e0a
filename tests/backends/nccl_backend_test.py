# SPDX-License-Identifier: Apache-2.0
"""Tests the Python code of the nccl backend that needs no GPU."""

import base64
import dataclasses
import socket
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from conftest import refused
from ep._src.backends.nccl import backend as nccl_backend
from ep._src.backends.nccl import installation
from ep._src.backends.nccl.backend import NcclBackend
from ep._src.base import group as groups
from ep._src.base.group import EpGroup
from ep._src.native import ffi, shipped_files
from nccl_testing import gpu


def mesh(devices, **axes):
  axes = axes or {"ep": len(devices)}
  return types.SimpleNamespace(
    devices=np.array(devices).reshape(tuple(axes.values())),
    axis_names=tuple(axes),
    shape=axes,
  )


@pytest.mark.parametrize(
  "unfit, words",
  [
    (mesh([gpu(0, platform="tpu"), gpu(1)]), ["'tpu'"]),
    (mesh([gpu(0), gpu(1, compute_capability="8.0")]), ["Hopper", "8.0"]),
    (mesh([gpu(0), gpu(1)], dp=2, ep=1), ["two ranks", "'ep'"]),
    (mesh([gpu(0), gpu(0)]), ["one process per GPU", "process 0 has 2"]),
  ],
)
def test_check_mesh_refuses(unfit, words):
  with refused("ep_bootstrap", "nccl", *words):
    NcclBackend().check_mesh(unfit, "ep")


def test_with_xla_communicators_a_process_may_have_several_gpus(monkeypatch):
  NcclBackend().check_mesh(mesh([gpu(p) for p in range(4)], dp=2, ep=2), "ep")
  monkeypatch.setenv("EP_NCCL_COMMUNICATOR", "xla")
  devices = [gpu(p) for p in (0, 0, 1, 1)]
  NcclBackend().check_mesh(mesh(devices), "ep")
  NcclBackend().check_mesh(mesh(devices, dp=2, ep=2), "ep")
  with pytest.raises(ValueError, match="process 0 are in 2; give"):
    NcclBackend().check_mesh(mesh(devices, ep=2, dp=2), "ep")


SCHEDULER = "xla_gpu_enable_latency_hiding_scheduler"
LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"


@pytest.mark.parametrize(
  "flags",
  [f"--{SCHEDULER}=false", f"--a=b --{SCHEDULER}=0 --c", f"--{LIMIT}=4"],
)
def test_flags_are_refused_that_put_collectives_beside_ops(
  monkeypatch, flags, tmp_path
):
  """gpu_streams_test shows the effect of one of these XLA flags.

  XLA_FLAGS contains the flags, or names a file that contains them.
  """
  monkeypatch.setattr(nccl_backend.jax, "local_devices", lambda: [gpu()])
  monkeypatch.setattr(installation, "prepare", lambda _: ("", ""))
  monkeypatch.setattr(ffi, "path_and_interface", lambda _: "a path")
  for harmless in "", f"--{SCHEDULER}=True --{LIMIT}=1":
    monkeypatch.setenv("XLA_FLAGS", harmless)
    assert NcclBackend().probe() == "a path"
  path = tmp_path / "flags"
  path.write_text(flags)
  for text in flags, str(path):
    monkeypatch.setenv("XLA_FLAGS", text)
    with pytest.raises(ValueError, match="remove the flag"):
      NcclBackend().probe()


@pytest.mark.parametrize("me", range(4))
@pytest.mark.parametrize("capacity", [64, None])
@pytest.mark.parametrize("communicator", ["own", "xla"])
def test_ranks_connect_with_the_id_of_their_domain(
  monkeypatch, me, capacity, communicator
):
  """Rank 0 of each EP domain creates an NCCL id for its domain only.

  With XLA's communicators there is no NCCL id.
  """
  is_own = communicator == "own"
  monkeypatch.setenv("EP_NCCL_COMMUNICATOR", communicator)
  borrowed = []
  monkeypatch.setattr(nccl_backend, "_borrow", lambda *a: borrowed.append(a))
  group = EpGroup(
    name="ep0",
    mesh=mesh([gpu(p) for p in range(4)], ep=2, dp=2),
    axis_name="ep",
    data_axes=("dp",),
    num_experts=8,
    max_tokens_per_rank=16,
    hidden_dim=32,
    top_k=2,
    recv_capacity_per_rank=capacity,
    alignment=1,
    max_token_dtype=jnp.dtype(jnp.bfloat16),
    overflow="error",
    drop_by="slot",
    backend="nccl",
    errors="raise",
    max_num_sms=0,
    timeout_s=1.0,
    exit_after_s=1.0,
  )
  calls = []

  def join(config, introduce, domain, settings=None):
    assert (config.name, domain) == (group.name, me % 2)
    mine = introduce()
    calls.append("join")
    if settings is None:
      assert mine == {}
      return {}
    assert settings["EP_NCCL_COMMUNICATOR"] == communicator
    is_founder = me in (0, 1) and is_own
    host = socket.gethostname()
    assert mine == dict(id="bWluZQ==" if is_founder else "", host=host)
    introductions = {}
    for process in (domain, domain + 2):
      identifier = bytes([process]) if is_own else b""
      text = base64.b64encode(identifier).decode()
      introductions[process] = dict(id=text, host=f"host{process}")
    return introductions

  made = {}
  monkeypatch.setattr(nccl_backend.jax, "process_index", lambda: me)
  monkeypatch.setattr(
    installation, "prepare", lambda device: ("a", str(device.process_index))
  )
  monkeypatch.setattr(ffi, "library", lambda backend: None)
  monkeypatch.setattr(ffi, "new_nccl_id", lambda *libraries: b"mine")
  monkeypatch.setattr(
    ffi, "create_nccl_group", lambda **what: made.update(what)
  )
  for name in ("connect_nccl_group", "open_nccl_group", "close_group"):
    monkeypatch.setattr(
      ffi, name, lambda *what, n=name: calls.append((n, what))
    )
  monkeypatch.setattr(groups, "_open", {})
  lookouts = []
  monkeypatch.setattr(
    nccl_backend, "Lookout", lambda *args: lookouts.append(args)
  )
  connection = NcclBackend().connect(group, join)
  unique_id = bytes([me % 2]) if is_own else b""
  assert calls == [
    "join",
    ("connect_nccl_group", ("ep0", unique_id, 2)),
    "join",
    ("open_nccl_group", ("ep0",)),
  ]
  # By default, the group's capacity fits the worst case, and layers inherit it.
  resolved = dataclasses.replace(group, recv_capacity_per_rank=64)
  assert connection.group == resolved
  assert (made["ranks"], made["domain"]) == ({me // 2: 0}, me % 2)
  assert (made["capacity"], made["max_row_bytes"]) == (64, 64)
  assert (made["nccl"], made["nccl_ep"]) == ("a", str(me))
  assert borrowed == ([] if is_own else [(group, group.mesh)])
  ((*lookout, _),) = lookouts
  processes = [me % 2, me % 2 + 2]
  assert lookout == ["ep0", me % 2, me // 2, processes, 1.0]


@pytest.mark.parametrize(
  "plugins, wheels, found",
  [
    (["13"], ["12", "13"], "jax_ep_cuda13"),
    ([], ["12"], "jax_ep_cuda12"),
    (["12"], ["13"], "a wheel of jax-ep-cuda12;"),
  ],
)
def test_the_library_fits_the_plugin_of_jax(
  tmp_path, monkeypatch, plugins, wheels, found
):
  """With wheels for CUDA 12 and 13, ep uses the wheel for JAX's plugin."""
  for version in plugins:
    (tmp_path / f"jax_cuda{version}_plugin").mkdir()
    monkeypatch.delitem(sys.modules, f"jax_cuda{version}_plugin", False)
  for version in wheels:
    folder = tmp_path / f"jax_ep_cuda{version}"
    folder.mkdir()
    (folder / "libep_ffi_cuda.so").touch()
  monkeypatch.setattr(sys, "path", [str(tmp_path)])
  monkeypatch.setattr(shipped_files, "in_runfiles", lambda path: None)
  monkeypatch.delenv("EP_FFI_LIBRARY_PATH", raising=False)
  if " " in found:
    with pytest.raises(FileNotFoundError, match=found):
      ffi.find_library("nccl")
  else:
    assert ffi.find_library("nccl").parent == tmp_path / found
