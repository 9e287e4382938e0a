# SPDX-License-Identifier: Apache-2.0
"""Tests that the nccl backend finds its libraries, headers and compiler."""

import ctypes
import os
import pathlib
import platform
import stat
import sys

import pytest

from ep._src.backends.nccl import installation
from nccl_testing import gpu

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


NCCL_INCLUDE = "nvidia/nccl/include"
NCCL_EP_INCLUDE = "nccl/ep/include"


def write_nccl_header(folder, version=23007):
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "nccl.h").write_text(f"#define NCCL_VERSION_CODE {version}\n")


def write_nccl_ep_header(folder, api=2):
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "nccl_ep.h").write_text(f"#define NCCL_EP_API_VERSION {api}\n")


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
  write_nccl_ep_header(machine / NCCL_EP_INCLUDE)
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


@pytest.mark.parametrize(
  "folder, library",
  [("lib", "libnccl_ep.so"), ("lib/cu13", "libnccl_ep.so.0")],
)
def test_prepare_keeps_the_users_variables(
  machine, monkeypatch, folder, library
):
  """`prepare` finds the library that was installed with the user's headers.

  nccl-extensions 0.2.0 has only libnccl_ep.so.0.
  """
  wheels(machine)
  nvcc = program(machine / "my/bin/nvcc", "exit 0")
  write_nccl_header(machine / "mine")
  write_nccl_ep_header(machine / "my/include")
  (machine / "my/include/nccl_ep").mkdir()
  (machine / "my" / folder).mkdir(parents=True)
  (machine / "my" / folder / library).touch()
  mine = dict.fromkeys([VARIABLES[0], *VARIABLES[3:5]], str(machine / "mine"))
  mine["NCCL_EP_JIT_NVCC"] = str(nvcc)
  mine["NCCL_EP_JIT_SOURCE_DIR"] = str(machine / "my/include/nccl_ep")
  for variable, value in mine.items():
    monkeypatch.setenv(variable, value)
  assert prepare()[1] == str(machine / "my" / folder / library)
  assert {v: os.environ[v] for v in mine} == mine


def test_the_headers_of_our_wheel_need_no_old_nccl(machine):
  """A newer NCCL may run, with the headers of the wheel of the library."""
  wheels(machine)
  write_nccl_header(machine / NCCL_INCLUDE, 23203)
  ours = machine / "jax_ep_cuda13/include"
  write_nccl_header(ours)
  nccl, _ = prepare()
  assert nccl == str(machine / "nvidia/nccl/lib/libnccl.so.2")
  assert os.environ["NCCL_EP_JIT_BUILD_INCLUDE_DIR"] == str(ours)


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


@pytest.mark.parametrize(
  "missing, words",
  [
    (NCCL_EP_INCLUDE, ["NCCL EP's headers", "nccl-extensions", "SOURCE_DIR"]),
    ("nccl/ep/lib/cu13/libnccl_ep.so", ["lib/cu13", "nccl-extensions==0.1.0"]),
    (NCCL_INCLUDE, ["NCCL's headers", "jax-ep-cuda13"]),
    ("nvidia/cu13/include", ["CUDA's headers", "nvidia-cuda-runtime"]),
    ("nvidia/cu13/bin/nvcc", ["nvidia-cuda-nvcc", "CUDA_HOME"]),
  ],
)
def test_prepare_names_a_missing_file(machine, missing, words):
  wheels(machine)
  (machine / missing).rename(machine / "elsewhere")
  assert_refused(*words)


def test_prepare_refuses_a_compiler_that_fails(machine):
  nvcc = wheels(machine, "echo no host compiler; exit 1")
  assert_refused(str(nvcc), "no host compiler", "NCCL_EP_JIT_NVCC", "cccl")


def test_prepare_refuses_headers_of_another_nccl(machine):
  """Compiled with wrong headers, NCCL EP's kernels would misread arguments."""
  wheels(machine)
  write_nccl_header(machine / NCCL_INCLUDE, 23203)
  assert_refused("2.32.3", "install jax-ep-cuda13", "BUILD_INCLUDE_DIR")


def test_prepare_refuses_another_api_of_a_neighbour(machine):
  """Refuses headers that a library of this process has set, as C code does.

  TransformerEngine sets the variable with setenv, which `os.environ` does not
  show. Afterwards, the neighbour's variables have the same values.
  """
  wheels(machine)
  theirs = machine / "transformer_engine/nccl_ep/include"
  write_nccl_ep_header(theirs, 3)
  (theirs / "nccl_ep").mkdir()
  libc = ctypes.CDLL(None)
  libc.setenv(b"NCCL_EP_JIT_SOURCE_DIR", bytes(theirs / "nccl_ep"), 0)
  try:
    assert_refused(
      "has API 3; install nccl-extensions==0.1.0",
      "unset NCCL_EP_JIT_SOURCE_DIR",
      "TransformerEngine",
    )
    assert not set(VARIABLES) & set(os.environ)
  finally:
    libc.unsetenv(b"NCCL_EP_JIT_SOURCE_DIR")
  prepare()


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
