# SPDX-License-Identifier: Apache-2.0
"""A build for CUDA contains the files of NCCL EP, and nvcc with CUDA 13."""

import os
import pathlib

import numpy as np
import pytest

from ep._src.backends.nccl import installation, kernels, sources, variants
from ep._src.native import shipped_files
from nccl_testing import gpu

(CUDA,) = (
  v for v in (12, 13) if shipped_files.in_runfiles(f"ep_nccl{v}/include")
)
# There is no package with nvcc for CUDA 12.
HAS_NVCC = CUDA >= 13

HOPPER = gpu(cuda=CUDA * 1000)
# Kernels depend on these numbers of the GPU.
PARTS = variants.Gpu(sm=90, num_sms=132, shared_bytes=232448)


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
  installation.prepare_for.cache_clear()


@pytest.mark.skipif(HAS_NVCC, reason="this build has nvcc")
def test_a_build_without_nvcc_raises():
  with pytest.raises(RuntimeError, match="no nvcc"):
    installation.prepare(HOPPER)


def kernels_of_a_group():
  folder = shipped_files.in_runfiles(f"ep_nccl{CUDA}/lib")
  library = folder / f"cu{CUDA}/libnccl_ep.so"
  sizes = variants.Sizes(8, 4, 4, 64, 256, np.dtype("float32"), 2, 0)
  return variants.variants(sizes, PARTS, sources.Pieces(library))


def test_the_library_has_the_pieces_of_all_sources():
  found = kernels_of_a_group()
  assert len({kernel.name for kernel in found}) == 7
  for kernel in found:
    assert kernel.source.startswith('#include "device/ht_ep.cuh"\n')
    assert kernel.source.endswith(");\n}\n")
    assert f"__global__ void {kernel.entry}(\n" in kernel.source
    for opening, closing in "()", "{}":
      assert kernel.source.count(opening) == kernel.source.count(closing)


@pytest.mark.skipif(not HAS_NVCC, reason="this build has no nvcc")
def test_a_kernel_is_compiled_ahead(monkeypatch, tmp_path):
  """It is one of the two that take the least time."""
  _, nccl_ep, compiler = installation.prepare_for(CUDA, 90)
  kernel = kernels_of_a_group()[-1]
  monkeypatch.setattr(variants, "variants", lambda *_: [kernel])
  for state in kernels.COMPILED, kernels.KNOWN:
    states = kernels.compile_missing(None, PARTS, nccl_ep, compiler)
    assert states == {kernel.name: state}
  (cubin,) = tmp_path.glob("*/kernel.cubin")
  assert kernel.entry.encode() in cubin.read_bytes()
  assert cubin.with_name("kernel.cu").read_text() == kernel.source


@pytest.mark.skipif(not HAS_NVCC, reason="this build has no nvcc")
def test_nvcc_compiles_the_sources_of_nccl_ep(monkeypatch, tmp_path):
  """`prepare` compiles a source, so it fails if nvcc cannot compile it."""
  libraries = installation.prepare(HOPPER)
  assert [pathlib.Path(path).name for path in libraries] == [
    "libnccl.so.2",
    "libnccl_ep.so",
  ]
  installation.prepare_for.cache_clear()
  monkeypatch.setenv("NCCL_EP_JIT_SOURCE_DIR", str(tmp_path))
  with pytest.raises(RuntimeError, match="ht_ep.cuh"):
    installation.prepare(HOPPER)
