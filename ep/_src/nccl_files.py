"""The files of NCCL and NCCL EP, and the compiler that NCCL EP calls.

NCCL EP compiles its kernels when they are first launched. It takes compiler and
headers from environment variables; those that are not set are set here, from
what came with us: the Bazel runfiles or the installed wheels.
"""

from __future__ import annotations

import functools
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

from ep._src import files

_PROBE = '#include <cuda_runtime.h>\nextern "C" __global__ void Probe() {}\n'
_PROBE_TIMEOUT_S = 120


@functools.cache
def prepare(platform_version: str) -> tuple[str, str]:
  """Sets NCCL EP up for the CUDA of a JAX client.

  Args:
    platform_version: the client's, which says "cuda 13000" somewhere.

  Returns:
    Paths of libnccl and libnccl_ep, or "" for what the system has.

  Raises:
    RuntimeError: there is no compiler that works.
  """
  found = re.search(r"cuda (\d+)", platform_version)
  cuda = int(found[1]) // 1000 if found else 13
  headers = _find(f"ep_nccl{cuda}/include", ("nvidia.nccl", "include"))
  sources = _find(
    f"ep_nccl{cuda}/include/nccl_ep", ("nccl.ep", "include/nccl_ep")
  )
  nvcc = find_nvcc(cuda)
  _set_default("NCCL_EP_JIT_BUILD_INCLUDE_DIR", headers)
  _set_default("NCCL_EP_JIT_SOURCE_DIR", sources)
  _set_default("NCCL_EP_JIT_NVCC", nvcc)
  _set_default("NCCL_EP_JIT_CUDA_INCLUDE_DIR", nvcc.parents[1] / "include")
  _check_compiler(nvcc)
  libraries = (
    _find(
      f"ep_nccl{cuda}/lib/libnccl.so.2", ("nvidia.nccl", "lib/libnccl.so.2")
    ),
    _find(
      f"ep_nccl{cuda}/lib/cu{cuda}/libnccl_ep.so",
      ("nccl.ep", f"lib/cu{cuda}/libnccl_ep.so"),
    ),
  )
  return tuple(str(path or "") for path in libraries)


def find_nvcc(cuda: int) -> pathlib.Path:
  """The compiler of NCCL EP's kernels: the user's, else ours, else PATH's."""
  for variable in ("NCCL_EP_JIT_NVCC", "NVCC"):
    if name := os.environ.get(variable):
      return pathlib.Path(shutil.which(name) or name)
  for variable in ("CUDA_HOME", "CUDA_PATH"):
    nvcc = pathlib.Path(os.environ.get(variable, ""), "bin/nvcc")
    if os.environ.get(variable) and nvcc.exists():
      return nvcc
  ours = _find(f"ep_cuda{cuda}/bin/nvcc", (f"nvidia.cu{cuda}", "bin/nvcc"))
  if path := ours or shutil.which("nvcc"):
    return pathlib.Path(path)
  raise RuntimeError(
    "ep_bootstrap: NCCL EP compiles kernels when they first run, but there is"
    " no nvcc; install nvidia-cuda-nvcc (CUDA 13) or a CUDA toolkit, and set"
    " NCCL_EP_JIT_NVCC or CUDA_HOME to it. See docs/gpu.md."
  )


def _find(runfile: str, packaged: tuple[str, str]) -> pathlib.Path | None:
  return files.in_runfiles(runfile) or files.in_package(*packaged)


def _set_default(variable: str, path: pathlib.Path | None) -> None:
  if path and path.exists():
    os.environ.setdefault(variable, str(path))


def _check_compiler(nvcc: pathlib.Path) -> None:
  """Compiles a kernel: an nvcc may lack its parts, or a host compiler."""
  with tempfile.TemporaryDirectory() as folder:
    source = pathlib.Path(folder, "probe.cu")
    source.write_text(_PROBE)
    command = [nvcc, "-cubin", "-arch=sm_90", source.name, "-o", "probe.cubin"]
    if include := os.environ.get("NCCL_EP_JIT_CUDA_INCLUDE_DIR"):
      command += ["-I", include]
    try:
      subprocess.run(
        command,
        cwd=folder,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=_PROBE_TIMEOUT_S,
      )
    except (OSError, subprocess.SubprocessError) as e:
      output = getattr(e, "stdout", None) or b""
      raise RuntimeError(
        f"ep_bootstrap: NCCL EP compiles kernels when they first run, but"
        f" {nvcc} cannot compile one: {e} {output.decode(errors='replace')}"
        " Set NCCL_EP_JIT_NVCC to an nvcc of CUDA 12 or newer that works, and"
        " install a C++ compiler for it. See docs/gpu.md."
      ) from e
