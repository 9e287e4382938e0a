# SPDX-License-Identifier: Apache-2.0
"""Compiles a CUDA source with NVRTC into a C++ array of images.

NVRTC is a compiler in a library. It needs no GPU and, unlike nvcc, no host
compiler, and PyPI also has it for CUDA 12. See kernels.bzl.
"""

import argparse
import ctypes
import pathlib
import sys

# The targets: a cubin for each sm_*, and PTX for each compute_*.
_ARCHS = ("sm_90", "sm_100", "compute_90")

_HEADER = f"""\
// Compiled by nvrtc_compile.py.
#pragma once

#include <cstddef>

namespace ep::nccl {{

struct KernelImage {{
  int arch;  // 90: a cubin for compute capability 9.x; 0: PTX
  const unsigned char* data;
  std::size_t size;
}};

extern const KernelImage kKernelImages[{len(_ARCHS)}];

}}  // namespace ep::nccl
"""

_SOURCE = """\
#include "{header}"

namespace ep::nccl {{
namespace {{
{arrays}
}}  // namespace

const KernelImage kKernelImages[] = {{
{entries}
}};

}}  // namespace ep::nccl
"""

# An aligned array: a cubin is an ELF file, which the driver reads in place.
_ARRAY = "alignas(16) const unsigned char kImage{i}[] = {{{data}}};"
_ENTRY = "  {{{arch}, kImage{i}, sizeof(kImage{i})}},"


class Nvrtc:
  """The NVRTC library. A failed call terminates the process."""

  def __init__(self, libraries: list[str]):
    # NVRTC opens the library of its builtins by name, so load that one first:
    # "libnvrtc-builtins.so" sorts before "libnvrtc.so".
    loaded = [ctypes.CDLL(lib, ctypes.RTLD_GLOBAL) for lib in sorted(libraries)]
    self._lib = loaded[-1]
    self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p

  def _call(self, function: str, *args) -> None:
    code = getattr(self._lib, function)(*args)
    if code:
      sys.exit(f"{function}: {self._lib.nvrtcGetErrorString(code).decode()}")

  def _bytes(self, program: ctypes.c_void_p, kind: str) -> bytes:
    size = ctypes.c_size_t()
    self._call(f"nvrtcGet{kind}Size", program, ctypes.byref(size))
    data = ctypes.create_string_buffer(size.value)
    self._call(f"nvrtcGet{kind}", program, data)
    return data.raw

  def compile(self, src: str, arch: str, options: list[str]) -> bytes:
    """Returns a cubin or PTX. Exits if `src` does not compile."""
    program = ctypes.c_void_p()
    self._call(
      "nvrtcCreateProgram",
      ctypes.byref(program),
      pathlib.Path(src).read_bytes(),
      src.encode(),
      *(0, None, None),
    )
    options = [*options, f"--gpu-architecture={arch}"]
    argv = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    try:
      self._call("nvrtcCompileProgram", program, len(options), argv)
    finally:  # print warnings as well
      log = self._bytes(program, "ProgramLog").rstrip(b"\0").decode()
      print(log, end="", file=sys.stderr)
    return self._bytes(program, "CUBIN" if arch.startswith("sm_") else "PTX")


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("--src", required=True)
  parser.add_argument("--include", action="append", required=True)
  parser.add_argument("--nvrtc", action="append", required=True)
  parser.add_argument("--header", type=pathlib.Path, required=True)
  parser.add_argument("--source", type=pathlib.Path, required=True)
  args = parser.parse_args()

  options = [
    "--std=c++17",
    # A fused multiply-add rounds once where the numeric contract rounds twice;
    # see ep_ffi/copts.bzl.
    "--fmad=false",
    *(f"--include-path={folder}" for folder in args.include),
  ]
  nvrtc = Nvrtc(args.nvrtc)
  arrays = []
  entries = []
  for i, arch in enumerate(_ARCHS):
    data = nvrtc.compile(args.src, arch, options)
    arrays.append(_ARRAY.format(i=i, data=",".join(map(str, data))))
    number = arch.removeprefix("sm_") if arch.startswith("sm_") else 0
    entries.append(_ENTRY.format(i=i, arch=number))

  args.header.write_text(_HEADER)
  args.source.write_text(
    _SOURCE.format(
      header=args.header.name,
      arrays="\n".join(arrays),
      entries="\n".join(entries),
    )
  )


if __name__ == "__main__":
  main()
