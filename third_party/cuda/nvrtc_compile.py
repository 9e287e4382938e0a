# SPDX-License-Identifier: Apache-2.0
"""Compiles a CUDA source with NVRTC into a C++ array of images.

NVRTC is a compiler in a library. It needs no GPU and, unlike nvcc, no host
compiler, and PyPI has it also for CUDA 12. See kernels.bzl.
"""

import argparse
import ctypes
import pathlib
import sys

_HEADER = """\
// {src}, compiled.
#pragma once

#include <cstddef>

namespace {namespace} {{

struct KernelImage {{
  int arch;  // 90: a cubin for compute capability 9.x; 0: PTX
  const unsigned char* data;
  std::size_t size;
}};

extern const KernelImage {symbol}[{count}];

}}  // namespace {namespace}
"""

_SOURCE = """\
#include "{header}"

namespace {namespace} {{
namespace {{
{arrays}
}}  // namespace

const KernelImage {symbol}[{count}] = {{
{entries}
}};

}}  // namespace {namespace}
"""

# Aligned because a cubin is an ELF file that the driver reads in place.
_ARRAY = "alignas(16) const unsigned char kImage{i}[] = {{{data}}};"
_ENTRY = "  {{{arch}, kImage{i}, sizeof(kImage{i})}},"


class Nvrtc:
  """Calls NVRTC, and ends the process if a call fails."""

  def __init__(self, libraries: list[str]):
    # NVRTC opens the library of its builtins by name, and gets the one that is
    # loaded already. So that one is loaded first: "libnvrtc-builtins.so" sorts
    # before "libnvrtc.so".
    loaded = [ctypes.CDLL(lib, ctypes.RTLD_GLOBAL) for lib in sorted(libraries)]
    self._lib = loaded[-1]
    self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p

  def _call(self, function: str, *args) -> None:
    code = getattr(self._lib, function)(*args)
    if code:
      sys.exit(f"{function}: {self._lib.nvrtcGetErrorString(code).decode()}")

  def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
    data = ctypes.create_string_buffer(size.value)
    self._call(f"nvrtcGet{what}", program, data)
    return data.raw

  def compile(self, src: str, arch: str, options: list[str]) -> bytes:
    """Returns a cubin for an arch such as sm_90, PTX for one like compute_90.

    Ends the process if `src` does not compile.
    """
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
    finally:  # also without an error, since a log has warnings
      log = self._bytes(program, "ProgramLog").rstrip(b"\0").decode()
      print(log, end="", file=sys.stderr)
    return self._bytes(program, "CUBIN" if arch.startswith("sm_") else "PTX")


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument("--src", required=True)
  parser.add_argument("--arch", action="append", required=True)
  parser.add_argument("--include", action="append", default=[])
  parser.add_argument("--nvrtc", action="append", required=True)
  parser.add_argument("--namespace", required=True)
  parser.add_argument("--symbol", required=True)
  parser.add_argument("--header", type=pathlib.Path, required=True)
  parser.add_argument("--source", type=pathlib.Path, required=True)
  args = parser.parse_args()

  options = [
    "--std=c++17",
    # A fused multiply-add rounds once where the contract rounds twice; see
    # ep_ffi/copts.bzl.
    "--fmad=false",
    *(f"--include-path={folder}" for folder in args.include),
  ]
  nvrtc = Nvrtc(args.nvrtc)
  arrays = []
  entries = []
  for i, arch in enumerate(args.arch):
    data = nvrtc.compile(args.src, arch, options)
    arrays.append(_ARRAY.format(i=i, data=",".join(map(str, data))))
    number = arch.removeprefix("sm_") if arch.startswith("sm_") else 0
    entries.append(_ENTRY.format(i=i, arch=number))

  names = {
    "src": args.src,
    "namespace": args.namespace,
    "symbol": args.symbol,
    "count": len(args.arch),
  }
  args.header.write_text(_HEADER.format(**names))
  args.source.write_text(
    _SOURCE.format(
      **names,
      header=args.header.name,
      arrays="\n".join(arrays),
      entries="\n".join(entries),
    )
  )


if __name__ == "__main__":
  main()
