# SPDX-License-Identifier: Apache-2.0
"""Measures how long a scanned model with MoE layers takes to compile.

    bazel run //benchmarks:compile_time -- --layers=8

The program is that of scanned_model.py, or with --layers=0 only prepare,
dispatch, combine and their gradients. It is traced, lowered and compiled for
four devices of one process, and never runs. The models, on backends of ep and
with dense networks of the same active size, take turns, each with empty caches.

It counts the instructions of a program, and the bytes that its collectives take
to a rank from the others, beside the rows that a uniform routing has for it.
"""

from __future__ import annotations

import contextlib
import math
import re
import sys

from absl import app, flags
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
import numpy as np

from benchmarks import report, scanned_model, timing
from benchmarks.workload import AXIS, SPEC
import ep
from ep import launch

_LAYERS = flags.DEFINE_integer("layers", 8, "that are scanned", 0)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "compilations that are timed", 1)
_CLOCK = flags.DEFINE_enum(
  "clock", "wall", list(timing.CLOCKS), "wall time, or CPU time of all threads"
)
_BACKENDS = ("host", "xla")
_TOKENS = 256  # of a rank, without layers


def main(argv) -> int:
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  if not launch.inside_launcher():
    return launch.launch(
      [__file__, *sys.argv[1:]], num_processes=1, devices_per_process=4
    )
  launch.initialize()
  mesh = jax.make_mesh((4,), (AXIS,), axis_types=(AxisType.Auto,))
  with contextlib.ExitStack() as stack:
    lower = {}
    if _LAYERS.value:
      lower["dense"] = _model(mesh, scanned_model.Dense())
    for backend in _BACKENDS:
      group = stack.enter_context(scanned_model.bootstrap(mesh, backend))
      lower[backend] = (
        _model(mesh, scanned_model.MoE(group))
        if _LAYERS.value
        else _round_trip(mesh, ep.EpLayerConfig(group))
      )
    programs = {name: low().compile().as_text() for name, low in lower.items()}
    times = timing.take_turns(
      {name: _compiler(low) for name, low in lower.items()},
      mesh,
      rounds=_ROUNDS.value,
      warmup=1,
      clock=_CLOCK.value,
    )
  print(f"{_LAYERS.value} layers, {_CLOCK.value} time, {_ROUNDS.value} rounds")
  records = {name: {"seconds": seconds} for name, seconds in times.items()}
  for name, record in records.items():
    first = next(iter(records))
    ratio = report.ratio(record, records[first])
    median = np.median(record["seconds"])
    print(
      f"{name:8} {median:6.2f} s {ratio:6.2f} x {first},"
      f" {programs[name].count(' = ')} instructions,"
      f" {_bytes_from_others(programs[name], mesh.size) / 1e6:.1f} MB"
    )
  if not _LAYERS.value:  # rows travel there and back, and so do their gradients
    config = scanned_model.CONFIG
    rows = _TOKENS * config.top_k * (mesh.size - 1) // mesh.size
    print(f"rows     {4 * rows * (4 * config.hidden + 2) / 1e6:.1f} MB")
  return 0


def _compiler(lower):
  def compile_with_empty_caches():
    jax.clear_caches()
    return lower().compile()

  return compile_with_empty_caches


def _model(mesh, ffn):
  return lambda: scanned_model.lower(mesh, ffn, _LAYERS.value)


def _round_trip(mesh, layer):
  """Returns a function that lowers the ops and their gradients."""

  def loss(tokens, weights, idx):
    handle = ep.ep_prepare(layer, idx)
    rows, row_weights = ep.ep_dispatch(handle, tokens, weights)
    return ep.ep_combine(handle, rows * row_weights[..., None]).sum()

  def argument(columns, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(
      (_TOKENS * mesh.size, columns), dtype, sharding=NamedSharding(mesh, SPEC)
    )

  top_k = scanned_model.CONFIG.top_k
  arguments = (
    argument(scanned_model.CONFIG.hidden),
    argument(top_k),
    argument(top_k, jnp.int32),
  )
  return lambda: jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*arguments)


def _bytes_from_others(program: str, ranks: int) -> float:
  """Returns the bytes that a rank gets from others in its collectives."""
  results = re.findall(r" = (.*?) all-(?:to-all|gather)\(", program)
  sizes = re.findall(r"[a-z]+(\d+)\[([\d,]+)\]", " ".join(results))
  whole = sum(
    int(bits) // 8 * math.prod(map(int, shape.split(",")))
    for bits, shape in sizes
  )
  return whole * (ranks - 1) / ranks


if __name__ == "__main__":
  app.run(main)
