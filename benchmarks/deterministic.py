# SPDX-License-Identifier: Apache-2.0
"""Measures what deterministic gradients of a layer cost.

    bazel run //benchmarks:deterministic

The program is the gradient of all parameters of one layer, for four devices of
one process, on every mesh of four ranks. Programs with and without
`MoEConfig(deterministic=True)` take turns.
"""

from __future__ import annotations

import sys

from absl import app, flags
import jax
from jax.sharding import PartitionSpec
import numpy as np

from benchmarks import splits, timing
import ep
from ep import launch

_ROUNDS = flags.DEFINE_integer("rounds", 15, "runs that are timed", 1)
_CONFIG = ep.MoEConfig(hidden=256, inner=512, num_experts=16, top_k=2)
_TOKENS = 1024  # of a rank


def main(argv) -> int:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  if not launch.inside_launcher():
    return launch.launch(
      [__file__, *sys.argv[1:]],
      num_processes=1,
      devices_per_process=splits.RANKS,
    )
  launch.initialize()
  print(f"jax {jax.__version__}, medians of {_ROUNDS.value}")
  for shape in splits.SHAPES:
    with splits.bootstrap(shape, _CONFIG, _TOKENS) as group:
      _measure(group)
  return 0


def _measure(group: ep.EpGroup) -> None:
  """Prints the times and temporaries of both gradients on a mesh."""
  specs = ep.moe.partition_specs(_CONFIG)
  params = {
    name: splits.put(group, np.asarray(x), specs[name])
    for name, x in ep.moe.init(jax.random.key(0), _CONFIG).items()
  }
  x = np.random.default_rng(1).normal(
    size=(splits.RANKS * _TOKENS, _CONFIG.hidden)
  )
  x = splits.put(group, x.astype(np.float32), PartitionSpec(group.token_axes))
  programs = {}
  for kind, config in splits.both_kinds(_CONFIG).items():
    layer = ep.MoE(config, group)

    def loss(params, x, config=config, layer=layer):
      y, metrics = layer(params, x)
      return (y**2).mean() + 0.01 * metrics.aux_loss

    programs[kind] = jax.jit(jax.grad(loss)).lower(params, x).compile()
  seconds = timing.take_turns(
    {
      kind: lambda run=run: jax.block_until_ready(run(params, x))
      for kind, run in programs.items()
    },
    group.mesh,
    rounds=_ROUNDS.value,
    warmup=2,
  )
  plain, fixed = (np.median(seconds[kind]) for kind in programs)
  memory = [
    run.memory_analysis().temp_size_in_bytes / 1e6 for run in programs.values()
  ]
  print(
    f"{splits.title(group)}: {plain * 1e3:.0f} ms, deterministic"
    f" {fixed * 1e3:.0f} ms, {fixed / plain:.2f} x; temporaries"
    f" {memory[0]:.0f} -> {memory[1]:.0f} MB"
  )


if __name__ == "__main__":
  app.run(main)
