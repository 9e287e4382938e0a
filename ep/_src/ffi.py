"""Finds the native library and registers its handlers with XLA.

It is loaded when the first group is built, not when the package is imported.
"""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib

import jax

# The five ops, and the FFI targets of the same names.
OPS = (
  "ep_prepare",
  "ep_dispatch",
  "ep_combine",
  "ep_dispatch_bwd",
  "ep_combine_bwd",
)

_VARIABLE = "EP_FFI_LIBRARY_PATH"
_LIBRARY = "libep_ffi_cpu.so"
_ERROR_BYTES = 4096


class NativeError(RuntimeError):
  """The native library refused; the message says why and what to do."""


def _runfile() -> pathlib.Path | None:
  try:
    from python.runfiles import runfiles
  except ImportError:
    return None
  found = runfiles.Create()
  path = found and found.Rlocation(
    f"jax_ep/ep_ffi/{_LIBRARY}", source_repo=found.CurrentRepository()
  )
  return pathlib.Path(path) if path else None


def find_library() -> pathlib.Path:
  """Path of the native library, or `FileNotFoundError` naming all places."""
  override = os.environ.get(_VARIABLE)
  places = {
    f"${_VARIABLE}": pathlib.Path(override) if override else None,
    "the Bazel runfiles": _runfile(),
    "the package": pathlib.Path(__file__).parents[1] / _LIBRARY,
  }
  tried = []
  for place, path in places.items():
    if path and path.exists():
      return path
    tried.append(f"{place} ({path or 'not set'})")
    if place == f"${_VARIABLE}" and override:
      break  # who names a library wants no other
  names = ", ".join(places)
  raise FileNotFoundError(
    f"{_LIBRARY} was not found; looked in {'; '.join(tried)}. It is taken from"
    f" the first of {names}: build //ep_ffi:{_LIBRARY} and set ${_VARIABLE} to"
    " it."
  )


@functools.cache
def library() -> ctypes.CDLL:
  """Loads the library and registers the five ops for the CPU platform."""
  lib = ctypes.CDLL(str(find_library()))
  lib.ep_op_state_type_id.restype = ctypes.c_void_p
  lib.ep_op_state_type_info.restype = ctypes.c_void_p
  lib.ep_host_group_create.restype = ctypes.c_int32
  lib.ep_group_mem_bytes.restype = ctypes.c_int64
  jax.ffi.register_ffi_type(
    "ep_op_state",
    {
      "type_id": jax.ffi.pycapsule(lib.ep_op_state_type_id()),
      "type_info": jax.ffi.pycapsule(lib.ep_op_state_type_info()),
    },
    platform="cpu",
  )
  for op in OPS:
    jax.ffi.register_ffi_target(
      op,
      {
        "instantiate": jax.ffi.pycapsule(lib.ep_instantiate),
        "execute": jax.ffi.pycapsule(getattr(lib, op)),
      },
      platform="cpu",
    )
  return lib


def create_host_group(
  name: str,
  secret: str,
  num_experts: int,
  ep_size: int,
  ranks: list[tuple[int, int]],
  process: int,
  num_processes: int,
  timeout_s: float,
) -> None:
  """Creates the native group `name`; see ep_ffi/backends/host/bootstrap.cc.

  `ranks` lists (process, device id), domain-major. On CPU XLA tells a handler
  the id that JAX knows, not an ordinal in the process.
  """
  error = ctypes.create_string_buffer(_ERROR_BYTES)
  int_array = ctypes.c_int32 * len(ranks)
  code = library().ep_host_group_create(
    name.encode(),
    secret.encode(),
    ctypes.c_int64(num_experts),
    ctypes.c_int32(ep_size),
    ctypes.c_int32(len(ranks)),
    int_array(*(p for p, _ in ranks)),
    int_array(*(d for _, d in ranks)),
    ctypes.c_int32(process),
    ctypes.c_int32(num_processes),
    ctypes.c_double(timeout_s),
    error,
    ctypes.c_int64(_ERROR_BYTES),
  )
  if code:
    raise NativeError(f"ep_bootstrap: {error.value.decode()}")


def mem_bytes(
  name: str, num_tokens: int, top_k: int, alignment: int, capacity: int
) -> int:
  """Bytes of `EpHandle.mem` in the group `name`, which must be live."""
  sizes = map(ctypes.c_int64, (num_tokens, top_k, alignment, capacity))
  return library().ep_group_mem_bytes(name.encode(), *sizes)


def is_live(name: str) -> bool:
  return bool(library().ep_group_is_live(name.encode()))


def close_group(name: str) -> None:
  library().ep_group_close(name.encode())
