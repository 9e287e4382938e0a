# SPDX-License-Identifier: Apache-2.0
"""Compares the loss curves of all meshes of four ranks, bit for bit.

    bazel run //benchmarks:loss_curves -- --steps=200
    bazel run //benchmarks:loss_curves -- --processes=4 --view=global

Two MoE layers learn to reverse vectors, from new ones in each step, on meshes
(dp, ep) of 4 x 1, 2 x 2 and 1 x 4 devices. With `deterministic=True` the curves
must be the same, or the program fails; checksums tell whether those of several
runs are. Steps of layers with and without it take turns, for their cost.
"""

from __future__ import annotations

import sys
import zlib

from absl import app, flags
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
import numpy as np

from benchmarks import report, splits, timing
from benchmarks.workload import AXIS
import ep
from ep import launch

_STEPS = flags.DEFINE_integer("steps", 200, "of training, in tens", 10)
_PROCESSES = flags.DEFINE_enum("processes", "1", ["1", "4"], "of four devices")
_VIEW = flags.DEFINE_enum("view", "local", ["local", "global"], "of ep")
_DTYPE = flags.DEFINE_enum(
  "dtype", "float32", ["float32", "bfloat16"], "of activations"
)
_LAYERS, _TOKENS = 2, 256  # tokens of a rank
_CONFIG = ep.MoEConfig(64, 128, 16, 2, shared_inner=32)
_TURN = 10  # steps


def main(argv) -> int:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  if not launch.inside_launcher():
    processes = int(_PROCESSES.value)
    return launch.launch(
      [__file__, *sys.argv[1:]],
      num_processes=processes,
      devices_per_process=splits.RANKS // processes,
    )
  launch.initialize()
  ranks = jax.make_mesh((splits.RANKS,), (AXIS,), axis_types=(AxisType.Auto,))
  first = {}
  is_same = True
  for shape in splits.SHAPES:
    with splits.bootstrap(shape, _CONFIG, _TOKENS) as group:
      kinds = splits.both_kinds(_CONFIG)
      runs = {name: _Run(group, config) for name, config in kinds.items()}
      times = timing.take_turns(
        runs, ranks, rounds=_STEPS.value // _TURN - 1, warmup=1, clock="cpu"
      )
    records = {name: {"seconds": s} for name, s in times.items()}
    ratio = report.ratio(records["deterministic"], records["plain"])
    if jax.process_index() == 0:
      print(f"{splits.title(group)}: deterministic takes {ratio:.2f} x the")
      print("  CPU time of a plain step; differs from the first mesh in")
    for name, run in runs.items():
      losses = np.array(run.losses)
      same = losses == first.setdefault(name, losses)
      is_same &= name == "plain" or same.all()
      if jax.process_index() == 0:
        print(f"  {(~same).sum()} of {same.size} losses ({name})", end="")
        print(f", from {losses[0]:.6f} to {losses[-1]:.6f}", end="")
        print(f", checksum {zlib.crc32(losses.tobytes()):08x}")
  return 0 if is_same else 1


class _Run:
  """A training run, which goes on for some steps in each call."""

  def __init__(self, group, config):
    self.losses = []
    self._group, self._random = group, np.random.default_rng(0)
    specs = ep.moe.partition_specs(config, "ep", lead=1)
    self._tokens = PartitionSpec(group.token_axes)
    self._step = _compile(group, config, specs, self._tokens)
    keys = jax.random.split(jax.random.key(0), _LAYERS)
    params = jax.vmap(lambda key: ep.moe.init(key, config))(keys)
    self._params = {
      name: splits.put(group, np.asarray(p), specs[name])
      for name, p in params.items()
    }

  def __call__(self):
    losses = []
    for _ in range(_TURN):
      x = self._random.normal(size=(splits.RANKS * _TOKENS, _CONFIG.hidden))
      x = splits.put(self._group, x.astype(np.float32), self._tokens)
      loss, self._params = self._step(self._params, x)
      losses.append(loss.block_until_ready())
    self.losses += map(np.asarray, losses)


def _compile(group, config, specs, tokens):
  """Returns the jitted step of stochastic gradient descent."""
  layer, axes = ep.MoE(config, group), group.token_axes
  everywhere = PartitionSpec()
  is_local = _VIEW.value == "local"

  def distance(x, y):
    return ep.ordered_psum(jnp.square(x - y).sum(), axes)

  def shard_map(fn, in_specs, out_specs):
    return jax.shard_map(
      fn, mesh=group.mesh, in_specs=in_specs, out_specs=out_specs
    )

  if not is_local:
    distance = shard_map(distance, (tokens, tokens), everywhere)

  def loss_fn(params, x):
    def block(y, params):
      out, metrics = layer(params, y.astype(_DTYPE.value))
      return y + out, metrics.aux_loss

    y, balance = lax.scan(block, x, params)
    size = splits.RANKS * _TOKENS * _CONFIG.hidden
    return distance(y, x[:, ::-1]) / size + 1e-2 * balance.mean()

  def step(params, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    return loss, jax.tree.map(lambda p, g: p - 0.3 * g, params, grads)

  if is_local:
    step = shard_map(step, (specs, tokens), (everywhere, specs))
  return jax.jit(step)


if __name__ == "__main__":
  app.run(main)
