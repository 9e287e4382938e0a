# SPDX-License-Identifier: Apache-2.0
"""Measures what a launch costs, and how many may be in flight.

    bazel run //benchmarks:launches
    bazel run //benchmarks:launches -- --in_flight=60

The first times small programs in a loop that waits for each result, so that
most of the time is that of a launch. A round trip is dispatch and combine, of
512 columns, 16 experts and two choices. The second launches a program of
matmuls and `psum` without a wait, and says how long that took; ep has no part
in it. If JAX stalls, it is ended after a while.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import sys
import time

from absl import app, flags
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
import numpy as np

from benchmarks.workload import AXIS, SPEC
import ep
from ep import launch

_TOKENS = flags.DEFINE_list(
  "tokens", ["1", "256", "1024", "4096"], "of a rank, for round trips"
)
_ROUNDS = flags.DEFINE_integer("rounds", 200, "runs, at most; fewer of long", 1)
_IN_FLIGHT = flags.DEFINE_integer(
  "in_flight", 0, "launches without a wait; 0 times loops instead", 0
)
_STALL_S = 60.0
_RANKS = 4
_HIDDEN, _EXPERTS, _TOP_K = 512, 16, 2
_SECONDS = 3.0  # of a loop, about


def main(argv) -> int:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  if not launch.inside_launcher():
    return launch.launch(
      [__file__, *sys.argv[1:]],
      num_processes=1,
      devices_per_process=_RANKS,
      timeout_s=_STALL_S if _IN_FLIGHT.value else None,
    )
  launch.initialize()
  mesh = jax.make_mesh((_RANKS,), (AXIS,), axis_types=(AxisType.Auto,))
  print(f"jax {jax.__version__}, {_RANKS} devices")
  if _IN_FLIGHT.value:
    in_flight(mesh, _IN_FLIGHT.value)
  else:
    loops(mesh, [int(tokens) for tokens in _TOKENS.value])
  return 0


def loops(mesh: jax.sharding.Mesh, tokens: list[int]) -> None:
  """Prints the median and the least time of each program."""
  x = _place(mesh, np.ones((_RANKS, _HIDDEN), np.float32))
  exchange = functools.partial(
    lax.all_to_all, axis_name=AXIS, split_axis=0, concat_axis=0, tiled=True
  )
  square = _place(mesh, np.ones((_RANKS * _RANKS, _HIDDEN), np.float32))
  _report("x + 1", _local(mesh, lambda x: x + 1), x)
  _report("psum", _local(mesh, lambda x: x + lax.psum(x, AXIS)), x)
  _report(
    "two all_to_all", _local(mesh, lambda x: exchange(exchange(x) + 1)), square
  )
  for count in tokens:
    with ep.ep_bootstrap(
      mesh,
      num_experts=_EXPERTS,
      max_tokens_per_rank=count,
      hidden_dim=_HIDDEN,
      top_k=_TOP_K,
      max_token_dtype=jnp.float32,
    ) as group:
      layer = ep.EpLayerConfig(group, tail="unspecified")
      rng = np.random.default_rng(0)
      choices = rng.random((_RANKS * count, _EXPERTS)).argsort(axis=1)
      idx = _place(mesh, choices[:, :_TOP_K].astype(np.int32))
      weights = _place(mesh, np.ones(idx.shape, np.float32))
      x = _place(mesh, np.ones((_RANKS * count, _HIDDEN), np.float32))
      prepare = jax.jit(functools.partial(ep.ep_prepare, layer))

      @jax.jit
      def round_trip(handle, x, weights):
        rows, row_weights = ep.ep_dispatch(handle, x, weights)
        return ep.ep_combine(handle, rows, weights=row_weights)

      _report(f"prepare, {count} tokens", prepare, idx)
      seconds = _report(
        f"round trip, {count} tokens", round_trip, prepare(idx), x, weights
      )
      print(f"{'':28} {seconds / (_RANKS * count) * 1e9:.0f} ns per token")


def in_flight(mesh: jax.sharding.Mesh, count: int) -> None:
  """Launches a program `count` times, and then waits."""

  def work(x):
    for _ in range(8):
      x = jnp.sin(x @ x) + 1e-6 * lax.psum(x, AXIS)
    return x

  program = _local(mesh, work)
  x = _place(mesh, np.ones((_RANKS * 300, 300), np.float32))
  jax.block_until_ready(program(x))
  start = time.perf_counter()
  outputs = [program(x) for _ in range(count)]
  launched = time.perf_counter() - start
  jax.block_until_ready(outputs)
  print(
    f"{count} launches: {launched:.2f} s, with their results"
    f" {time.perf_counter() - start:.2f} s"
  )


def _local(mesh: jax.sharding.Mesh, fn: Callable) -> Callable:
  ranks = jax.shard_map(fn, mesh=mesh, in_specs=SPEC, out_specs=SPEC)
  return jax.jit(ranks)


def _place(mesh: jax.sharding.Mesh, x: np.ndarray) -> jax.Array:
  return jax.device_put(x, NamedSharding(mesh, SPEC))


def _report(name: str, program: Callable, *args: jax.Array) -> float:
  """Prints a line; returns the median of a run in seconds."""
  jax.block_until_ready(program(*args))
  times = []
  end = time.perf_counter() + _SECONDS
  while len(times) < _ROUNDS.value and time.perf_counter() < end:
    start = time.perf_counter()
    jax.block_until_ready(program(*args))
    times.append(time.perf_counter() - start)
  median = float(np.median(times))
  print(f"{name:28} {median * 1e3:.2f} ms, at best {min(times) * 1e3:.2f} ms")
  return median


if __name__ == "__main__":
  app.run(main)
