# SPDX-License-Identifier: Apache-2.0
"""Finds the native libraries, registers their handlers, calls their functions.

Each native backend has one library, which the backend's first group loads.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import pathlib
from typing import Any

import jax
import numpy as np

from ep._src.base import compat
from ep._src.base.backend import OPS
from ep._src.base.group import EpGroup
from ep._src.native import shipped_files

# For each backend: its platform's name in library files, and in XLA.
PLATFORMS = {"host": ("cpu", "cpu"), "nccl": ("cuda", "CUDA")}

# Equals kInterfaceVersion of ep_ffi/core/export.h, which says when to add 1.
INTERFACE_VERSION = 7

# The values of the C++ enum `Tail` of ep_ffi/core/backend.h.
TAILS = {"unspecified": 0, "zero": 1, "nan": 2}

_VARIABLE = "EP_FFI_LIBRARY_PATH"
_ERROR_BYTES = 4096
_INVALID_ARGUMENT = 1  # Code::kInvalidArgument of ep_ffi/core/status.h
_UNIQUE_ID_BYTES = 128  # the size of an ncclUniqueId


class NativeError(RuntimeError):
  """A failure in a native library; the message says why and what to do."""


def find_library(backend: str) -> pathlib.Path:
  """Returns the path of a backend's library.

  Raises:
    FileNotFoundError: no library; the message lists the searched places.
  """
  name = f"libep_ffi_{PLATFORMS[backend][0]}.so"
  packages, distributions = _packages(backend)
  if override := os.environ.get(_VARIABLE):  # searches no other place
    path = pathlib.Path(override)
    path = path / name if path.is_dir() else path
    places: dict[str, pathlib.Path | None] = {f"${_VARIABLE}": path}
  else:
    places = {
      f"${_VARIABLE}": None,
      "the Bazel runfiles": shipped_files.in_runfiles(f"jax_ep/ep_ffi/{name}"),
    }
    for package in packages:
      places[f"the package {package}"] = shipped_files.in_package(package, name)
  for place in places.values():
    if place and place.name == name and place.exists():
      return place
  tried = "; ".join(f"{k} ({v or 'not there'})" for k, v in places.items())
  raise FileNotFoundError(
    f"{name} was not found; looked in {tried}. It is taken from ${_VARIABLE},"
    " the library or its folder, else from the Bazel runfiles, else from the"
    f" package: install a wheel of {distributions}; or build //ep_ffi:{name}"
    f' and set ${_VARIABLE}; or do without: ep_bootstrap(backend="xla") needs'
    " no native code."
  )


def _packages(backend: str) -> tuple[list[str], str]:
  """Returns the packages that may have the library, and their wheels' names."""
  if backend == "host":
    return ["ep"], "jax-ep"
  fits = [
    version
    for version in ("13", "12")
    if importlib.util.find_spec(f"jax_cuda{version}_plugin")
  ]
  versions = fits or ["13", "12"]
  distributions = " or ".join(f"jax-ep-cuda{v}" for v in versions)
  return ["ep", *(f"jax_ep_cuda{v}" for v in versions)], distributions


@functools.cache
def library(backend: str) -> ctypes.CDLL:
  """Loads a backend's library, and registers the handlers of its ops."""
  path = find_library(backend)
  # Create JAX's clients before the registration. Workaround (seen in jax
  # 0.12.0): with a later client, JAX would register handlers before the type of
  # the handlers' state, which XLA refuses.
  jax.local_devices()
  lib = ctypes.CDLL(str(path))
  _check_interface(lib, path)
  _, platform = PLATFORMS[backend]
  lib.ep_op_state_type_id.restype = ctypes.c_void_p
  lib.ep_op_state_type_info.restype = ctypes.c_void_p
  jax.ffi.register_ffi_type(
    "ep_op_state",
    {
      "type_id": jax.ffi.pycapsule(lib.ep_op_state_type_id()),
      "type_info": jax.ffi.pycapsule(lib.ep_op_state_type_info()),
    },
    platform=platform,
  )
  stages = {}
  if backend == "nccl":
    stages["prepare"] = jax.ffi.pycapsule(lib.ep_request)
    connect = stages | {"execute": jax.ffi.pycapsule(lib.ep_connect)}
    jax.ffi.register_ffi_target("ep_connect", connect, platform=platform)
  stages["instantiate"] = jax.ffi.pycapsule(lib.ep_instantiate)
  for op in OPS:
    of_op = {"execute": jax.ffi.pycapsule(getattr(lib, op))}
    jax.ffi.register_ffi_target(op, stages | of_op, platform=platform)
  if backend == "host":
    for name in ("ep_unwritten", "ep_retyped", "ep_grouped_matmul"):
      handler = jax.ffi.pycapsule(getattr(lib, name))
      jax.ffi.register_ffi_target(name, handler, platform=platform)
  return lib


