# SPDX-License-Identifier: Apache-2.0
"""The build hook of our wheels: adds the native library and the platform tag.

Bazel puts a compiled library into the package, and leaves out the sources. If
there are sources, the hook compiles the library for CPUs, with the C++ compiler
$CXX (default: c++) and $CXXFLAGS, against the FFI headers of the installed
jaxlib. For an editable installation, the hook writes the library into the
checkout, beside the modules.
"""

import concurrent.futures
import importlib.util
import itertools
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_NAME = "libep_ffi_cpu.so"
_FOLDERS = (
  ".",
  "core",
  "handlers",
  "matmul",
  "backends/host",
  "backends/host/engine",
  "backends/host/movers",
  "backends/host/transport",
)


class NativeLibrary(BuildHookInterface):
  """Hatchling's hook for a wheel."""

  def initialize(self, version: str, build_data: dict[str, Any]) -> None:
    """Compiles the library from sources, if any, and sets the wheel's tag.

    The tag has no Python ABI, because ctypes loads the library.
    """
    root = pathlib.Path(self.root)
    platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
    build_data["tag"] = f"py3-none-{platform}"
    build_data["pure_python"] = False
    if version == "editable":
      _build(root, root / "ep" / _NAME)
    elif (root / "ep_ffi").exists():  # Bazel's tree has a library, no sources
      self._folder = tempfile.TemporaryDirectory()
      library = pathlib.Path(self._folder.name, _NAME)
      _build(root, library)
      build_data["force_include"][str(library)] = f"ep/{_NAME}"


def _build(root: pathlib.Path, library: pathlib.Path) -> None:
  """Compiles the sources of //ep_ffi:libep_ffi_cpu.so with its options."""
  native = root / "ep_ffi"
  jaxlib = importlib.util.find_spec("jaxlib").submodule_search_locations[0]
  compiler = shlex.split(os.environ.get("CXX", "c++"))
  if not shutil.which(compiler[0]):
    raise RuntimeError(
      f"jax-ep compiles a library, but there is no compiler {compiler[0]!r};"
      " install g++ or clang, or set CXX to one of C++, or install a wheel."
    )
  # Options that change results come last, so that no option overrides them.
  options = ["-O2", "-DNDEBUG", *shlex.split(os.environ.get("CXXFLAGS", ""))]
  options += [*_copts(native / "copts.bzl"), "-fPIC"]
  include = pathlib.Path(jaxlib, "include")
  options += [f"-I{root}", f"-I{include}"]
  sources = [
    file
    for folder in _FOLDERS
    for file in sorted(native.joinpath(folder).glob("*.cc"))
    if not file.name.endswith("_test.cc") and file.name != "cuda.cc"
  ]

  def compile(number: int, source: pathlib.Path) -> pathlib.Path:
    target = pathlib.Path(folder, f"{number}.o")
    subprocess.run(
      [*compiler, *options, "-c", source, "-o", target], check=True
    )
    return target

  with (
    tempfile.TemporaryDirectory() as folder,
    concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool,
  ):
    objects = list(pool.map(compile, itertools.count(), sources))
    subprocess.run(
      [*compiler, "-shared", *objects, "-o", library, "-pthread"]
      + [f"-Wl,--version-script={native / 'exports.lds'}", "-Wl,--no-undefined"]
      + ["-s"],
      check=True,
    )


def _copts(file: pathlib.Path) -> list[str]:
  """Returns EP_COPTS. The Starlark file is also valid Python."""

  def select(branches: dict[str, list[str]]) -> list[str]:
    return branches["//conditions:default"]

  names: dict[str, Any] = {"Label": str, "select": select}
  exec(file.read_text(), names)
  return names["EP_COPTS"]
