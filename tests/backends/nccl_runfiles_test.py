# SPDX-License-Identifier: Apache-2.0
"""A Bazel build for CUDA contains NCCL EP, and for CUDA 13 also nvcc."""

import os
import pathlib
import re

import pytest

from ep._src.backends.nccl import environment, installation
from ep._src.native import shipped_files
from nccl_testing import gpu

_VERSIONS = [
  v for v in (12, 13) if shipped_files.in_runfiles(f"ep_nccl{v}/include")
]
if not _VERSIONS:
  pytest.skip("this needs a Bazel build for CUDA", allow_module_level=True)
(CUDA,) = _VERSIONS
# No Python package contains nvcc for CUDA 12.
HAS_NVCC = CUDA >= 13

HOPPER = gpu(cuda=CUDA * 1000)


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
  """Simulates a machine with a C++ compiler and only the files of the build."""
  for variable in list(os.environ):
    if variable.startswith(("NCCL_EP_", "CUDA_", "NVCC")):
      monkeypatch.delenv(variable)
  monkeypatch.setenv("NCCL_EP_JIT_CACHE_DIR", str(tmp_path))
  monkeypatch.setattr(installation.shipped_files, "in_package", lambda *_: None)
  monkeypatch.setattr(
    installation.shutil, "which", lambda name: name if "/" in name else None
  )
  installation._prepare.cache_clear()


@pytest.mark.skipif(HAS_NVCC, reason="this build has nvcc")
def test_a_build_without_nvcc_raises():
  with pytest.raises(RuntimeError, match="no nvcc"):
    installation.prepare(HOPPER)


@pytest.mark.skipif(not HAS_NVCC, reason="this build has no nvcc")
def test_nvcc_compiles_the_sources_of_nccl_ep(monkeypatch, tmp_path):
  """`prepare` compiles a source of NCCL EP, and raises if nvcc fails."""
  libraries = installation.prepare(HOPPER)
  assert [pathlib.Path(path).name for path in libraries] == [
    "libnccl.so.2",
    "libnccl_ep.so",
  ]
  installation._prepare.cache_clear()
  (tmp_path / "nccl_ep").mkdir()
  header = shipped_files.in_runfiles(f"ep_nccl{CUDA}/include/nccl_ep.h")
  (tmp_path / header.name).symlink_to(header)
  monkeypatch.setenv("NCCL_EP_JIT_SOURCE_DIR", str(tmp_path / "nccl_ep"))
  with pytest.raises(RuntimeError, match="ht_ep.cuh"):
    installation.prepare(HOPPER)


def test_every_variable_of_nccl_ep_has_a_rule():
  """The names in the library are variables, enumerators and constants."""
  library, headers = (
    shipped_files.in_runfiles(f"ep_nccl{CUDA}/{path}")
    for path in (f"lib/cu{CUDA}/libnccl_ep.so", "include/nccl_ep")
  )
  names = re.findall(rb"\0(NCCL_EP_[A-Z0-9_]+)(?=\0)", library.read_bytes())
  enumerators = (headers / "ep_enums.h").read_text()
  not_listed = r"NCCL_EP_(JIT|HT_GIN|\w+_QUANT)_"
  variables = {
    name
    for name in map(bytes.decode, names)
    if not re.search(rf"\b{name}\b", enumerators)
    and not re.match(not_listed, name)
  }
  others = {"EP_NCCL_COMMUNICATOR", "NCCL_DEV_API_JIT"}
  with_a_rule = {
    *environment.REFUSED,
    *environment.AGREED,
    *environment.PASSED_ON,
  }
  assert variables == with_a_rule - others
