# SPDX-License-Identifier: Apache-2.0
"""Finds the files of NCCL and NCCL EP, and the compiler that NCCL EP calls.

NCCL EP compiles each kernel at its first launch, with the compiler and headers
that environment variables name. This module sets the missing variables to files
of the Bazel runfiles or installed wheels. NCCL EP terminates the process if it
cannot compile a kernel, so this module tries the compiler and headers before.

Other libraries, such as TransformerEngine, have another NCCL EP and set the
same variables. So the headers identify NCCL EP, and its library is the one that
was installed with these headers.
"""

from __future__ import annotations

from collections.abc import Sequence
import ctypes
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

# The NCCL_VERSION_CODE of the headers with which NCCL EP was built. NCCL EP's
# kernels need the same headers, but NCCL may be newer: see CheckNccl in
# ep_ffi/backends/nccl/limits.h.
_NCCL_HEADERS = 23007

# The NCCL_EP_API_VERSION of nccl-extensions 0.1.0. A change of any struct has a
# new API version. TransformerEngine 2.20.2 has API 3; both libraries have the
# version 0.2.0.
_NCCL_EP_API = 2

# NCCL EP compiles all its kernels with this header and these flags.
_PROBE = '#include "device/ht_ep.cuh"\n'
_OPTIONS = ("--std=c++17", "--extended-lambda", "--expt-relaxed-constexpr")
_TIMEOUT_S = 120

_SOURCES = "NCCL_EP_JIT_SOURCE_DIR"
_NCCL_INCLUDE = "NCCL_EP_JIT_BUILD_INCLUDE_DIR"
_CUDA_INCLUDE = "NCCL_EP_JIT_CUDA_INCLUDE_DIR"
_CACHE = "NCCL_EP_JIT_CACHE_DIR"
_SET_BY_OTHERS = (
  " If another library, such as TransformerEngine, set the variable, use its"
  " NCCL EP and ep in separate processes."
)


def prepare(device: jax.Device) -> tuple[str, str]:
  """Sets up NCCL EP for the CUDA version of a device's client.

  Returns:
    Paths of libnccl, or "" for the system's, and of libnccl_ep.

  Raises:
    RuntimeError: this NCCL EP has another API, or could not compile its
      kernels.
  """
  found = re.search(r"cuda (\d+)", device.client.platform_version)
  cuda = int(found[1]) // 1000 if found else 13
  return _prepare(cuda, device.compute_capability.replace(".", ""))


@functools.cache
def _prepare(cuda: int, sm: str) -> tuple[str, str]:
  nvcc = find_nvcc(cuda)
  sources = _folder(
    _SOURCES,
    _find(f"ep_nccl{cuda}/include/nccl_ep", ("nccl.ep", "include/nccl_ep")),
    "NCCL EP's headers",
    "nccl-extensions==0.1.0",
  )
  _check_api(sources.parent / "nccl_ep.h")
  nccl = _folder(
    _NCCL_INCLUDE,
    _find(
      f"ep_nccl{cuda}/include",
      (f"jax_ep_cuda{cuda}", "include"),
      ("nvidia.nccl", "include"),
    ),
    "NCCL's headers",
    f"jax-ep-cuda{cuda}",
  )
  toolkit = _folder(
    _CUDA_INCLUDE,
    nvcc.parents[1] / "include",
    "CUDA's headers",
    "nvidia-cuda-runtime",
  )
  _check_nccl_headers(nccl / "nccl.h", cuda)
  folders = [
    *(sources.parent, sources, sources / "device"),
    *(nccl, nccl / "nccl_device"),
    *(toolkit, toolkit / "cccl"),
  ]
  _check_compiler(nvcc, folders, sm)
  cache = _check_cache()
  libnccl_ep = _find_library(sources.parents[1], cuda)
  os.environ["NCCL_EP_JIT_NVCC"] = str(nvcc)
  os.environ[_SOURCES] = str(sources)
  os.environ[_NCCL_INCLUDE] = str(nccl)
  os.environ[_CUDA_INCLUDE] = str(toolkit)
  os.environ[_CACHE] = str(cache)
  libnccl = _find(
    f"ep_nccl{cuda}/lib/libnccl.so.2", ("nvidia.nccl", "lib/libnccl.so.2")
  )
  return str(libnccl or ""), str(libnccl_ep)


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


