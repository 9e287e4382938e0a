# SPDX-License-Identifier: Apache-2.0
"""Runs dispatch and combine on GPUs, and does what the first argument names.

`ep.launch` starts the ranks. "tests" runs without ranks, and prints the files
with GPU tests.
"""

from __future__ import annotations

import collections
import os
import pathlib
import signal
import sys

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

import ep
from ep import launch

_TOKENS, _HIDDEN, _TOP_K, _EXPERTS = 16, 64, 2, 8
_TIMEOUT_S = 20.0
_FAULTS = {"one_dies": signal.SIGKILL, "one_stops": signal.SIGSTOP}


def main(what: str) -> None:
  if what == "tests":
    print("\n".join(_gpu_tests()))
    return
  launch.initialize()
  mesh = jax.make_mesh((jax.device_count(),), ("ep",), (AxisType.Auto,))
  put = NamedSharding(mesh, P("ep"))
  shape = mesh.size * _TOKENS, _HIDDEN
  tokens = np.random.default_rng(0).standard_normal(shape, np.float32)
  tokens = jax.make_array_from_callback(shape, put, tokens.__getitem__)
  print("by a collective of XLA, the sum is", jax.jit(jnp.sum)(tokens))
  group = ep.ep_bootstrap(
    mesh,
    num_experts=_EXPERTS,
    max_tokens_per_rank=_TOKENS,
    hidden_dim=_HIDDEN,
    top_k=_TOP_K,
    timeout_s=_TIMEOUT_S,
    exit_after_s=_TIMEOUT_S / 4,
  )
  print("the backend is", group.backend)
  _round_trip(group, tokens)
  if what == "profile":
    with jax.profiler.trace(f"{os.environ['LOGS']}/profile"):
      _round_trip(group, tokens, steps=20)
  elif what == "resize":
    for more in range(50):
      new = ep.ep_resize(group, max_tokens_per_rank=_TOKENS + 1 + more)
      ep.ep_finalize(group)
      group = new
      _round_trip(group, tokens)
      if stats := jax.local_devices()[0].memory_stats():
        print("bytes in use:", stats["bytes_in_use"], stats["bytes_limit"])
  else:  # the other ranks must fail or terminate
    if jax.process_index() == 1:
      os.kill(os.getpid(), _FAULTS[what])
    _round_trip(group, tokens)
    group.raise_failures()
  ep.ep_finalize(group)


def _gpu_tests() -> list[str]:
  """Returns the test files that Bazel runs on GPUs; see tests/ep_test.bzl."""
  files = []

  def ep_test(name, srcs=(), worlds=("1x4", "2x2"), gpu=None, **_):
    if gpu or (gpu is None and any(w[0] != "1" for w in worlds)):
      files.extend(str(build.parent / f) for f in srcs or [f"{name}.py"])

  for build in sorted(pathlib.Path("tests").glob("*/BUILD")):
    names = collections.defaultdict(lambda: lambda *_, **__: {})
    exec(build.read_text(), names | dict(ep_test=ep_test))
  return files


def _round_trip(group: ep.EpGroup, tokens: jax.Array, steps: int = 1) -> None:
  """Sends tokens to two experts and back; checks the result.

  Several steps run a collective of XLA beside the exchanges.
  """
  layer = ep.EpLayerConfig(group)

  def rank(tokens):
    ids = jnp.arange(_TOKENS * _TOP_K, dtype=jnp.int32).reshape(-1, _TOP_K)
    handle = ep.ep_prepare(layer, ids % _EXPERTS)
    rows, _ = ep.ep_dispatch(handle, tokens, jnp.ones(ids.shape))
    out = ep.ep_combine(handle, rows)
    return out, jax.lax.psum(tokens, "ep") if steps > 1 else jnp.zeros(())

  program = jax.shard_map(
    rank, mesh=group.mesh, in_specs=P("ep"), out_specs=(P("ep"), P())
  )
  program = jax.jit(program)
  for _ in range(steps):
    out, _ = jax.block_until_ready(program(tokens))
  for got, sent in zip(
    out.addressable_shards, tokens.addressable_shards, strict=True
  ):
    np.testing.assert_array_equal(got.data, 2 * np.asarray(sent.data))
  print("rank", jax.process_index(), "has its tokens back")


if __name__ == "__main__":
  main(*sys.argv[1:])
