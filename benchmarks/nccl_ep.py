# SPDX-License-Identifier: Apache-2.0
"""NCCL EP by itself, as a contender.

Its C functions are called on the arrays that the other contenders are given,
without a program of XLA around them. A case has one group and one handle of its
own, and its routing is known before the first run. A run enqueues on a stream
of its own and waits for the device. It writes to the same arrays each time.

NCCL EP does less than ep's ops. It does not write the rows past the last one
that arrives, and its combine has no weights: this round trip sums the rows as
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import ctypes
import pathlib

import jax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
import numpy as np

from benchmarks.workload import Layout, SPEC, Workload
from ep._src.backends.nccl import installation
from ep._src.native import ffi, shipped_files

_LIBRARY = "libnccl_ep_bench.so"
_TIMEOUT_S = 300.0
_DTYPES = ("float32", "bfloat16", "float16")  # `DType` of ep_ffi/core/backend.h

# An op is these calls, in order: a function of nccl_ep_calls.cc, its inputs and
# its outputs. Weights, if there are any, come second.
_DISPATCH = "dispatch", ("tokens", "topk_weights"), ("rows", "row_weights")
_COMBINE = "combine", ("rows",), ("tokens",)
CALLS = {
  "dispatch": (_DISPATCH,),
  "combine": (_COMBINE,),
  "dispatch_bwd": (
    ("combine", ("rows", "row_weights"), ("tokens", "topk_weights")),
  ),
  "combine_bwd": (("dispatch", ("tokens",), ("rows",)),),
  "round_trip": (_DISPATCH, _COMBINE),
}


def find_library() -> pathlib.Path | None:
  """Returns the library in the Bazel runfiles, or the one beside ep's own."""
  if path := shipped_files.in_runfiles(f"jax_ep/benchmarks/{_LIBRARY}"):
    return path
  try:
    path = ffi.find_library("nccl").with_name(_LIBRARY)
  except FileNotFoundError:
    return None
  return path if path.exists() else None


def why_not() -> str | None:
  """Returns why it cannot take part where backend="nccl" can, or None."""
  if find_library():
    return None
  return (
    f"{_LIBRARY} was not found; build //benchmarks:{_LIBRARY} and put it beside"
    " libep_ffi_cuda.so"
  )


@contextlib.contextmanager
def connect(
  mesh: jax.sharding.Mesh, workload: Workload, inputs: Mapping[str, jax.Array]
) -> Iterator[Callable[[str], Callable[[], list[jax.Array]]]]:
  """Yields a function that, given an op, makes one that runs it. Collective."""
  me = jax.process_index()
  devices = list(mesh.devices.flat)
  (rank,) = (i for i, d in enumerate(devices) if d.process_index == me)
  libraries = installation.prepare(devices[rank])
  unique_id = ffi.new_nccl_id(*libraries) if me == 0 else bytes(128)
  unique_id = multihost_utils.broadcast_one_to_all(
    np.frombuffer(unique_id, np.uint8)
  )
  connected = Rank(
    workload,
    rank,
    device=devices[rank],
    ordinal=devices[rank].local_hardware_id,
    unique_id=np.asarray(unique_id).tobytes(),
    libraries=libraries,
  )
  parts = {name: x.addressable_data(0) for name, x in inputs.items()}

  def make(op):
    run, outputs = connected.make(op, parts)
    wholes = [
      jax.make_array_from_single_device_arrays(
        (mesh.size * x.shape[0], *x.shape[1:]), NamedSharding(mesh, SPEC), [x]
      )
      for x in outputs
    ]

    def run_and_return():
      run()
      return wholes

    return run_and_return

  with contextlib.closing(connected):
    yield make


class Rank:
  """One rank. All of its methods are collective."""

  def __init__(
    self,
    workload: Workload,
    rank: int,
    *,
    device: jax.Device,
    ordinal: int,
    unique_id: bytes,
    libraries: tuple[str, str],
  ):
    """Connects the rank. This process's GPU `ordinal` is JAX's `device`."""
    self._layout: Layout = workload.layout
    self._dtype = workload.dtype
    self._device = device
    self._library = ctypes.CDLL(str(find_library()))
    self._rank = ctypes.c_void_p()
    shape = self._layout.shape
    sizes = (
      shape.num_experts,
      self._layout.ranks,
      shape.tokens,
      shape.top_k,
      self._layout.capacity,
      shape.hidden,
    )
    handle_bytes = ctypes.c_int64()
    ffi.call(
      self._library,
      "ep_bench_connect",
      ctypes.c_int32(rank),
      ctypes.c_int32(ordinal),
      *map(ctypes.c_int64, sizes),
      ctypes.c_int32(_DTYPES.index(self._dtype.name)),
      ctypes.c_double(_TIMEOUT_S),
      unique_id,
      ctypes.c_int64(len(unique_id)),
      *(path.encode() for path in libraries),
      ctypes.byref(self._rank),
      ctypes.byref(handle_bytes),
    )
    mem = self._place(np.zeros(handle_bytes.value, np.uint8))
    choices = np.split(workload.choices, self._layout.ranks)[rank]
    # NCCL EP takes 64-bit ids. By default JAX has no such type, so their bits
    # travel as pairs of 32-bit ones.
    choices = self._place(choices.astype(np.int64, order="C").view(np.int32))
    self._held = [mem, choices]  # the native side has pointers to these
    self._call("route", _pointer(mem), handle_bytes, _pointer(choices))

  def make(
    self, op: str, inputs: Mapping[str, jax.Array]
  ) -> tuple[Callable[[], None], list[jax.Array]]:
    """Returns a function that runs an op on this rank, and its outputs."""
    arrays = jax.block_until_ready(dict(inputs))
    calls = []
    for function, reads, writes in CALLS[op]:
      sources = [arrays[name] for name in reads]
      targets = [self._unwritten(name) for name in writes]
      self._held += sources + targets
      calls.append((function, *_two(sources), *_two(targets)))
      arrays |= zip(writes, targets, strict=True)

    def run():
      for call in calls:
        self._call(*call)
      self._call("synchronize")

    return run, targets

  def close(self) -> None:
    self._library.ep_bench_disconnect(self._rank)

  def _call(self, function: str, *args) -> None:
    ffi.call(self._library, f"ep_bench_{function}", self._rank, *args)

  def _unwritten(self, name: str) -> jax.Array:
    shape, capacity = self._layout.shape, self._layout.capacity
    sizes, dtype = {
      "tokens": ((shape.tokens, shape.hidden), self._dtype),
      "topk_weights": ((shape.tokens, shape.top_k), np.float32),
      "rows": ((capacity, shape.hidden), self._dtype),
      "row_weights": ((capacity,), np.float32),
    }[name]
    return self._place(np.full(sizes, np.nan, dtype))

  def _place(self, array: np.ndarray) -> jax.Array:
    return jax.block_until_ready(jax.device_put(array, self._device))


def _pointer(array: jax.Array) -> ctypes.c_void_p:
  return ctypes.c_void_p(array.unsafe_buffer_pointer())


def _two(arrays: Sequence[jax.Array]) -> Sequence[ctypes.c_void_p | None]:
  """Returns pointers to rows and their weights, or to rows and None."""
  return (*map(_pointer, arrays), None)[:2]
