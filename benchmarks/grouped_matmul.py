# SPDX-License-Identifier: Apache-2.0
"""Measures `ep.grouped_matmul` against a dense matmul of the same rows.

    taskset -c 0 ./bazelw run //benchmarks:grouped_matmul

Each program computes a product and its gradients. Runs of the grouped matmul
alternate with runs of a dense matmul, of all rows with one matrix. "bytes" is
the dense time plus the time of NumPy copies: each matrix twice into a cached
buffer, and the buffer into a new array per gradient. A grouped matmul below
"bytes" reads and computes at the same time.
"""

from __future__ import annotations

import functools
import itertools

from absl import app, flags
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import driver, timing
import ep

_ROWS, _INNER, _OUTER = 4096, 256, 512
_EXPERTS = flags.DEFINE_list(
  "experts", ["8", "64", "256"], "numbers of experts"
)


def measure() -> None:
  print(f"jax {jax.__version__}, medians of {driver.ROUNDS.value}")
  for dtype in ("float32", "bfloat16"):
    for experts in map(int, _EXPERTS.value):
      measure_experts(dtype, experts, driver.ROUNDS.value)


def measure_experts(dtype: str, experts: int, rounds: int) -> None:
  """Prints the times for `experts` matrices, as multiples of one matmul."""
  rng = np.random.default_rng(0)

  def draw(*shape):
    return jnp.asarray(rng.normal(size=shape), dtype)

  rows, ct = draw(_ROWS, _INNER), draw(_ROWS, _OUTER)
  matrices = draw(experts, _INNER, _OUTER)
  sizes = rng.multinomial(_ROWS, [1 / experts] * experts).astype(np.int32)

  def grouped(rows, matrices):
    return ep.grouped_matmul(rows, matrices, jnp.asarray(sizes))

  def copy(matrices):
    cached = np.empty_like(matrices[0])
    for matrix in itertools.chain(matrices, matrices):
      np.copyto(cached, matrix)
    return [cached.copy() for _ in matrices]

  def run(fn, *args):
    def both(rows, matrices, ct):
      out, vjp = jax.vjp(fn, rows, matrices)
      return out, vjp(ct)

    program = jax.jit(both).lower(*args).compile()
    return lambda: jax.block_until_ready(program(*args))

  seconds = timing.take_turns(
    {
      "dense": run(jnp.matmul, rows, matrices[0], ct),
      "copy": functools.partial(copy, np.asarray(matrices)),
      "grouped": run(grouped, rows, matrices, ct),
    },
    rounds,
  )
  dense = seconds["dense"]
  print(
    f"{dtype}, E = {experts}: dense {np.median(dense) * 1e3:.1f} ms, bytes"
    f" {1 + timing.ratio(seconds['copy'], dense):.2f} x, grouped"
    f" {timing.ratio(seconds['grouped'], dense):.2f} x"
  )


def worlds():
  return [dict(num_processes=1)]


if __name__ == "__main__":
  app.run(driver.make_main(measure, worlds))
