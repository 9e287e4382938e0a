# SPDX-License-Identifier: Apache-2.0
"""Runs one question of gpu_first_contact.sh, given its name.

`ep.launch` starts the questions of several ranks; the others run alone. A
question prints its answer, or ends with an error if there is none.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

import ep
from ep import launch
from ep._src.backends.nccl import installation
from ep._src.native import ffi

_TOKENS, _HIDDEN, _TOP_K, _EXPERTS = 16, 64, 2, 8
_TIMEOUT_S = 40.0


def libraries() -> None:
  """Prints what is installed, and loads it."""
  print("jax", jax.__version__, "python", sys.version.split()[0])
  for tool in ("nvidia-smi", "nvcc", "g++"):
    path = shutil.which(tool)
    print(tool, path or "is not on PATH")
    if path:
      option = [] if tool == "nvidia-smi" else ["--version"]
      subprocess.run([path, *option], check=False)
  print("/dev/shm has", shutil.disk_usage("/dev/shm").free, "bytes free")
  (device, *_) = _gpus()
  nccl, nccl_ep = installation.prepare(device)
  for path, function in (
    (nccl or "libnccl.so.2", "ncclGetVersion"),
    (nccl_ep or "libnccl_ep.so", "ncclEpGetVersion"),
  ):
    version = ctypes.c_int()
    library = ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
    code = getattr(library, function)(ctypes.byref(version))
    print(path, function, version.value, "code", code)
  print("an id of", len(ffi.new_nccl_id(nccl, nccl_ep)), "bytes")


def compiler() -> None:
  """Times the compilation of what all kernels of NCCL EP include."""
  (device, *_) = _gpus()
  start = time.monotonic()
  installation.prepare(device)
  print(f"compiled in {time.monotonic() - start:.1f} s")


def sharing() -> None:
  """Runs one of XLA's collectives between these ranks."""
  launch.initialize()
  mesh = _mesh()
  ones = jax.make_array_from_callback(
    (mesh.size,), NamedSharding(mesh, P("ep")), lambda _: np.ones(1, np.float32)
  )
  total = jax.jit(jnp.sum)(ones)
  assert float(total) == mesh.size, total
  print("all", mesh.size, "ranks were counted")


def group() -> None:
  """Makes and finalizes a group, and prints the memory that it takes."""
  launch.initialize()
  before = _used()
  made = _bootstrap()
  print("bytes in use by JAX before and after:", before, _used())
  made.check()
  ep.ep_finalize(made)


def streams() -> None:
  """Runs a dispatch beside a psum, for the dump of XLA's thunks."""
  launch.initialize()
  made = _bootstrap()
  _round_trip(made, beside=True)
  ep.ep_finalize(made)


def finalized_twice() -> None:
  """Finalizes a group a second time, which must do nothing."""
  launch.initialize()
  made = _bootstrap()
  _round_trip(made)
  ep.ep_finalize(made)
  ep.ep_finalize(made)


def never_finalized() -> None:
  """Ends with an open group, which must not hang."""
  launch.initialize()
  _round_trip(_bootstrap())


def one_dies() -> None:
  """Kills a rank; the others must end with an error or by the launcher."""
  launch.initialize()
  made = _bootstrap()
  _round_trip(made)
  if jax.process_index() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
  _round_trip(made)
  made.check()


def _gpus() -> list[jax.Device]:
  if jax.default_backend() != "gpu":
    sys.exit(f"this question needs a GPU, but JAX runs on {jax.devices()}")
  return jax.devices()


def _used() -> object:
  statistics = jax.local_devices()[0].memory_stats()
  return (statistics or {}).get("bytes_in_use", "not told")


def _mesh() -> jax.sharding.Mesh:
  return jax.make_mesh((jax.device_count(),), ("ep",), (AxisType.Auto,))


def _bootstrap() -> ep.EpGroup:
  return ep.ep_bootstrap(
    _mesh(),
    num_experts=_EXPERTS,
    max_tokens_per_rank=_TOKENS,
    hidden_dim=_HIDDEN,
    top_k=_TOP_K,
    max_token_dtype=jnp.float32,
    timeout_s=_TIMEOUT_S,
  )


def _round_trip(group: ep.EpGroup, beside: bool = False) -> None:
  """Sends tokens to two experts and back, and checks that they are doubled."""
  layer = ep.EpLayerConfig(group)

  def rank(tokens):
    ids = jnp.arange(_TOKENS * _TOP_K, dtype=jnp.int32).reshape(-1, _TOP_K)
    handle = ep.ep_prepare(layer, ids % _EXPERTS)
    weights = jnp.ones(ids.shape, jnp.float32)
    rows, _ = ep.ep_dispatch(handle, tokens, weights)
    out = ep.ep_combine(handle, rows)
    return (out, jax.lax.psum(tokens, "ep")) if beside else (out, tokens)

  program = jax.jit(
    jax.shard_map(rank, mesh=group.mesh, in_specs=P("ep"), out_specs=P("ep"))
  )
  tokens = np.random.default_rng(0).normal(
    size=(group.mesh.size * _TOKENS, _HIDDEN)
  )
  tokens = tokens.astype(np.float32)
  put = jax.make_array_from_callback(
    tokens.shape, NamedSharding(group.mesh, P("ep")), lambda at: tokens[at]
  )
  out, _ = program(put)
  for shard in out.addressable_shards:
    np.testing.assert_array_equal(shard.data, 2 * tokens[shard.index])
  print("rank", jax.process_index(), "has its tokens back")


_QUESTIONS = (
  libraries,
  compiler,
  sharing,
  group,
  streams,
  finalized_twice,
  never_finalized,
  one_dies,
)


def main() -> None:
  (name,) = sys.argv[1:]
  {question.__name__: question for question in _QUESTIONS}[name]()


if __name__ == "__main__":
  main()
