# SPDX-License-Identifier: Apache-2.0
"""A build for CUDA brings the files of NCCL EP, and its compiler."""

import os
import pathlib

import pytest

from ep._src import files, nccl_files
from nccl_testing import gpu

(CUDA,) = (v for v in (12, 13) if files.in_runfiles(f"ep_nccl{v}/include"))
# CUDA 12 has no package with nvcc.
BRINGS_NVCC = CUDA >= 13

HOPPER = gpu(cuda=CUDA * 1000)


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
  """Makes a machine that has a C++ compiler and only the files of the build."""
  for variable in list(os.environ):
    if variable.startswith(("NCCL_EP_", "CUDA_", "NVCC")):
      monkeypatch.delenv(variable)
  monkeypatch.setenv("NCCL_EP_JIT_CACHE_DIR", str(tmp_path))
  monkeypatch.setattr(nccl_files.files, "in_package", lambda *_: None)
  monkeypatch.setattr(
    nccl_files.shutil, "which", lambda name: name if "/" in name else None
  )
  nccl_files._prepare.cache_clear()


@pytest.mark.skipif(BRINGS_NVCC, reason="this build brings nvcc")
def test_a_build_without_nvcc_says_so():
  with pytest.raises(RuntimeError, match="no nvcc"):
    nccl_files.prepare(HOPPER)


@pytest.mark.skipif(not BRINGS_NVCC, reason="this build brings no nvcc")
def test_nvcc_compiles_what_nccl_ep_will(monkeypatch, tmp_path):
  """`prepare` compiles something, since it is not enough that nvcc exists."""
  libraries = nccl_files.prepare(HOPPER)
  assert [pathlib.Path(path).name for path in libraries] == [
    "libnccl.so.2",
    "libnccl_ep.so",
  ]
  nccl_files._prepare.cache_clear()
  monkeypatch.setenv("NCCL_EP_JIT_SOURCE_DIR", str(tmp_path))
  with pytest.raises(RuntimeError, match="ht_ep.cuh"):
    nccl_files.prepare(HOPPER)
