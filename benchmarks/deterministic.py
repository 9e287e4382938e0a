# SPDX-License-Identifier: Apache-2.0
"""Measures what deterministic gradients cost, and that losses are then alike.

    bazel run //benchmarks:deterministic -- --steps=200

The program is the loss of one layer, which learns to reverse vectors, and the
gradients of all parameters, for four devices of one process, on every mesh of
four ranks. Programs with and without `MoEConfig(deterministic=True)` take
turns. Then the layer with it is trained for so many steps, on new vectors in
each. It is an error if the losses differ between the meshes.
"""

from __future__ import annotations

import dataclasses
import functools

from absl import flags
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np

from benchmarks import driver, timing
import ep

_STEPS = flags.DEFINE_integer("steps", 0, "of training", 0)
_CONFIG = ep.MoEConfig(hidden=256, inner=512, num_experts=16, top_k=2)
_TOKENS = 1024  # of a rank
_AXES = ("dp", "ep")


def main() -> int:
  print(f"jax {jax.__version__}, medians of {driver.ROUNDS.value}")
  curves = []
  for shape in ((4, 1), (2, 2), (1, 4)):
    mesh = jax.make_mesh(shape, _AXES, axis_types=(AxisType.Auto,) * 2)
    with ep.ep_bootstrap(
      mesh,
      num_experts=_CONFIG.num_experts,
      max_tokens_per_rank=_TOKENS,
      hidden_dim=_CONFIG.hidden,
      top_k=_CONFIG.top_k,
    ) as group:
      curves.append(_measure(group))
  different = (np.array(curves) != curves[0]).sum()
  print(f"{different} of {_STEPS.value} losses differ from the first mesh's")
  return 1 if different else 0


def _measure(group: ep.EpGroup) -> list[np.ndarray]:
  """Prints times and temporaries of both programs; returns the losses."""
  tokens, specs = PartitionSpec(_AXES), ep.moe.partition_specs(_CONFIG)
  draws = np.random.default_rng(1)

  def put(array, spec):
    return jax.device_put(array, NamedSharding(group.mesh, spec))

  def draw():
    x = draws.normal(size=(driver.DEVICES * _TOKENS, _CONFIG.hidden))
    return put(x.astype(np.float32), tokens)

  params = {
    name: put(x, specs[name])
    for name, x in ep.moe.init(jax.random.key(0), _CONFIG).items()
  }
  x = draw()
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
  losses = []
  for _ in range(_STEPS.value):
    loss, grads = fixed(params, draw())
    params = jax.tree.map(lambda p, g: p - 0.3 * g, params, grads)
    losses.append(np.asarray(loss))
  return losses


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
