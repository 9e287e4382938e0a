# SPDX-License-Identifier: Apache-2.0
"""Tests the Python code of the nccl backend that needs no GPU."""

import base64
import dataclasses
import os
import pathlib
import platform
import stat
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from conftest import refused
from ep._src.backends.nccl import backend as nccl_backend
from ep._src.backends.nccl import installation
from ep._src.backends.nccl.backend import NcclBackend
from ep._src.base import backend
from ep._src.base.config import GroupConfig
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
    (mesh([gpu(0), gpu(1, compute_capability="gfx942")]), ["Hopper", "gfx942"]),
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
def test_flags_are_refused_that_put_collectives_beside_ops(monkeypatch, flags):
  """gpu_streams_test shows the effect of one of these XLA flags."""
  monkeypatch.setattr(nccl_backend.jax, "local_devices", lambda: [gpu()])
  monkeypatch.setattr(installation, "prepare", lambda _: ("", ""))
  monkeypatch.setattr(ffi, "path_and_interface", lambda _: "a path")
  for harmless in "", f"--{SCHEDULER}=True --{LIMIT}=1":
    monkeypatch.setenv("XLA_FLAGS", harmless)
    assert NcclBackend().probe() == "a path"
  monkeypatch.setenv("XLA_FLAGS", flags)
  with pytest.raises(ValueError, match="remove the flag"):
    NcclBackend().probe()


