# SPDX-License-Identifier: Apache-2.0
"""Finds the files of NCCL and NCCL EP, and the compiler that NCCL EP calls.

NCCL EP compiles each kernel at its first launch, with the compiler and headers
that environment variables name. This module sets the missing variables to files
of the Bazel runfiles or installed wheels. NCCL EP terminates the process if it
cannot compile a kernel, so this module tries the compiler and headers before.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools
import os
import pathlib
import platform
import re
import shlex
import shutil
import stat
import subprocess
import tempfile

import jax

from ep._src.native import shipped_files

# The NCCL_VERSION_CODE of the headers with which NCCL EP 0.2.0 was built. NCCL
# EP's kernels need the same headers: see ep_ffi/backends/nccl/libraries.cc.
_NCCL_VERSION = 23007

# NCCL EP compiles all its kernels with this header and these flags.
_PROBE = '#include "device/ht_ep.cuh"\n'
_OPTIONS = ("--std=c++17", "--extended-lambda", "--expt-relaxed-constexpr")
_TIMEOUT_S = 120

_CACHE_VARIABLE = "NCCL_EP_JIT_CACHE_DIR"


def prepare(device: jax.Device) -> tuple[str, str]:
  """Sets up NCCL EP for the CUDA version of a device's client.

  Returns:
    Paths of libnccl and libnccl_ep, or "" for the system's.

  Raises:
    RuntimeError: NCCL EP could not compile its kernels.
  """
  found = re.search(r"cuda (\d+)", device.client.platform_version)
  cuda = int(found[1]) // 1000 if found else 13
  return _prepare(cuda, device.compute_capability.replace(".", ""))


@functools.cache
def _prepare(cuda: int, sm: str) -> tuple[str, str]:
  nvcc = find_nvcc(cuda)
  os.environ["NCCL_EP_JIT_NVCC"] = str(nvcc)
  sources = _default(
    "NCCL_EP_JIT_SOURCE_DIR",
    _find(f"ep_nccl{cuda}/include/nccl_ep", ("nccl.ep", "include/nccl_ep")),
    "NCCL EP's headers",
    "nccl-extensions==0.1.0",
  )
  nccl = _default(
    "NCCL_EP_JIT_BUILD_INCLUDE_DIR",
    _find(f"ep_nccl{cuda}/include", ("nvidia.nccl", "include")),
    "NCCL's headers",
    f"nvidia-nccl-cu{cuda}=={_text(_NCCL_VERSION)}",
  )
  toolkit = _default(
    "NCCL_EP_JIT_CUDA_INCLUDE_DIR",
    nvcc.parents[1] / "include",
    "CUDA's headers",
    "nvidia-cuda-runtime",
  )
  _check_nccl_headers(nccl, cuda)
  folders = [
    *(sources.parent, sources, sources / "device"),
    *(nccl, nccl / "nccl_device"),
    *(toolkit, toolkit / "cccl"),
  ]
  _check_compiler(nvcc, folders, sm)
  _check_cache()
  libnccl = _find(
    f"ep_nccl{cuda}/lib/libnccl.so.2", ("nvidia.nccl", "lib/libnccl.so.2")
  )
  libnccl_ep = _find(
    f"ep_nccl{cuda}/lib/cu{cuda}/libnccl_ep.so",
    ("nccl.ep", f"lib/cu{cuda}/libnccl_ep.so"),
  )
  return str(libnccl or ""), str(libnccl_ep or "")


def find_nvcc(cuda: int) -> pathlib.Path:
  """Returns the path of nvcc: the user's, else in a wheel, else in PATH."""
  for variable in ("NCCL_EP_JIT_NVCC", "NVCC"):
    if name := os.environ.get(variable):
      if path := shutil.which(name):
        return pathlib.Path(path)
      raise _error(
        f"{variable} = {name} is no program; set it to an nvcc of CUDA 12 or"
        " newer, or unset it to use the nvcc of the installed packages or of"
        " PATH."
      )
  for variable in ("CUDA_HOME", "CUDA_PATH"):
    nvcc = pathlib.Path(os.environ.get(variable, ""), "bin/nvcc")
    if os.environ.get(variable) and nvcc.exists():
      return nvcc
  ours = _find(f"ep_cuda{cuda}/bin/nvcc", (f"nvidia.cu{cuda}", "bin/nvcc"))
  if found := ours or shutil.which("nvcc"):
    return pathlib.Path(found)
  raise _error(
    "NCCL EP compiles kernels when they first run, but there is no nvcc;"
    " install nvidia-cuda-nvcc (CUDA 13) or a CUDA toolkit, and set"
    " NCCL_EP_JIT_NVCC or CUDA_HOME to it."
  )


def _error(text: str) -> RuntimeError:
  return RuntimeError(f"ep_bootstrap: {text} See docs/gpu.md.")


def _find(runfile: str, packaged: tuple[str, str]) -> pathlib.Path | None:
  return shipped_files.in_runfiles(runfile) or shipped_files.in_package(
    *packaged
  )


