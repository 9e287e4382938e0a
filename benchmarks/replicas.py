# SPDX-License-Identifier: Apache-2.0
"""Measures a layer with replica slots beside other cures of a full rank.

    bazel run //benchmarks:replicas -- --picture=replicas.png

The program is a layer and the gradients of its parameters, for four devices of
one process, on eight routings from an even one to one of a hot expert. Layers
take turns: with replicas, with drops, in chunks, all with room for the mean of
a rank's rows, and one with room for any routing. It prints a table in Markdown:
the busiest rank's rows over the mean, without copies and with them, megabytes
of the copied matrices of all ranks, the choices that are dropped, and
milliseconds of each layer. Its last line has the programs' temporaries.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib

from absl import flags
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np

from benchmarks import driver, timing
import ep
from ep._src.moe.replicas import divide

_SLOTS = flags.DEFINE_integer("slots", None, "S; default: E / P", 1)
_PICTURE = flags.DEFINE_string("picture", None, "of the ranks' rows: *.png")
_PLAIN = ep.MoEConfig(256, 512, 16, 2)
_TOKENS = 1024  # of a rank
_FULL = dataclasses.replace(_PLAIN, capacity_factor=1.0, overflow="drop")
_E = np.arange(_PLAIN.num_experts)
# These are added to the logits of the experts, which spread by one.
_ROUTINGS = {
  "even": 0.0 * _E,
  "noise": np.random.default_rng(1).normal(size=_E.size) / 4,
  "zipf 0.5": -np.log(_E + 1) / 2,
  "zipf 1": -np.log(_E + 1),
  "zipf 2": -2 * np.log(_E + 1),
  "an idle rank": -9.0 * (_E >= 12),
  "a hot rank": 9.0 * (_E < 4),
  "a hot expert": 9.0 * (_E == 5),
}


def main() -> int:
  P = driver.DEVICES
  slots = _SLOTS.value or _E.size // P
  mesh = jax.make_mesh((P,), ("ep",), axis_types=(AxisType.Auto,))
  configs = {
    "replicas": dataclasses.replace(_PLAIN, replica_slots=slots),
    "drop": _FULL,
    "chunk": dataclasses.replace(_FULL, overflow="chunk"),
    "any": _PLAIN,
  }
  layers = {n: ep.MoE(c, mesh, name=n) for n, c in configs.items()}
  print(f"jax {jax.__version__}, medians of {driver.ROUNDS.value}, S = {slots}")
  names = "rows", "with copies", "MB", "dropped", *layers
  print(f"| routing | {' | '.join(names)} |\n|{'---|' * (1 + len(names))}")
  rows = {n: _measure(mesh, layers, n, slots) for n in _ROUTINGS}
  if _PICTURE.value:
    folder = os.environ.get("BUILD_WORKING_DIRECTORY", "")
    _draw(rows, pathlib.Path(folder, _PICTURE.value))
  return 0


def _measure(mesh, layers, routing, slots):
  """Prints a line of the table; returns the ranks' rows, [2, P]."""
  P, mean, rng = mesh.size, _TOKENS * _PLAIN.top_k, np.random.default_rng(0)
  params = dict(ep.moe.init(jax.random.key(0), _PLAIN))
  x = rng.normal(size=(P * _TOKENS, _PLAIN.hidden)).astype(np.float32)
  x[:, 0], params["router"] = 1, params["router"].at[0].set(_ROUTINGS[routing])
  x = jax.device_put(x, NamedSharding(mesh, PartitionSpec("ep")))
  specs = layers["drop"].specs()
  params = {
    n: jax.device_put(p, NamedSharding(mesh, specs[n]))
    for n, p in params.items()
  }

  def step_of(layer):
    def loss(params, x):
      y, metrics = layer(params, x)
      return (y * x).sum(), metrics

    return jax.jit(jax.grad(loss, has_aux=True))

  steps = {
    n: step_of(layer).lower(params, x).compile() for n, layer in layers.items()
  }
  metrics = {n: step(params, x)[1] for n, step in steps.items()}
  seconds = timing.take_turns(
    {
      n: lambda s=s: jax.block_until_ready(s(params, x))
      for n, s in steps.items()
    },
    mesh,
    rounds=driver.ROUNDS.value,
    warmup=1,
    clock=driver.CLOCK.value,
  )
  times = [f"{np.median(s) * 1e3:.0f}" for s in seconds.values()]
  load = np.asarray(metrics["drop"].load).astype(np.int32).reshape(P, -1)
  division = divide(jnp.asarray(load), mean, slots)
  num_copies = int((division.slots >= 0).sum())
  matrix = sum(params[n][0].nbytes for n in ("w_gate", "w_up", "w_down"))
  after = _rows(load, jax.tree.map(np.asarray, division))
  assert after.max() == metrics["replicas"].max_rank_rows
  print(
    f"| {routing} | {load.sum(1).max() / mean:.2f} | {after.max() / mean:.3f}"
    f" | {num_copies * matrix / 1e6:.1f}"
    f" | {metrics['drop'].dropped / load.sum():.1%}"
    f" | {' | '.join(times)} |",
    flush=True,
  )
  if routing == [*_ROUTINGS][-1]:
    sizes = (s.memory_analysis().temp_size_in_bytes for s in steps.values())
    sizes = " | ".join(f"{n / 1e6:.0f}" for n in sizes)
    print(f"| MB of temporaries | | | | | {sizes} |")
  return np.stack([load.sum(1), after])


def _rows(load, division):
  """Returns [P], the rows of ranks after they are divided."""
  rows = load.sum(1)
  first = division.first[division.donor]  # [P, L], of what a rank takes
  last = first + load[division.donor]
  moved = np.minimum(division.end[:, None], last)
  moved = (moved - np.maximum(division.start[:, None], first)).clip(0)
  moved = np.where(division.slots >= 0, moved, 0).sum(1)
  np.subtract.at(rows, division.donor, moved)
  return rows + moved


def _draw(rows, path):
  """Draws the ranks' rows of all routings, in order of size."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(9, 2.2), layout="constrained")
  axes = figure.subplots(1, len(rows), sharey=True)
  for ax, (routing, (before, after)) in zip(axes, rows.items(), strict=True):
    mean, at = before.mean(), np.arange(before.size)
    ax.bar(at - 0.2, before / mean, 0.4, label="before", color="#e69f00")
    ax.bar(at + 0.2, after / mean, 0.4, label="with copies", color="#0072b2")
    ax.set(title=routing, xticks=[])
    ax.title.set_fontsize("small")
  axes[0].set_ylabel("rows of a rank / mean")
  axes[0].legend(fontsize="x-small")
  figure.savefig(path, dpi=80)


if __name__ == "__main__":
  driver.run(main)
