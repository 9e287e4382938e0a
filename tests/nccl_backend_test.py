"""What Python does for the nccl backend, as far as it goes without a GPU."""

import base64
import os
import stat
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

import ep
from ep._src import ffi, nccl_backend, nccl_files, rendezvous

HOPPER = dict(platform="gpu", compute_capability="9.0", device_kind="H200")


def gpu(process, **what):
  return types.SimpleNamespace(
    process_index=process,
    local_hardware_id=0,
    client=types.SimpleNamespace(platform_version="PJRT\ncuda 13000"),
    **(HOPPER | what),
  )


def mesh(devices, **axes):
  axes = axes or {"ep": len(devices)}
  return types.SimpleNamespace(
    devices=np.array(devices).reshape(tuple(axes.values())),
    axis_names=tuple(axes),
    shape=axes,
  )


@pytest.mark.parametrize(
  "refused, words",
  [
    (mesh([gpu(0, platform="tpu"), gpu(1)]), ["'tpu'"]),
    (mesh([gpu(0), gpu(1, compute_capability="8.0")]), ["Hopper", "8.0"]),
    (mesh([gpu(0), gpu(1, compute_capability="gfx942")]), ["Hopper", "gfx942"]),
    (mesh([gpu(0), gpu(1)], dp=2, ep=1), ["two ranks", "'ep'"]),
    (mesh([gpu(0), gpu(0)]), ["one process per GPU", "process 0 has 2"]),
  ],
)
def test_refuses_a_mesh(refused, words):
  with pytest.raises(ValueError) as error:
    nccl_backend.check_mesh(refused, "ep")
  for word in ["ep_bootstrap", "nccl", *words]:
    assert word in str(error.value)


def test_takes_a_gpu_for_each_process():
  nccl_backend.check_mesh(mesh([gpu(p) for p in range(4)], dp=2, ep=2), "ep")


@pytest.mark.parametrize("me", range(4))
def test_connects_the_ranks_of_a_domain(monkeypatch, me):
  """With the id that the domain's rank 0 has made, and nobody else's."""
  group = ep.EpGroup(
    name="ep0",
    mesh=mesh([gpu(p) for p in range(4)], ep=2, dp=2),
    axis_name="ep",
    data_axes=("dp",),
    num_experts=8,
    max_tokens_per_rank=16,
    hidden_dim=32,
    top_k=2,
    recv_capacity_per_rank=64,
    alignment=1,
    max_token_dtype=jnp.dtype(jnp.bfloat16),
    overflow="error",
    backend="nccl",
    max_num_sms=0,
    timeout_s=1.0,
  )
  said = {}

  def exchange(_, introduce):
    for process in range(4):
      said[process] = dict(id=base64.b64encode(bytes([process])).decode())
    mine = introduce()
    assert mine == ({"id": "bWluZQ=="} if me in (0, 1) else {})
    return said

  made = {}
  monkeypatch.setattr(nccl_backend.jax, "process_index", lambda: me)
  monkeypatch.setattr(nccl_files, "prepare", lambda version: ("a", version))
  monkeypatch.setattr(rendezvous, "exchange", exchange)
  monkeypatch.setattr(ffi, "library", lambda backend: None)
  monkeypatch.setattr(ffi, "new_nccl_id", lambda *libraries: b"mine")
  monkeypatch.setattr(
    ffi, "create_nccl_group", lambda **what: made.update(what)
  )
  nccl_backend.connect(group)
  assert made == dict(
    name="ep0",
    rank=me // 2,
    device=0,
    num_experts=8,
    ep_size=2,
    max_tokens=16,
    capacity=64,
    max_row_bytes=64,
    max_num_sms=0,
    timeout_s=1.0,
    unique_id=bytes([me % 2]),
    nccl="a",
    nccl_ep="PJRT\ncuda 13000",
  )


# --- Files -------------------------------------------------------------------

VARIABLES = [
  "NCCL_EP_JIT_NVCC",
  "NCCL_EP_JIT_SOURCE_DIR",
  "NCCL_EP_JIT_BUILD_INCLUDE_DIR",
  "NCCL_EP_JIT_CUDA_INCLUDE_DIR",
  "NVCC",
  "CUDA_HOME",
  "CUDA_PATH",
]