def path_and_interface(backend: str) -> str:
  """Loads a backend's library; returns its path and interface as text."""
  library(backend)
  return f"{find_library(backend)} (interface {INTERFACE_VERSION})"


def is_native(ctx: compat.LoweringContext) -> bool:
  """Returns whether a CPU program that JAX lowers can call the host library.

  The program must run in this process, and XLA must not partition the program:
  XLA would gather the operands of a call, or could not partition the call.
  """
  if not compat.can_call_python(ctx) or compat.is_partitioned(ctx):
    return False
  try:
    library("host")
  except (OSError, NativeError):
    return False
  return True


def _check_interface(lib: ctypes.CDLL, path: pathlib.Path) -> None:
  """Raises unless the library has the interface that this package calls."""
  found = lib.ep_interface_version()
  if found != INTERFACE_VERSION:
    raise NativeError(
      f"ep_bootstrap: {path} is of another version than this ep package, which"
      f" calls the interface {INTERFACE_VERSION}; the interface of the library"
      f" is {found}. Build //ep_ffi:{path.name} from the same sources as the"
      f" package, or set ${_VARIABLE} to the library of the package's release."
    )


def call(
  backend: str, function: str, *args: Any, op: str | None = None
) -> None:
  """Calls a C function that can fail; see ep_ffi/core/export.h.

  Error messages begin with `op`, a public function, unless `op` is None.
  """
  lib, error = library(backend), ctypes.create_string_buffer(_ERROR_BYTES)
  code = getattr(lib, function)(*args, error, ctypes.c_int64(_ERROR_BYTES))
  if code:
    kind = ValueError if code == _INVALID_ARGUMENT else NativeError
    text = error.value.decode()
    raise kind(f"{op}: {text}" if op else text)


class _HostGroup(ctypes.Structure):
  """The C struct `EpHostGroup` of ep_ffi/backends/host/bootstrap.cc."""

  _fields_ = [
    ("name", ctypes.c_char_p),
    ("config", ctypes.c_char_p),
    ("num_experts", ctypes.c_int64),
    ("timeout_s", ctypes.c_double),
    ("exit_after_s", ctypes.c_double),
    ("processes", ctypes.POINTER(ctypes.c_int32)),  # 3 for each
    ("ranks", ctypes.POINTER(ctypes.c_int32)),  # 2 for each
    ("num_processes", ctypes.c_int32),
    ("num_ranks", ctypes.c_int32),
    ("ep_size", ctypes.c_int32),
    ("process", ctypes.c_int32),
  ]


def create_host_group(
  group: EpGroup,
  processes: list[tuple[int, int, int]],
  ranks: list[tuple[int, int]],
  process: int,
) -> None:
  """Creates the native group; `process` is the index of this process.

  `processes` lists (JAX's process id, operating system's id, file descriptor of
  the connected socket). The group closes the sockets. `ranks` lists (index in
  `processes`, JAX's device id), domain-major.
  """
  of_processes, of_ranks = (
    np.array(numbers, np.int32).ctypes for numbers in (processes, ranks)
  )
  fields = _HostGroup(
    name=group.name.encode(),
    config=group.program_text.encode(),
    num_experts=group.num_experts,
    timeout_s=group.timeout_s,
    exit_after_s=group.exit_after_s,
    processes=of_processes.data_as(ctypes.POINTER(ctypes.c_int32)),
    ranks=of_ranks.data_as(ctypes.POINTER(ctypes.c_int32)),
    num_processes=len(processes),
    num_ranks=len(ranks),
    ep_size=group.ep_size,
    process=process,
  )
  args = ctypes.byref(fields)
  call("host", "ep_host_group_create", args, op="ep_bootstrap")


