# SPDX-License-Identifier: Apache-2.0
"""Compiles the Mosaic kernels for an H100, a B200 and a B300, without a GPU.

NVIDIA's assembler reports registers that it spills to memory, and WGMMA
instructions that it serializes.
"""

from concurrent import futures
import functools
import multiprocessing
import os
import re

import jax
import jax.numpy as jnp
import pytest

from ep._src.matmul import by_mosaic, mosaic_row_map, mosaic_sums
from ep._src.matmul.row_map import weighted
import gpu_compiler
from targets import gpus

# Rows and widths, for blocks of 256 and of 192 columns.
SHAPES = (256, 512, 768), (256, 192, 320)


def _gradients(gates, values, weights, cotangent):
  def of(gates, values, weights):
    return [weighted(jax.nn.silu(gates) * values, weights)]

  return jax.vjp(of, gates, values, weights)[1]([cotangent])


def _programs(new, num_rows, f, g, options):
  """Yields functions that run one kind of kernel, and their arguments."""
  sizes, rows, outs = (
    new((4,), jnp.int32),
    new((num_rows, f)),
    new((num_rows, g)),
  )
  matrices = [new((4, f, g))] * 2

  def expand(sizes, rows, matrix):
    return by_mosaic.expand(sizes, rows, [matrix], "nan", **options)

  def contract(sizes, outs, matrices):
    return by_mosaic.contract(sizes, outs, matrices, "zero", **options)

  def outer(sizes, rows, outs, dtype):
    return by_mosaic.outer(sizes, rows, [outs], dtype, **options)

  def row_map(num_used, *arrays):
    cores = options["num_cores"]
    return mosaic_row_map.map_rows(
      _gradients, num_used, arrays, num_cores=cores
    )

  yield expand, (sizes, rows, matrices[0])
  yield contract, (sizes, [outs] * 2, matrices)
  for dtype in jnp.float32, jnp.bfloat16:
    yield functools.partial(outer, dtype=dtype), (sizes, rows, outs)
  weights = new((num_rows,), jnp.float32)
  yield row_map, (new((), jnp.int32), rows, rows, weights, rows)


def _compile(name, cores, capability, sums, shapes):
  """Compiles one kernel per program; returns the number of kernels."""
  os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"  # to standard output
  (device,) = gpus(name, cores, capability)
  sharding = jax.sharding.SingleDeviceSharding(device)

  def new(shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  options = dict(num_cores=cores, accumulate=getattr(mosaic_sums, sums))
  programs = [
    program for shape in shapes for program in _programs(new, *shape, options)
  ]
  for run, args in programs:
    jax.jit(run).lower(*args).compile()
  return len(programs)


@pytest.mark.parametrize(
  ("name", "cores", "capability", "sums", "shapes"),
  [
    (
      *("NVIDIA H100 80GB HBM3", 132, "9.0", "in_registers"),
      (*SHAPES, (64, 192, 320)),
    ),
    (
      *("NVIDIA B200", 148, "10.0", "in_tensor_memory"),
      (*SHAPES, (128, 192, 320)),
    ),
    ("NVIDIA B300", 148, "10.3", "in_tensor_memory", SHAPES[:1]),
  ],
)
@gpu_compiler.needs_compiler
def test_no_register_is_spilled(name, cores, capability, sums, shapes, capfd):
  """Each GPU gets a process: jaxlib compiles only for a process's first GPU.

  A B300 runs the kernels of a B200, so one shape suffices there.
  """
  context = multiprocessing.get_context("spawn")
  with futures.ProcessPoolExecutor(1, context) as process:
    kernels = process.submit(
      _compile, name, cores, capability, sums, shapes
    ).result()
  log = capfd.readouterr().out
  spills = re.findall(r"frame, (\d+) bytes spill stores, (\d+) bytes", log)
  assert spills == [("0", "0")] * kernels, log
  assert "serialized" not in log
  used = re.findall(r"Used (\d+) registers, used 16 barriers", log)
  if sums == "in_registers":
    # Of three warpgroups, two ask for 232 registers per thread, and one keeps
    # 40. If the kernel started with fewer than 168, the two would never run.
    assert sorted(map(int, used))[-8:] == [168] * 8, log
