# SPDX-License-Identifier: Apache-2.0
"""Measures what deterministic gradients cost.

    bazel run //benchmarks:deterministic -- --rounds=15

The program is the loss of one layer, which learns to reverse vectors, and the
gradients of all parameters, for four devices of one process, on every mesh of
four ranks. Programs with and without `MoEConfig(deterministic=True)` take
turns.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np

from benchmarks import driver, timing
import ep

_CONFIG = ep.MoEConfig(hidden=256, inner=512, num_experts=16, top_k=2)
_TOKENS = 1024  # of a rank
_AXES = ("dp", "ep")


def main() -> None:
  print(f"jax {jax.__version__}, medians of {driver.ROUNDS.value}")
  for shape in ((4, 1), (2, 2), (1, 4)):
    mesh = jax.make_mesh(shape, _AXES, axis_types=(AxisType.Auto,) * 2)
    with ep.ep_bootstrap(
      mesh,
      num_experts=_CONFIG.num_experts,
      max_tokens_per_rank=_TOKENS,
      hidden_dim=_CONFIG.hidden,
      top_k=_CONFIG.top_k,
    ) as group:
      _measure(group)


def _measure(group: ep.EpGroup) -> None:
  """Prints times and temporaries of both programs."""
  tokens, specs = PartitionSpec(_AXES), ep.moe.partition_specs(_CONFIG)

  def put(array, spec):
    return jax.device_put(array, NamedSharding(group.mesh, spec))

  params = {
    name: put(x, specs[name])
    for name, x in ep.moe.init(jax.random.key(0), _CONFIG).items()
  }
  shape = driver.DEVICES * _TOKENS, _CONFIG.hidden
  x = put(jax.random.normal(jax.random.key(1), shape), tokens)
  plain, fixed = (
    jax.jit(jax.value_and_grad(_loss(group, is_fixed)))
    .lower(params, x)
    .compile()
    for is_fixed in (False, True)
  )
  seconds = timing.take_turns(
    {
      run: lambda run=run: jax.block_until_ready(run(params, x))
      for run in (plain, fixed)
    },
    group.mesh,
    rounds=driver.ROUNDS.value,
    warmup=2,
  )
  a, b = (np.median(s) * 1e3 for s in seconds.values())
  c, d = (r.memory_analysis().temp_size_in_bytes / 1e6 for r in seconds)
  print(
    f"{' x '.join(map(str, group.mesh.shape.values()))}: {a:.0f} ms,"
    f" deterministic {b:.0f} ms, {b / a:.2f} x; temporaries {c:.0f} -> {d:.0f}"
    " MB"
  )


def _loss(group: ep.EpGroup, deterministic: bool):
  config = dataclasses.replace(_CONFIG, deterministic=deterministic)
  layer, tokens = ep.MoE(config, group), PartitionSpec(_AXES)

  @functools.partial(
    jax.shard_map,
    mesh=group.mesh,
    in_specs=tokens,
    out_specs=PartitionSpec(),
  )
  def distance(x, y):
    return ep.ordered_psum(jnp.square(x - y).sum(), _AXES)

  def loss(params, x):
    y, metrics = layer(params, x)
    return distance(y, x[:, ::-1]) / x.size + 0.01 * metrics.aux_loss

  return loss


if __name__ == "__main__":
  driver.run(main)