def _default(
  variable: str, ours: pathlib.Path | None, what: str, package: str
) -> pathlib.Path:
  """Sets `variable` to `ours` if it is unset; returns the variable's folder."""
  folder = pathlib.Path(os.environ.get(variable) or ours or "")
  if not (folder.name and folder.exists()):
    raise _error(
      f"NCCL EP compiles kernels with {what}, but they were not found"
      f"{f' in {folder}' if folder.name else ''}; install {package}, or set"
      f" {variable} to their folder."
    )
  os.environ[variable] = str(folder)
  return folder


def _text(version: int) -> str:
  return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _check_nccl_headers(folder: pathlib.Path, cuda: int) -> None:
  header = folder / "nccl.h"
  text = header.read_text() if header.exists() else ""
  found = re.search(r"#define NCCL_VERSION_CODE (\d+)", text)
  if found and int(found[1]) == _NCCL_VERSION:
    return
  version = f"of NCCL {_text(int(found[1]))}" if found else "not one of them"
  raise _error(
    "NCCL EP must compile its kernels with the headers of NCCL"
    f" {_text(_NCCL_VERSION)}, but {header} is {version}; install"
    f" nvidia-nccl-cu{cuda}=={_text(_NCCL_VERSION)}, or set"
    " NCCL_EP_JIT_BUILD_INCLUDE_DIR to their folder."
  )


def _check_compiler(
  nvcc: pathlib.Path, folders: Sequence[pathlib.Path], sm: str
) -> None:
  """Raises `RuntimeError` if nvcc cannot compile the header of all kernels.

  The compiler, a header or the host compiler may be missing or too old.
  """
  with tempfile.TemporaryDirectory() as folder:
    pathlib.Path(folder, "probe.cu").write_text(_PROBE)
    try:
      subprocess.run(
        [
          *(nvcc, "--cubin", "probe.cu", "-o", "probe.cubin", *_OPTIONS),
          *(_flags("NVCC_ARCH_FLAGS") or [f"-arch=sm_{sm}"]),
          *(f"-I{folder}" for folder in folders),
          *_flags("NVCC_EXTRA_FLAGS"),
        ],
        cwd=folder,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=_TIMEOUT_S,
      )
    except (OSError, subprocess.SubprocessError) as e:
      output = (getattr(e, "stdout", None) or b"").decode(errors="replace")
      raise _error(
        f"NCCL EP compiles kernels when they first run, but {nvcc} cannot"
        f" compile their headers: {e} {output} Set NCCL_EP_JIT_NVCC to an nvcc"
        " of CUDA 12 or newer that works, and install a C++ compiler and the"
        " headers that are missing (nvidia-cuda-cccl, nvidia-cuda-runtime,"
        " nvidia-cuda-crt)."
      ) from e


def _flags(variable: str) -> Sequence[str]:
  return shlex.split(os.environ.get(variable, ""))


def _check_cache() -> None:
  """Creates and checks the folder in which NCCL EP caches compiled kernels.

  The default folder is different for each host, because hosts may share home
  folders, and NCCL EP's locks and temporary names are unique only in a host.

  Raises:
    RuntimeError: the folder cannot be created; another user can write to it; or
      NCCL EP has failed to compile a kernel, and would not try again.
  """
  try:
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    cache = pathlib.Path(
      os.environ.get(_CACHE_VARIABLE)
      or pathlib.Path(home, "ep", "nccl_ep", platform.node())
    ).absolute()
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=cache).close()
  except (OSError, RuntimeError) as e:  # RuntimeError: there is no home folder
    raise _error(
      f"NCCL EP has no folder for the kernels that it compiles: {e}; set"
      f" {_CACHE_VARIABLE} to one."
    ) from e
  os.environ[_CACHE_VARIABLE] = str(cache)
  _check_private(cache)
  failures = sorted(cache.glob("*/compile.failed"))
  if failures:
    folders = ", ".join(str(failure.parent) for failure in failures)
    raise _error(
      "NCCL EP has failed to compile kernels before. It does not try again,"
      " though the compiler works now, but terminates the process. Delete its"
      f" records of the failures: {folders}. Or set {_CACHE_VARIABLE} to"
      " another folder."
    )


def _check_private(cache: pathlib.Path) -> None:
  """Raises `RuntimeError` if another user, except root, can replace kernels."""
  what = f"NCCL EP loads and runs the kernels in {cache}, but"
  cure = f"set {_CACHE_VARIABLE} to a private folder."
  folder = cache.resolve()
  links = [path for path in (cache, *cache.parents) if path.is_symlink()]
  for path in (*links, folder):
    if _owner(path) not in {0, os.geteuid()}:
      raise _error(f"{what} {path} belongs to another user; {cure}")
  mode = stat.S_IMODE(folder.stat().st_mode)
  if mode & (stat.S_IWGRP | stat.S_IWOTH):
    raise _error(
      f"{what} its mode {mode:o} lets other users write to it; delete it, or,"
      f" if all files in it are yours, chmod go-w it; or {cure}"
    )


def _owner(path: pathlib.Path) -> int:
  return path.lstat().st_uid
