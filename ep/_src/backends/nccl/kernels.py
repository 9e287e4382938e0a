# SPDX-License-Identifier: Apache-2.0
"""Compiles kernels into NCCL EP's cache before they are first launched.

NCCL EP compiles one kernel after the other, each when it is first launched.
Here the kernels of a group are compiled side by side. NCCL EP's cache has a
folder for each kernel, which is named after a hash of all that the kernel is
made of. Whoever compiles a kernel holds the lock of its folder, and NCCL EP
waits for the lock. The cache is that of NCCL EP 0.2.0; a hash that is wrong
costs time, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
import contextlib
import fcntl
import logging
from multiprocessing import pool
import os
import pathlib
import subprocess
import threading

import jax

from ep._src.backends.nccl import installation, sources, variants

# The states of a kernel that `compile_missing` returns.
COMPILED = "compiled"
KNOWN = "was there"
BUSY = "is compiled by another process"
FAILED = "failed"

_HEADERS = {".h", ".hh", ".hpp", ".cuh", ".inc", ".inl"}
_MASK = (1 << 64) - 1

_logger = logging.getLogger("ep")


def start(sizes: variants.Sizes, device: jax.Device) -> threading.Thread:
  """Starts to compile the kernels of a group, and does not wait.

  The processes of a host share the work, because each takes only kernels whose
  lock is free. A failure is logged, since NCCL EP compiles what is missing.
  `installation.prepare` has been called.

  Args:
    sizes: the sizes of the group.
    device: the GPU of this process.

  Returns:
    The thread that compiles. It does not keep the process from ending.
  """

  def run():
    try:
      cuda, sm = installation.target(device)
      _, nccl_ep, compiler = installation.prepare_for(cuda, sm)
      shared = device.shared_memory_per_block_optin
      gpu = variants.Gpu(sm, device.core_count, shared)
      states = compile_missing(sizes, gpu, nccl_ep, compiler)
      _logger.info("NCCL EP's kernels: %s", states)
    except Exception as e:
      _logger.warning(
        "NCCL EP's kernels were not compiled ahead, so it will compile each at"
        " its first launch: %s",
        e,
      )

  thread = threading.Thread(target=run, name="ep-kernels", daemon=True)
  thread.start()
  return thread


def compile_missing(
  sizes: variants.Sizes,
  gpu: variants.Gpu,
  nccl_ep: str,
  compiler: installation.Compiler,
) -> dict[str, str]:
  """Compiles the kernels of a group that the cache does not have.

  Args:
    sizes: the sizes of the group.
    gpu: the GPU that the kernels are for.
    nccl_ep: the file libnccl_ep.so.
    compiler: the compiler that NCCL EP will use.

  Returns:
    The state of each kernel, by the kernel's name.

  Raises:
    OSError: a file cannot be read or written.
    LookupError: libnccl_ep.so was not found, or is not NCCL EP 0.2.0's.
    ValueError: NCCL EP cannot run with these sizes on this GPU.
  """
  if not nccl_ep:
    raise LookupError(
      "libnccl_ep.so is not where pip or Bazel installs it; install"
      " nccl-extensions==0.1.0."
    )
  cache = pathlib.Path(os.environ[installation.CACHE_VARIABLE])
  pieces = sources.Pieces(pathlib.Path(nccl_ep))
  wanted = variants.variants(sizes, gpu, pieces)
  environment = _environment(compiler)

  def compile_one(variant: variants.Variant) -> str:
    folder = cache / key(variant, gpu.sm, environment)
    return _compile(folder, variant, compiler)

  with pool.ThreadPool(min(len(wanted), os.cpu_count() or 1)) as threads:
    states = threads.map(compile_one, wanted, chunksize=1)
  return {v.name: state for v, state in zip(wanted, states, strict=True)}


def key(variant: variants.Variant, sm: int, environment: str) -> str:
  """Returns NCCL EP's name for a kernel's folder."""
  return _hash(
    [
      *(variant.family, variant.name, variant.entry, variant.source),
      *(f"sm={sm}", "target_arch=", f"runtime_key={number(variant)}"),
      environment,
    ]
  )


def number(variant: variants.Variant) -> int:
  """Returns NCCL EP's number of a variant."""
  if variant.number is not None:
    return variant.number
  return _std_hash(variant.name.encode())


def _compile(
  folder: pathlib.Path,
  variant: variants.Variant,
  compiler: installation.Compiler,
) -> str:
  """Returns the state of a kernel, after it was compiled if it was missing."""
  cubin = folder / "kernel.cubin"
  if cubin.exists():
    return KNOWN
  folder.mkdir(exist_ok=True)
  with _locked(folder / "compile.lock") as is_mine:
    if not is_mine:
      return BUSY
    if cubin.exists():
      return KNOWN
    new = folder / f"kernel.cubin.tmp.{os.getpid()}"
    try:
      (folder / "kernel.cu").write_text(variant.source)
      compiler.compile(folder, "kernel.cu", new.name)
      new.replace(cubin)  # so that nobody sees a part of the file
    except (OSError, installation.CompileError) as e:
      new.unlink(missing_ok=True)
      _logger.warning(
        "the kernel %s was not compiled ahead, so NCCL EP will try it: %s",
        variant.name,
        e,
      )
      return FAILED
    return COMPILED


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[bool]:
  """Holds the lock of a file, and yields whether it was free."""
  with path.open("a") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      yield False
    else:
      yield True


def _environment(compiler: installation.Compiler) -> str:
  """Returns NCCL EP's hash of the compiler, the headers and the options."""
  version = subprocess.run(
    [compiler.nvcc, "--version"],
    check=True,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  ).stdout
  return _hash(
    [
      f"nvcc={compiler.nvcc}\n{version}",
      *_header_tree(compiler.sources / "device"),
      *_header_tree(compiler.nccl),
      *compiler.options,
    ]
  )


def _header_tree(root: pathlib.Path) -> Iterator[str | bytes]:
  """Yields the names and texts of the headers below a folder, in order."""
  yield os.path.normpath(root)
  found = [
    pathlib.Path(folder, name)
    for folder, _, names in os.walk(root)
    for name in names
    if os.path.splitext(name)[1] in _HEADERS
  ]
  for path in sorted(found, key=lambda path: path.parts):
    yield str(path.relative_to(root))
    yield path.read_bytes()


def _hash(parts: Iterable[str | bytes]) -> str:
  """Returns the FNV-1a hash of parts, each of which is ended by a byte 255."""
  value = 1469598103934665603
  for part in parts:
    for byte in (part.encode() if isinstance(part, str) else part) + b"\xff":
      value = ((value ^ byte) * 1099511628211) & _MASK
  return format(value, "x")


def _std_hash(text: bytes) -> int:
  """Returns `std::hash` of a string in libstdc++, which is MurmurHash64A."""
  factor = 0xC6A4A7935BD1E995

  def mixed(word: int) -> int:
    return word ^ word >> 47

  value = 0xC70F6907 ^ (len(text) * factor & _MASK)
  whole = len(text) & ~7
  for i in range(0, whole, 8):
    word = int.from_bytes(text[i : i + 8], "little")
    value ^= mixed(word * factor & _MASK) * factor & _MASK
    value = value * factor & _MASK
  if rest := text[whole:]:
    value ^= int.from_bytes(rest, "little")
    value = value * factor & _MASK
  return mixed(mixed(value) * factor & _MASK)
