"""The files of NCCL EP that a build for CUDA brings along, and its compiler."""

import os
import pathlib
import subprocess

import pytest

from ep._src import files, nccl_files

(CUDA,) = (v for v in (12, 13) if files.in_runfiles(f"ep_nccl{v}/include"))
# CUDA 12 has no package with nvcc.
BRINGS_NVCC = CUDA >= 13


@pytest.fixture(autouse=True)
def machine(monkeypatch):
  """Has no other files, and a C++ compiler."""
  for variable in list(os.environ):
    if variable.startswith(("NCCL_EP_", "CUDA_", "NVCC")):
      monkeypatch.delenv(variable)
  monkeypatch.setattr(nccl_files.files, "in_package", lambda *_: None)
  monkeypatch.setattr(nccl_files.shutil, "which", lambda name: None)
  nccl_files.prepare.cache_clear()


@pytest.mark.skipif(BRINGS_NVCC, reason="this build brings nvcc")
def test_a_build_without_nvcc_says_so():
  with pytest.raises(RuntimeError, match="no nvcc"):
    nccl_files.prepare(f"cuda {CUDA}000")


@pytest.mark.skipif(not BRINGS_NVCC, reason="this build brings no nvcc")
def test_nvcc_compiles_what_nccl_ep_will(tmp_path):
  libraries = nccl_files.prepare(f"cuda {CUDA}000")
  assert [pathlib.Path(path).name for path in libraries] == [
    "libnccl.so.2",
    "libnccl_ep.so",
  ]
  source = tmp_path / "kernel.cu"
  source.write_text('#include "device/ht_ep.cuh"\n')
  subprocess.run(
    [
      os.environ["NCCL_EP_JIT_NVCC"],
      *("-cubin", "-std=c++17", "-arch=sm_90", source, "-o", tmp_path / "out"),
      *("-I", os.environ["NCCL_EP_JIT_SOURCE_DIR"]),
      *("-I", os.environ["NCCL_EP_JIT_BUILD_INCLUDE_DIR"]),
      *("-I", os.environ["NCCL_EP_JIT_CUDA_INCLUDE_DIR"]),
    ],
    check=True,
  )