@pytest.fixture
def machine(monkeypatch, tmp_path):
  """Nothing is installed but what a test puts into this folder."""
  # So that it is as it was afterwards, whatever is set.
  for variable in VARIABLES:
    monkeypatch.setenv(variable, "")
    monkeypatch.delenv(variable)
  monkeypatch.setenv("PATH", str(tmp_path / "path"))
  monkeypatch.setattr(sys, "path", [str(tmp_path)])
  for module in ("nccl", "nccl.ep", "nvidia", "nvidia.nccl", "nvidia.cu13"):
    monkeypatch.delitem(sys.modules, module, raising=False)
  monkeypatch.setattr(nccl_files.files, "in_runfiles", lambda path: None)
  nccl_files.prepare.cache_clear()
  yield tmp_path
  nccl_files.prepare.cache_clear()


def program(path, script):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(f"#!/bin/sh\n{script}\n")
  path.chmod(path.stat().st_mode | stat.S_IXUSR)
  return path


def wheels(machine):
  """NCCL, NCCL EP and the compiler as they are installed for CUDA 13."""
  for file in [
    "nvidia/nccl/lib/libnccl.so.2",
    "nvidia/nccl/include/nccl.h",
    "nccl/ep/lib/cu12/libnccl_ep.so",
    "nccl/ep/lib/cu13/libnccl_ep.so",
    "nccl/ep/include/nccl_ep/common.hpp",
    "nvidia/cu13/include/cuda_runtime.h",
  ]:
    path = machine / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
  return program(machine / "nvidia/cu13/bin/nvcc", "exit 0")


def test_files_of_wheels(machine):
  nvcc = wheels(machine)
  nccl, nccl_ep = nccl_files.prepare("cuda 13000")
  assert nccl == str(machine / "nvidia/nccl/lib/libnccl.so.2")
  assert nccl_ep == str(machine / "nccl/ep/lib/cu13/libnccl_ep.so")
  assert {v: os.environ.get(v) for v in VARIABLES} == {
    "NCCL_EP_JIT_NVCC": str(nvcc),
    "NCCL_EP_JIT_SOURCE_DIR": str(machine / "nccl/ep/include/nccl_ep"),
    "NCCL_EP_JIT_BUILD_INCLUDE_DIR": str(machine / "nvidia/nccl/include"),
    "NCCL_EP_JIT_CUDA_INCLUDE_DIR": str(machine / "nvidia/cu13/include"),
    "NVCC": None,
    "CUDA_HOME": None,
    "CUDA_PATH": None,
  }


def test_what_the_user_sets_stays(machine, monkeypatch):
  wheels(machine)
  nvcc = program(machine / "my/bin/nvcc", "exit 0")
  mine = dict.fromkeys(VARIABLES[1:4], "mine") | {"NCCL_EP_JIT_NVCC": str(nvcc)}
  for variable, value in mine.items():
    monkeypatch.setenv(variable, value)
  nccl_files.prepare("cuda 13000")
  assert {v: os.environ[v] for v in mine} == mine


def test_the_order_of_compilers(machine, monkeypatch):
  in_path = program(machine / "path/nvcc", "exit 0")
  assert nccl_files.find_nvcc(13) == in_path
  in_wheel = wheels(machine)
  assert nccl_files.find_nvcc(13) == in_wheel
  assert nccl_files.find_nvcc(12) == in_path
  at_home = program(machine / "cuda/bin/nvcc", "exit 0")
  monkeypatch.setenv("CUDA_HOME", str(machine / "cuda"))
  assert nccl_files.find_nvcc(13) == at_home
  monkeypatch.setenv("NVCC", str(in_path))
  assert nccl_files.find_nvcc(13) == in_path


def test_no_compiler(machine):
  with pytest.raises(RuntimeError, match="nvidia-cuda-nvcc") as error:
    nccl_files.prepare("cuda 12090")
  assert "CUDA_HOME" in str(error.value)


def test_a_compiler_that_does_not_work(machine, monkeypatch):
  nvcc = program(machine / "bin/nvcc", "echo no host compiler; exit 1")
  monkeypatch.setenv("NCCL_EP_JIT_NVCC", str(nvcc))
  with pytest.raises(RuntimeError) as error:
    nccl_files.prepare("cuda 12090")
  for word in [str(nvcc), "no host compiler", "NCCL_EP_JIT_NVCC"]:
    assert word in str(error.value)
