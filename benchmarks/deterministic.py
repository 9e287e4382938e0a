# SPDX-License-Identifier: Apache-2.0
"""Measures what deterministic gradients of a layer cost.

    bazel run //benchmarks:deterministic

The program is the gradient of all parameters of one layer, for four devices of
one process, on every mesh of four ranks. Programs with and without
`MoEConfig(deterministic=True)` take turns.
"""

from __future__ import annotations

import dataclasses
import sys

from absl import app, flags
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np

from benchmarks import timing
import ep
from ep import launch

_ROUNDS = flags.DEFINE_integer("rounds", 15, "runs that are timed", 1)
_CONFIG = ep.MoEConfig(hidden=256, inner=512, num_experts=16, top_k=2)
_TOKENS = 1024  # of a rank
_AXES = ("dp", "ep")


def main(argv) -> int:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  if not launch.inside_launcher():
    return launch.launch(
      [__file__, *sys.argv[1:]], num_processes=1, devices_per_process=4
    )
  launch.initialize()
  print(f"jax {jax.__version__}, medians of {_ROUNDS.value}")
  for shape in (4, 1), (2, 2), (1, 4):
    mesh = jax.make_mesh(shape, _AXES, axis_types=(AxisType.Auto,) * 2)
    with ep.ep_bootstrap(
      mesh,
      num_experts=_CONFIG.num_experts,
      max_tokens_per_rank=_TOKENS,
      hidden_dim=_CONFIG.hidden,
      top_k=_CONFIG.top_k,
      max_token_dtype=jnp.float32,
    ) as group:
      _measure(group)
  return 0


def _measure(group: ep.EpGroup) -> None:
  """Prints the times and temporaries of both gradients on a mesh."""
  mesh = group.mesh
  specs = ep.moe.partition_specs(_CONFIG)
  params = {
    name: jax.device_put(x, NamedSharding(mesh, specs[name]))
    for name, x in ep.moe.init(jax.random.key(0), _CONFIG).items()
  }
  x = jax.device_put(
    jax.random.normal(jax.random.key(1), (4 * _TOKENS, _CONFIG.hidden)),
    NamedSharding(mesh, PartitionSpec(_AXES)),
  )
  programs = {}
  for kind in False, True:
    config = dataclasses.replace(_CONFIG, deterministic=kind)
    layer = config.layer(group)

    def loss(params, x, config=config, layer=layer):
      y, metrics = ep.moe.apply(layer, config, params, x)
      return (y**2).mean() + 0.01 * metrics.aux_loss

    programs[kind] = jax.jit(jax.grad(loss)).lower(params, x).compile()
  seconds = timing.take_turns(
    {
      kind: lambda run=run: jax.block_until_ready(run(params, x))
      for kind, run in programs.items()
    },
    mesh,
    rounds=_ROUNDS.value,
    warmup=2,
  )
  plain, fixed = (np.median(seconds[kind]) for kind in (False, True))
  memory = [
    run.memory_analysis().temp_size_in_bytes / 1e6 for run in programs.values()
  ]
  shape = " x ".join(str(mesh.shape[axis]) for axis in _AXES)
  print(
    f"{shape}: {plain * 1e3:.0f} ms, deterministic {fixed * 1e3:.0f} ms,"
    f" {fixed / plain:.2f} x; temporaries {memory[0]:.0f} -> {memory[1]:.0f} MB"
  )


if __name__ == "__main__":
  app.run(main)
