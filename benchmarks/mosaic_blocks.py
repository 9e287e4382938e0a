# SPDX-License-Identifier: Apache-2.0
"""Finds the best blocks for the grouped matmul's kernels on a GPU.

    JAX_PLATFORMS=cuda bazel-bin/benchmarks/mosaic_blocks \
        --rows=8192 --matrices=8,4096,14336

It prints lines for the table of ep/_src/matmul/mosaic_blocks.py. For each op it
times all blocks that compile, in a queue of many launches. The matrices get
equal shares of the rows. "TFLOP/s" counts those of the rows that are used.
"""

import functools
import itertools
import time

from absl import app, flags
import jax
import jax.numpy as jnp

from ep._src.matmul import on_cuda
from ep._src.matmul.mosaic_blocks import Blocks

_ROWS = flags.DEFINE_integer("rows", 8192, "rows of the buffer", 64)
_USED = flags.DEFINE_float("used", 1, "the share of rows that is used", 0, 1)
_MATRICES = flags.DEFINE_list("matrices", ["8", "4096", "14336"], "L, F, G")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float16"], "")
_LAUNCHES = flags.DEFINE_integer("launches", 50, "launches that are timed", 1)


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f"unexpected arguments: {argv[1:]}")
  shape = num_slabs, height, width = tuple(map(int, _MATRICES.value))
  num_used = int(_ROWS.value * _USED.value) // num_slabs * num_slabs
  sizes = jnp.full(num_slabs, num_used // num_slabs, jnp.int32)
  keys = iter(jax.random.split(jax.random.key(0), 3))

  def draw(*shape):
    return jax.random.normal(next(keys), shape, _DTYPE.value)

  rows, outs = draw(_ROWS.value, height), draw(_ROWS.value, width)
  matrices = draw(*shape)
  device = jax.local_devices()[0]
  kernels = on_cuda.kernels(device)
  expand = functools.partial(kernels.expand, tail="unspecified")
  contract = functools.partial(kernels.contract, tail="unspecified")
  outer = functools.partial(kernels.outer, dtype=rows.dtype)
  print(f"# {device.device_kind}, JAX {jax.__version__}")
  for op, fn, lefts, rights, size in [
    ("expand", expand, rows, [matrices], (_ROWS.value, width)),
    ("contract", contract, [outs], [matrices], (_ROWS.value, height)),
    ("outer", outer, rows, [outs], (height, width)),
  ]:
    times = {}
    for blocks in _candidates(*size):
      if height % blocks.inner or width % blocks.inner:
        continue
      if blocks.rows < on_cuda.fewest_rows(device):
        continue
      seconds = _seconds(fn, blocks, sizes, None, lefts, rights)
      if seconds is not None:
        times[blocks] = seconds
    best = min(times, key=times.get)
    flops = 2 * num_used * height * width / times[best]
    print(
      f'  ("{op}", {height}, {width}): {best},'
      f"  # {times[best] * 1e3:.3f} ms, {flops / 1e12:.0f} TFLOP/s",
      flush=True,
    )


def _candidates(height, width):
  """Yields blocks of a result [height, width] that fit into the registers."""
  for sizes in itertools.product(
    (64, 128), (64, 128, 192), (64, 128), (2, 3, 4, 5, 6), (1, 4, 8, 16)
  ):
    blocks = Blocks(*sizes)
    is_inside = blocks.rows <= height and blocks.columns <= width
    if is_inside and blocks.rows * blocks.columns <= 128 * 192:
      yield blocks


def _seconds(fn, blocks, *operands):
  """Returns the time of a launch, or None if there is no such kernel."""
  sizes, segments, *arrays = operands
  program = jax.jit(
    lambda sizes, *arrays: fn(sizes, segments, *arrays, blocks=blocks)
  )
  try:
    compiled = program.lower(sizes, *arrays).compile()
  except ValueError as error:
    if "shared memory" not in str(error):
      raise
    return None
  jax.block_until_ready(compiled(sizes, *arrays))
  start = time.perf_counter()
  outs = [compiled(sizes, *arrays) for _ in range(_LAUNCHES.value)][-1]
  jax.block_until_ready(outs)
  return (time.perf_counter() - start) / _LAUNCHES.value


if __name__ == "__main__":
  app.run(main)