@pytest.mark.parametrize("me", range(4))
@pytest.mark.parametrize("capacity", [64, None])
@pytest.mark.parametrize(
  "communicator, zero_copy", [("own", False), ("xla", False), ("xla", True)]
)
def test_ranks_connect_with_the_id_of_their_domain(
  monkeypatch, me, capacity, communicator, zero_copy
):
  """Rank 0 of each EP domain creates an NCCL id for its domain only.

  With XLA's communicators there is no NCCL id.
  """
  is_own = communicator == "own"
  monkeypatch.setenv("EP_NCCL_COMMUNICATOR", communicator)
  monkeypatch.setenv("EP_NCCL_ZERO_COPY", str(int(zero_copy)))
  borrowed = []
  monkeypatch.setattr(nccl_backend, "_borrow", lambda *a: borrowed.append(a))
  group = GroupConfig(
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
    max_num_sms=0,
    timeout_s=1.0,
    exit_after_s=1.0,
  )
  introductions = {}

  def join(_, introduce, domain, settings):
    assert domain == me % 2
    assert settings["EP_NCCL_COMMUNICATOR"] == communicator
    for process in (domain, domain + 2):
      identifier = bytes([process]) if is_own else b""
      introductions[process] = dict(id=base64.b64encode(identifier).decode())
    is_founder = me in (0, 1) and is_own
    assert introduce() == {"id": "bWluZQ==" if is_founder else ""}
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
  monkeypatch.setattr(backend, "_open", {})
  lookouts = []
  monkeypatch.setattr(
    nccl_backend, "Lookout", lambda *args: lookouts.append(args)
  )
  connection = NcclBackend().connect(group, join)
  for unknown, message in [
    (
      dict(top_k=None, recv_capacity_per_rank=None),
      "largest top_k of the layers",
    ),
    (dict(max_tokens_per_rank=None), 'max_tokens_per_rank is None.*"xla"'),
    (dict(hidden_dim=None), "hidden_dim is None.*ep_resize"),
  ]:  # `join` reports the error to the other processes.
    with pytest.raises(ValueError, match=message):
      NcclBackend().connect(dataclasses.replace(group, **unknown), join)
  with monkeypatch.context() as patch:
    patch.setenv("XLA_FLAGS", f"--{LIMIT}=1 --{LIMIT}=2")
    with pytest.raises(ValueError, match=f"--{LIMIT}=2.*indefinitely"):
      NcclBackend().connect(group, join)
  with monkeypatch.context() as patch:
    patch.setenv("EP_NCCL_ZERO_COPY", "1")
    if is_own:
      with pytest.raises(ValueError, match="set EP_NCCL_COMMUNICATOR=xla"):
        NcclBackend().connect(group, join)
  # By default, the group's capacity fits the worst case, and layers inherit it.
  resolved = dataclasses.replace(group, recv_capacity_per_rank=64)
  assert connection.group == resolved
  assert made == dict(
    name="ep0",
    config=group.program_text,
    ranks={me // 2: 0},
    domain=me % 2,
    num_experts=8,
    ep_size=2,
    max_tokens=16,
    capacity=64,
    max_row_bytes=64,
    max_num_sms=0,
    zero_copy=zero_copy,
    timeout_s=1.0,
    exit_after_s=1.0,
    unique_id=bytes([me % 2]) if is_own else b"",
    nccl="a",
    nccl_ep=str(me),
  )
  assert borrowed == ([] if is_own else [(resolved, group.mesh)])
  ((*lookout, _),) = lookouts
  processes = [me % 2, me % 2 + 2]
  assert lookout == [f"ep/place/ep0/{me % 2}", me // 2, processes, 1.0]


def test_other_communicators_are_refused(monkeypatch):
  monkeypatch.setenv("EP_NCCL_COMMUNICATOR", "mine")
  with pytest.raises(ValueError, match="is 'mine'; set it to"):
    nccl_backend._communicator()


@pytest.mark.parametrize(
  "plugins, wheels, found",
  [
    (["12"], ["12", "13"], "jax_ep_cuda12"),
    (["13"], ["12", "13"], "jax_ep_cuda13"),
    (["12", "13"], ["12"], "jax_ep_cuda12"),
    ([], ["12"], "jax_ep_cuda12"),
    (["12"], ["13"], "a wheel of jax-ep-cuda12, which fits the CUDA plugin"),
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


# --- Files -------------------------------------------------------------------

VARIABLES = [
  "NCCL_EP_JIT_CACHE_DIR",
  "NCCL_EP_JIT_NVCC",
  "NCCL_EP_JIT_SOURCE_DIR",
  "NCCL_EP_JIT_BUILD_INCLUDE_DIR",
  "NCCL_EP_JIT_CUDA_INCLUDE_DIR",
  "NVCC",
  "NVCC_ARCH_FLAGS",
  "NVCC_EXTRA_FLAGS",
  "CUDA_HOME",
  "CUDA_PATH",
]


@pytest.fixture
def machine(monkeypatch, tmp_path):
  """Simulates a machine whose only files are in the returned folder."""
  # `prepare` sets these variables. After the test, monkeypatch restores only
  # variables that monkeypatch itself has changed.
  for variable in VARIABLES:
    monkeypatch.setenv(variable, "")
    monkeypatch.delenv(variable)
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  monkeypatch.setenv("PATH", str(tmp_path / "path"))
  monkeypatch.setattr(sys, "path", [str(tmp_path)])
  for module in ("nccl", "nccl.ep", "nvidia", "nvidia.nccl", "nvidia.cu13"):
    monkeypatch.delitem(sys.modules, module, raising=False)
  monkeypatch.setattr(
    installation.shipped_files, "in_runfiles", lambda path: None
  )
  installation._prepare.cache_clear()
  yield tmp_path
  installation._prepare.cache_clear()


def prepare(**attributes):
  return installation.prepare(gpu(0, **attributes))


def program(path, script):
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(f"#!/bin/sh\n{script}\n")
  path.chmod(path.stat().st_mode | stat.S_IXUSR)
  return path


def write_nccl_header(folder, version=23007):
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "nccl.h").write_text(f"#define NCCL_VERSION_CODE {version}\n")


def wheels(machine, script="exit 0"):
  """Writes fake wheels of NCCL, NCCL EP and CUDA 13; returns the fake nvcc."""
  for file in [
    "nvidia/nccl/lib/libnccl.so.2",
    "nccl/ep/lib/cu12/libnccl_ep.so",
    "nccl/ep/lib/cu13/libnccl_ep.so",
    "nccl/ep/include/nccl_ep/common.hpp",
    "nvidia/cu13/include/cuda_runtime.h",
  ]:
    path = machine / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
  write_nccl_header(machine / "nvidia/nccl/include")
  return program(machine / "nvidia/cu13/bin/nvcc", script)


def test_prepare_finds_the_files_of_wheels(machine):
  nvcc = wheels(machine)
  nccl, nccl_ep = prepare()
  assert nccl == str(machine / "nvidia/nccl/lib/libnccl.so.2")
  assert nccl_ep == str(machine / "nccl/ep/lib/cu13/libnccl_ep.so")
  assert {v: os.environ[v] for v in VARIABLES if v in os.environ} == {
    "NCCL_EP_JIT_CACHE_DIR": str(kernels(machine)),
    "NCCL_EP_JIT_NVCC": str(nvcc),
    "NCCL_EP_JIT_SOURCE_DIR": str(machine / "nccl/ep/include/nccl_ep"),
    "NCCL_EP_JIT_BUILD_INCLUDE_DIR": str(machine / "nvidia/nccl/include"),
    "NCCL_EP_JIT_CUDA_INCLUDE_DIR": str(machine / "nvidia/cu13/include"),
  }


def test_prepare_keeps_the_users_variables(machine, monkeypatch):
  wheels(machine)
  nvcc = program(machine / "my/bin/nvcc", "exit 0")
  write_nccl_header(machine / "mine")
  mine = dict.fromkeys([VARIABLES[0], *VARIABLES[2:5]], str(machine / "mine"))
  mine["NCCL_EP_JIT_NVCC"] = str(nvcc)
  for variable, value in mine.items():
    monkeypatch.setenv(variable, value)
  prepare()
  assert {v: os.environ[v] for v in mine} == mine


def test_the_order_of_compilers(machine, monkeypatch):
  in_path = program(machine / "path/nvcc", "exit 0")
  assert installation.find_nvcc(13) == in_path
  in_wheel = wheels(machine)
  assert installation.find_nvcc(13) == in_wheel
  assert installation.find_nvcc(12) == in_path
  at_home = program(machine / "cuda/bin/nvcc", "exit 0")
  monkeypatch.setenv("CUDA_HOME", str(machine / "cuda"))
  assert installation.find_nvcc(13) == at_home
  monkeypatch.setenv("NVCC", str(in_path))
  assert installation.find_nvcc(13) == in_path


def test_prepare_calls_the_compiler_as_nccl_ep_does(machine, monkeypatch):
  wheels(machine, 'printf "%s\\n" "$@" >"$OUT"; /bin/cat probe.cu >>"$OUT"')
  monkeypatch.setenv("OUT", str(machine / "arguments"))
  monkeypatch.setenv("NVCC_EXTRA_FLAGS", "-ccbin 'g++ 12'")
  prepare(compute_capability="10.3")
  sources = machine / "nccl/ep/include/nccl_ep"
  nccl = machine / "nvidia/nccl/include"
  toolkit = machine / "nvidia/cu13/include"
  assert (machine / "arguments").read_text().splitlines() == [
    *("--cubin", "probe.cu", "-o", "probe.cubin"),
    *("--std=c++17", "--extended-lambda", "--expt-relaxed-constexpr"),
    "-arch=sm_103",
    *(f"-I{sources.parent}", f"-I{sources}", f"-I{sources}/device"),
    *(f"-I{nccl}", f"-I{nccl}/nccl_device"),
    *(f"-I{toolkit}", f"-I{toolkit}/cccl"),
    *("-ccbin", "g++ 12"),
    '#include "device/ht_ep.cuh"',
  ]


NCCL_INCLUDE = "nvidia/nccl/include"


@pytest.mark.parametrize(
  "missing, words",
  [
    ("nccl/ep/include", ["NCCL EP's headers", "nccl-extensions", "SOURCE_DIR"]),
    (NCCL_INCLUDE, ["NCCL's headers", "nvidia-nccl-cu13==2.30.7"]),
    (f"{NCCL_INCLUDE}/nccl.h", ["nccl.h", "nvidia-nccl-cu13==2.30.7"]),
    ("nvidia/cu13/include", ["CUDA's headers", "nvidia-cuda-runtime"]),
    ("nvidia/cu13/bin/nvcc", ["nvidia-cuda-nvcc", "CUDA_HOME"]),
  ],
)
def test_prepare_names_a_missing_file(machine, missing, words):
  wheels(machine)
  (machine / missing).rename(machine / "elsewhere")
  assert_refused(*words)


@pytest.mark.parametrize("variable", ["NCCL_EP_JIT_NVCC", "NVCC"])
def test_prepare_names_a_missing_compiler(machine, monkeypatch, variable):
  wheels(machine)
  monkeypatch.setenv(variable, "my-nvcc")
  assert_refused(f"{variable} = my-nvcc is no program")


def test_prepare_refuses_a_compiler_that_fails(machine):
  nvcc = wheels(machine, "echo no host compiler; exit 1")
  assert_refused(str(nvcc), "no host compiler", "NCCL_EP_JIT_NVCC", "cccl")


@pytest.mark.parametrize(
  "version, words", [(23203, "2.32.3"), (23006, "2.30.6")]
)
def test_prepare_refuses_headers_of_another_nccl(machine, version, words):
  """Compiled with wrong headers, NCCL EP's kernels would misread arguments."""
  wheels(machine)
  write_nccl_header(machine / NCCL_INCLUDE, version)
  assert_refused(words, "nvidia-nccl-cu13==2.30.7", "BUILD_INCLUDE_DIR")


def assert_refused(*words):
  """Checks that `prepare` fails, and returns its message."""
  installation._prepare.cache_clear()
  with pytest.raises(RuntimeError, match="^ep_bootstrap: ") as error:
    prepare()
  for word in words:
    assert word in str(error.value)
  return str(error.value)


# --- The cache of compiled kernels -------------------------------------------


def kernels(machine):
  """Returns the default folder of compiled kernels."""
  return machine / "cache/ep/nccl_ep" / platform.node()


def foreign(place):
  """Returns a fake `_owner` that reports another user as owner of `place`."""
  return lambda path: os.geteuid() + (path == place)


def cache_refused(machine, *words):
  """Checks that `prepare` refuses the kernel cache, and names a cure."""
  return assert_refused(str(kernels(machine)), "NCCL_EP_JIT_CACHE_DIR", *words)


def test_a_cached_compile_failure_is_refused(machine):
  """NCCL EP terminates a process that finds compile.failed in the cache."""
  wheels(machine)
  good, bad = kernels(machine) / "good", kernels(machine) / "bad"
  good.mkdir(parents=True)
  prepare()
  bad.mkdir()
  (bad / "compile.failed").touch()
  assert str(good) not in cache_refused(machine, str(bad), "Delete")


def test_kernels_that_others_can_replace_are_refused(machine, monkeypatch):
  wheels(machine)
  prepare()
  assert stat.S_IMODE(kernels(machine).stat().st_mode) == 0o700
  for mode in 0o770, 0o707:
    kernels(machine).chmod(mode)
    cache_refused(machine, "chmod go-w", oct(mode)[2:])
  kernels(machine).chmod(0o700)
  monkeypatch.setattr(installation, "_owner", foreign(kernels(machine)))
  cache_refused(machine, f"{kernels(machine)} belongs to another user")


@pytest.mark.parametrize("name", ["cache", kernels(pathlib.Path())])
def test_a_link_to_kernels_must_be_the_users(machine, monkeypatch, name):
  wheels(machine)
  (machine / name).parent.mkdir(parents=True, exist_ok=True)
  (machine / "mine").mkdir(mode=0o700)
  (machine / name).symlink_to(machine / "mine")
  prepare()
  monkeypatch.setattr(installation, "_owner", foreign(machine / name))
  cache_refused(machine, f"{machine / name} belongs to another user")


def test_a_machine_without_a_folder_for_kernels_is_refused(machine):
  wheels(machine)
  (machine / "cache").touch()
  cache_refused(machine, "Not a directory")
