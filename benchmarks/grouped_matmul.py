# SPDX-License-Identifier: Apache-2.0
"""Measures `ep.grouped_matmul` beside a dense matmul of the same rows.

    export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=1099511627776
    taskset -c 0 bazel-bin/benchmarks/grouped_matmul

Each program computes a product and its gradients. Three programs take turns:
the grouped matmul, a dense matmul of all rows with one matrix, and a batched
einsum of equal slabs, which reads all matrices. "Bytes" is the time of the
dense matmul plus the time in which NumPy copies each matrix twice into a cache,
and then a cached matrix into a new array for each gradient. No program is
faster unless it reads and computes at the same time.

Without these variables (docs/performance.md, "Fresh memory"), each result lies
on new pages, and the kernel takes most of the time to clear them.
"""

import functools
import itertools

from absl import app, flags
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import driver, timing
import ep

_ROWS, _INNER, _OUTER = 4096, 256, 512
_EXPERTS = flags.DEFINE_list("experts", ["8", "64", "256"], "numbers of them")
_DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "")


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  print(
    f"jax {jax.__version__}, {_DTYPE.value}, medians of {driver.ROUNDS.value}"
  )
  for experts in map(int, _EXPERTS.value):
    _measure(experts)


def _measure(experts: int) -> None:
  """Prints the times for `experts` matrices, as multiples of one matmul."""
  rng = np.random.default_rng(0)

  def draw(*shape):
    return jnp.asarray(rng.normal(size=shape), _DTYPE.value)

  rows, ct = draw(_ROWS, _INNER), draw(_ROWS, _OUTER)
  matrices = draw(experts, _INNER, _OUTER)
  sizes = rng.multinomial(_ROWS, [1 / experts] * experts).astype(np.int32)

  def grouped(rows, matrices):
    return ep.grouped_matmul(rows, matrices, jnp.asarray(sizes))

  def einsum(rows, matrices):
    slabs = rows.reshape(experts, -1, _INNER)
    return jnp.einsum("ecf,efg->ecg", slabs, matrices).reshape(ct.shape)

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
      "bytes": functools.partial(copy, np.asarray(matrices)),
      "einsum": run(einsum, rows, matrices, ct),
      "grouped": run(grouped, rows, matrices, ct),
    },
    jax.make_mesh((1,), ("x",)),
    rounds=driver.ROUNDS.value,
    warmup=2,
    clock=driver.CLOCK.value,
  )
  times = {name: np.median(x) for name, x in seconds.items()}
  times["bytes"] += times["dense"]
  dense = times.pop("dense")
  text = ", ".join(
    f"{name} {time / dense:.2f} x" for name, time in times.items()
  )
  print(f"E = {experts}: dense {dense * 1e3:.1f} ms, {text}")


if __name__ == "__main__":
  app.run(main)
