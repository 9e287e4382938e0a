# SPDX-License-Identifier: Apache-2.0
"""Measures what a launch costs, by small programs and a wait for each result.

    bazel run //benchmarks:launches -- --rounds=200

A round trip is dispatch and combine of one token on each of four ranks, with
512 columns, 16 experts and two choices.
"""

from __future__ import annotations

import functools

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding
import numpy as np

from benchmarks import driver, timing
from benchmarks.workload import AXIS, SPEC
import ep

_HIDDEN, _EXPERTS, _TOP_K = 512, 16, 2


def main() -> None:
  ranks = driver.DEVICES
  mesh = jax.make_mesh((ranks,), (AXIS,), axis_types=(AxisType.Auto,))
  put = functools.partial(jax.device_put, device=NamedSharding(mesh, SPEC))
  x = put(np.ones((ranks, _HIDDEN), np.float32))
  choices = np.random.default_rng(0).random((ranks, _EXPERTS)).argsort(axis=1)
  idx = put(choices[:, :_TOP_K].astype(np.int32))
  weights = put(np.ones(idx.shape, np.float32))

  def on_ranks(fn):
    return jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=SPEC, out_specs=SPEC))

  with ep.ep_bootstrap(
    mesh,
    num_experts=_EXPERTS,
    max_tokens_per_rank=1,
    hidden_dim=_HIDDEN,
    top_k=_TOP_K,
  ) as group:
    layer = ep.EpLayerConfig(group, tail="unspecified")
    prepare = jax.jit(functools.partial(ep.ep_prepare, layer))

    @jax.jit
    def round_trip(handle, x, weights):
      rows, row_weights = ep.ep_dispatch(handle, x, weights)
      return ep.ep_combine(handle, rows, weights=row_weights)

    programs = {
      "x + 1": (on_ranks(lambda x: x + 1), x),
      "psum": (on_ranks(lambda x: x + lax.psum(x, AXIS)), x),
      "prepare": (prepare, idx),
      "round trip": (round_trip, prepare(idx), x, weights),
    }
    times = timing.take_turns(
      {
        name: lambda run=run, args=args: jax.block_until_ready(run(*args))
        for name, (run, *args) in programs.items()
      },
      mesh,
      rounds=driver.ROUNDS.value,
      warmup=2,
    )
  print(f"jax {jax.__version__}, {ranks} devices")
  for name, seconds in times.items():
    median, least = np.median(seconds) * 1e3, seconds.min() * 1e3
    print(f"{name:12} {median:.2f} ms, at best {least:.2f} ms")


if __name__ == "__main__":
  driver.run(main)