def _find(runfile: str, *packaged: tuple[str, str]) -> pathlib.Path | None:
  """Returns the runfile, else the first file (package, path), else None."""
  places = (shipped_files.in_package(*place) for place in packaged)
  return shipped_files.in_runfiles(runfile) or next(filter(None, places), None)


def _folder(
  variable: str, ours: pathlib.Path | None, what: str, package: str
) -> pathlib.Path:
  """Returns the folder that `variable` names, or `ours` if it is unset."""
  # os.environ does not have the variables that native code has set.
  getenv = ctypes.CDLL(None).getenv
  getenv.restype = ctypes.c_char_p
  given: bytes | None = getenv(variable.encode())
  folder = pathlib.Path(os.fsdecode(given or b"") or ours or "")
  if not (folder.name and folder.exists()):
    raise _error(
      f"NCCL EP compiles kernels with {what}, but they were not found"
      f"{f' in {folder}' if folder.name else ''}; install {package}, or set"
      f" {variable} to their folder."
    )
  return folder


def _check_api(header: pathlib.Path) -> None:
  """Raises `RuntimeError` if NCCL EP's structs differ from ours."""
  api = _constant("NCCL_EP_API_VERSION", header)
  if api != _NCCL_EP_API:
    raise _error(
      f"ep needs API {_NCCL_EP_API} of NCCL EP, but {header} has"
      f" {f'API {api}' if api else 'none'}; install nccl-extensions==0.1.0, and"
      f" unset {_SOURCES}.{_SET_BY_OTHERS}"
    )


def _constant(name: str, header: pathlib.Path) -> int:
  """Returns the value of a macro, or 0 if it or the header is missing."""
  text = header.read_text() if header.exists() else ""
  found = re.search(rf"#define {name} (\d+)", text)
  return int(found[1]) if found else 0


def _find_library(home: pathlib.Path, cuda: int) -> pathlib.Path:
  """Returns the path of the library that was installed with the headers."""
  for folder in (f"lib/cu{cuda}", "lib"):
    for name in ("libnccl_ep.so", "libnccl_ep.so.0"):
      if (path := home / folder / name).exists():
        return path
  raise _error(
    f"NCCL EP's headers are in {home / 'include'}, but its library is neither"
    f" in {home / 'lib'} nor in {home / f'lib/cu{cuda}'}; install"
    f" nccl-extensions==0.1.0, and unset {_SOURCES}."
  )


def _text(version: int) -> str:
  return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _check_nccl_headers(header: pathlib.Path, cuda: int) -> None:
  found = _constant("NCCL_VERSION_CODE", header)
  if found == _NCCL_HEADERS:
    return
  version = f"of NCCL {_text(found)}" if found else "not one of them"
  raise _error(
    "NCCL EP must compile its kernels with the headers of NCCL"
    f" {_text(_NCCL_HEADERS)}, but {header} is {version}; install"
    f" jax-ep-cuda{cuda}, which has these headers, and unset {_NCCL_INCLUDE};"
    f" or set it to their folder.{_SET_BY_OTHERS}"
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


def _check_cache() -> pathlib.Path:
  """Creates, checks and returns the folder where NCCL EP caches kernels.

  The default folder is different for each host, because hosts may share home
  folders, and NCCL EP's locks and temporary names are unique only in a host.

  Raises:
    RuntimeError: the folder cannot be created; another user can write to it; or
      NCCL EP has failed to compile a kernel, and would not try again.
  """
  try:
    home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    cache = pathlib.Path(
      os.environ.get(_CACHE)
      or pathlib.Path(home, "ep", "nccl_ep", platform.node())
    ).absolute()
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=cache).close()
  except (OSError, RuntimeError) as e:  # RuntimeError: there is no home folder
    raise _error(
      f"NCCL EP has no folder for the kernels that it compiles: {e}; set"
      f" {_CACHE} to one."
    ) from e
  _check_private(cache)
  failures = sorted(cache.glob("*/compile.failed"))
  if failures:
    folders = ", ".join(str(failure.parent) for failure in failures)
    raise _error(
      "NCCL EP has failed to compile kernels before. It does not try again,"
      " though the compiler works now, but terminates the process. Delete its"
      f" records of the failures: {folders}. Or set {_CACHE} to another folder."
    )
  return cache


def _check_private(cache: pathlib.Path) -> None:
  """Raises `RuntimeError` if another user, except root, can replace kernels."""
  what = f"NCCL EP loads and runs the kernels in {cache}, but"
  cure = f"set {_CACHE} to a private folder."
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
