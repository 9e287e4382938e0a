# SPDX-License-Identifier: Apache-2.0
"""Measures the cost of options of `ep.MoE`.

    bazel run //benchmarks:moe_options

A program runs a layer forward and backward, on four devices of one process. On
each mesh, runs with and without the option alternate. Replica slots are also
measured with unbalanced routings, up to one hot rank.
"""

from __future__ import annotations

import dataclasses

from absl import app
import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np

from benchmarks import driver, timing
import ep

_PLAIN = ep.MoEConfig(hidden=256, inner=512, num_experts=16, top_k=2)
_AXES = "dp", "ep"
_E = np.arange(_PLAIN.num_experts)
# Offsets of the experts' logits, whose standard deviation is 1.
_ROUTINGS = {
  "even": 0.0 * _E,
  "zipf 0.5": -np.log(_E + 1) / 2,
  "zipf 1": -np.log(_E + 1),
  "a hot expert": 9.0 * (_E == 5),
  "a hot rank": 9.0 * (_E < 4),
}


def measure() -> None:
  print(f"jax {jax.__version__}, medians of {driver.ROUNDS.value}")
  sizes = dict(tokens=1024, rounds=driver.ROUNDS.value)
  for shape in ((4, 1), (2, 2), (1, 4)):
    measure_option(shape, "even", **sizes, deterministic=True)
  for routing in _ROUTINGS:
    measure_option((1, 4), routing, **sizes, replica_slots=_E.size // 4)


def measure_option(
  shape: tuple[int, int], routing: str, *, tokens: int, rounds: int, **option
) -> None:
  """Prints rows, times and temporaries of a layer without and with an option.

  Each rank of the mesh `shape` has `tokens` tokens.
  """
  mesh = jax.make_mesh(shape, _AXES, axis_types=(AxisType.Auto,) * 2)
  params = dict(ep.moe.init(jax.random.key(0), _PLAIN))
  params["router"] = params["router"].at[0].set(_ROUTINGS[routing])
  x = jax.random.normal(jax.random.key(1), (mesh.size * tokens, _PLAIN.hidden))
  x = x.at[:, 0].set(1)
  rows, megabytes, runs = {}, {}, {}
  for name, config in {
    "plain": _PLAIN,
    "option": dataclasses.replace(_PLAIN, **option),
  }.items():
    layer = ep.MoE(config, mesh, name=name)
    specs = layer.specs(), PartitionSpec(_AXES)
    args = jax.device_put(
      (params, x),
      jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs),
    )
    step = jax.jit(jax.grad(_loss(layer), has_aux=True)).lower(*args).compile()
    megabytes[name] = step.memory_analysis().temp_size_in_bytes / 1e6
    _, metrics = step(*args)
    rows[name] = metrics.max_rank_rows / (tokens * _PLAIN.top_k)
    runs[name] = lambda step=step, args=args: jax.block_until_ready(step(*args))
  seconds = timing.take_turns(runs, rounds)
  ms = {name: np.median(s) * 1e3 for name, s in seconds.items()}

  def both(form, values):
    return " -> ".join(format(float(values[name]), form) for name in runs)

  print(
    f"{' x '.join(map(str, shape))}, {routing}, {option}:"
    f" {both('.0f', ms)} ms,"
    f" {timing.ratio(seconds['option'], seconds['plain']):.2f} x; rows of the"
    f" busiest rank / mean {both('.2f', rows)}; temporaries"
    f" {both('.0f', megabytes)} MB",
    flush=True,
  )


def _loss(layer: ep.MoE):
  def loss(params, x):
    y, metrics = layer(params, x)
    return (y * x).sum() + 0.01 * metrics.aux_loss, metrics

  return loss


def worlds():
  return [dict(num_processes=1, devices_per_process=4)]


if __name__ == "__main__":
  app.run(driver.make_main(measure, worlds))