def new_nccl_id(nccl: str, nccl_ep: str) -> bytes:
  """Returns a new ncclUniqueId for an EP domain.

  `nccl` and `nccl_ep` are the paths of the two libraries, to load if the
  process has loaded none; "" loads the system's.
  """
  unique_id = ctypes.create_string_buffer(_UNIQUE_ID_BYTES)
  args = nccl.encode(), nccl_ep.encode(), unique_id
  size = ctypes.c_int64(_UNIQUE_ID_BYTES)
  call("nccl", "ep_nccl_unique_id", *args, size, op="ep_bootstrap")
  return unique_id.raw


def create_nccl_group(
  group: EpGroup,
  ranks: dict[int, int],
  domain: int,
  max_tokens: int,
  capacity: int,
  max_row_bytes: int,
  nccl: str,
  nccl_ep: str,
) -> None:
  """Creates the native group; see ep_ffi/backends/nccl/bootstrap.cc.

  `ranks` maps the ranks of this process in the `domain` to ordinals of GPUs.
  For `nccl` and `nccl_ep` see `new_nccl_id`.
  """
  sizes = group.num_experts, group.ep_size, max_tokens, capacity, max_row_bytes
  array = ctypes.c_int32 * len(ranks)
  call(
    "nccl",
    "ep_nccl_group_create",
    group.name.encode(),
    group.program_text.encode(),
    array(*ranks),
    array(*ranks.values()),
    ctypes.c_int64(len(ranks)),
    ctypes.c_int32(domain),
    *map(ctypes.c_int64, (*sizes, group.max_num_sms)),
    ctypes.c_double(group.timeout_s),
    ctypes.c_double(group.exit_after_s),
    nccl.encode(),
    nccl_ep.encode(),
    op="ep_bootstrap",
  )


def connect_nccl_group(name: str, unique_id: bytes, num_hosts: int) -> None:
  """Connects the ranks of this process, and checks the machine.

  Collective over the domain. `unique_id` is the domain's ncclUniqueId, or b""
  if ep_connect has given each rank a borrowed communicator. The ranks of the
  domain have `num_hosts` different host names.
  """
  args = name.encode(), unique_id, ctypes.c_int64(len(unique_id))
  hosts = ctypes.c_int64(num_hosts)
  call("nccl", "ep_nccl_group_connect", *args, hosts, op="ep_bootstrap")


def open_nccl_group(name: str) -> None:
  """Lets ops run, after `connect_nccl_group` on all ranks. Collective."""
  call("nccl", "ep_nccl_group_open", name.encode(), op="ep_bootstrap")


def nccl_place(
  name: str, i: int, others: str
) -> tuple[int, bool, int, float, str]:
  """Returns the `peers.Place` fields of this process's i-th rank.

  Gives the rank's watchdog `others`, a sentence about the other ranks.
  """
  numbers = (ctypes.c_double * 4)()
  text = ctypes.create_string_buffer(_ERROR_BYTES)
  args = name.encode(), ctypes.c_int64(i), others.encode()
  size = ctypes.c_int64(_ERROR_BYTES)
  call("nccl", "ep_nccl_group_place", *args, numbers, text, size)
  num_ended, has_begun, num_left, still_s = numbers
  words = text.value.decode(errors="replace")
  return int(num_ended), bool(has_begun), int(num_left), still_s, words


def mem_bytes(backend: str, name: str, *sizes: int) -> int:
  """Returns the size of `EpHandle.mem` in the group `name`, in bytes.

  The sizes are num_tokens, top_k, alignment and capacity.
  """
  args = name.encode(), *map(ctypes.c_int64, sizes)
  out = ctypes.c_int64()
  call(backend, "ep_group_mem_bytes", *args, ctypes.byref(out))
  return out.value


def check_group(backend: str, name: str) -> None:
  """Waits for the device, and raises a failure that no op has raised yet."""
  call(backend, "ep_group_check", name.encode())


def close_group(backend: str, name: str) -> None:
  """Closes the group `name`; raises if a peer still waits for this process."""
  call(backend, "ep_group_close", name.encode(), op="ep_finalize")
