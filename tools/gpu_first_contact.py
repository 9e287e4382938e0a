# SPDX-License-Identifier: Apache-2.0
"""Runs dispatch and combine on GPUs, then exits in the way the argument names.

`ep.launch` starts the ranks.
"""

from __future__ import annotations

import os
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
_TIMEOUT_S = 40.0


def main(end: str) -> None:
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
  )
  print("the backend is", group.backend)
  _round_trip(group, tokens)
  if end == "finalized_twice":
    ep.ep_finalize(group)
    ep.ep_finalize(group)
  elif end == "one_dies":  # the other ranks must fail or terminate
    if jax.process_index() == 1:
      os.kill(os.getpid(), signal.SIGKILL)
    _round_trip(group, tokens)
    group.check()
  else:
    assert end == "never_finalized", end


def _round_trip(group: ep.EpGroup, tokens: jax.Array) -> None:
  """Sends tokens to two experts and back, beside a psum; checks the result."""
  layer = ep.EpLayerConfig(group)

  def rank(tokens):
    ids = jnp.arange(_TOKENS * _TOP_K, dtype=jnp.int32).reshape(-1, _TOP_K)
    handle = ep.ep_prepare(layer, ids % _EXPERTS)
    rows, _ = ep.ep_dispatch(handle, tokens, jnp.ones(ids.shape))
    return ep.ep_combine(handle, rows), jax.lax.psum(tokens, "ep")

  program = jax.shard_map(
    rank, mesh=group.mesh, in_specs=P("ep"), out_specs=(P("ep"), P())
  )
  out, _ = jax.jit(program)(tokens)
  for got, sent in zip(
    out.addressable_shards, tokens.addressable_shards, strict=True
  ):
    np.testing.assert_array_equal(got.data, 2 * np.asarray(sent.data))
  print("rank", jax.process_index(), "has its tokens back")


if __name__ == "__main__":
  main(*sys.argv[1:])
