# SPDX-License-Identifier: Apache-2.0
"""Tests the Mosaic kernels for Hopper and Blackwell GPUs without a GPU.

JAX's interpreter runs the kernels, and JAX lowers them for CUDA;
mosaic_compiled_test.py compiles them.
"""

import dataclasses
import functools

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from ep._src.matmul import by_mosaic, mosaic_row_map, mosaic_sums
from ep._src.matmul.mosaic_row_map import ROWS
from ep._src.matmul.mosaic_sums import Blocks
from ep._src.matmul.row_map import repeated, weighted

# The last blocks of rows and columns overlap with the previous blocks.
C, L, F, G = 200, 5, 192, 320
SUMS = "in_registers", "in_tensor_memory"
BLOCKS = {
  "expand": Blocks(rows=128, columns=256, stages=2, panel=1),
  "contract": Blocks(rows=64, columns=128, stages=3, panel=4),
  "outer": Blocks(rows=128, columns=256, panel=1),
}
ALL, NONE, ONE = [0, 1, 0, 77, 122], [0, 0, 0, 0, 0], [0, 0, 0, 0, 200]


def _run(op, sizes, rows, matrices, outs, *, tail="zero", **options):
  """Calls one of the kernels; `contract` adds products of two matrices."""
  if op == "expand":
    return by_mosaic.expand(sizes, rows, matrices[:1], tail, **options)
  if op == "contract":
    return [by_mosaic.contract(sizes, outs, matrices, tail, **options)]
  return by_mosaic.outer(sizes, rows, outs[:1], jnp.float32, **options)


def _inputs(sizes, dtype):
  """Returns inputs of `_run`, with NaN in unused rows and in segment 3."""
  rng = np.random.default_rng(0)
  shapes = (C, F), (L, F, G), (L, F, G), (C, G), (C, G)
  x, w, v, y, z = (np.asarray(rng.normal(size=s), dtype) for s in shapes)
  for rows in (x, y, z):
    rows[sum(sizes) :] = np.nan
    rows[sum(sizes[:3]) : sum(sizes[:4])] = np.nan
  return x, [w, v], [y, z]


def _expected(op, sizes, rows, matrices, outs):
  x, matrices, outs = np.float64(rows), np.float64(matrices), np.float64(outs)
  slabs = list(map(slice, np.cumsum(sizes) - sizes, np.cumsum(sizes)))
  if op == "outer":
    return [np.stack([x[s].T @ outs[0][s] for s in slabs])]
  results = []
  for w, y in zip(matrices, outs, strict=True):
    out = np.zeros((C, G if op == "expand" else F))
    for matrix, s in zip(w, slabs, strict=True):
      out[s] = x[s] @ matrix if op == "expand" else y[s] @ matrix.T
    results.append(out)
  return results[:1] if op == "expand" else [sum(results)]


@pytest.fixture
def interpret(monkeypatch):
  """Returns a context manager in which JAX interprets kernels.

  Tests jit their calls to run one program at a time: the interpreter calls JAX
  in callbacks, and two concurrent programs hung or crashed.
  """
  try:
    from jax._src.pallas.mosaic_gpu.interpret import (
      interpret_pallas_call,
      params,
    )
  except ImportError:
    pytest.skip(f"JAX {jax.__version__} has no interpreter of these kernels")
  if not hasattr(plgpu, "InterpretGPUParams"):
    _interpret_transposes(monkeypatch)
    _interpret_layouts()

  def context(**options):
    options["out_of_bounds_reads"] = "uninitialized"
    return params.force_gpu_interpret_mode(params.InterpretGPUParams(**options))

  yield context
  interpret_pallas_call.reset_gpu_interpret_mode_state()  # After a failure.


def _interpret_transposes(monkeypatch):
  """Makes the interpreter of JAX 0.10 read transposed blocks."""
  from jax._src.pallas.mosaic.interpret import utils
  from jax._src.pallas.mosaic_gpu.interpret import shared_memory
  from jax._src.state.types import TransposeTransform

  class Transposed(tuple):
    pass

  def to_range(transforms, original=utils.to_range):
    kept = [t for t in transforms if not isinstance(t, TransposeTransform)]
    kind = tuple if len(kept) == len(transforms) else Transposed
    return kind(original(kept))

  memory = shared_memory.GPUSharedMemory

  def read(self, key, where, *args, original=memory.get_buffer_content, **kw):
    value, *others = original(self, key, tuple(where), *args, **kw)
    return value.T if isinstance(where, Transposed) else value, *others

  monkeypatch.setattr(utils, "to_range", to_range)
  monkeypatch.setattr(memory, "get_buffer_content", read)


def _interpret_layouts():
  """Makes the interpreter of JAX 0.10 ignore layout casts."""
  from jax._src.pallas.mosaic_gpu.core import layout_cast_p
  from jax.interpreters import mlir

  mlir.register_lowering(layout_cast_p, lambda _, x, **__: [x], "cpu")


def _options(op, sums):
  blocks, accumulate = BLOCKS[op], getattr(mosaic_sums, sums)
  if sums == "in_tensor_memory":
    if not hasattr(plgpu, "InterpretGPUParams"):
      pytest.skip(f"JAX {jax.__version__} does not interpret tensor memory")
    blocks = dataclasses.replace(blocks, rows=128)
  return dict(num_cores=2, accumulate=accumulate, blocks=blocks)


@pytest.mark.parametrize(
  ("op", "dtype", "sums"),
  [
    ("expand", jnp.bfloat16, SUMS[0]),
    ("contract", jnp.bfloat16, SUMS[0]),
    ("outer", jnp.float16, SUMS[0]),
    *((op, jnp.bfloat16, SUMS[1]) for op in BLOCKS),
  ],
)
def test_interpreted_beside_nans(op, dtype, sums, interpret):
  """NaN in unused rows or in another segment does not change results."""
  run = jax.jit(functools.partial(_run, op, **_options(op, sums)))
  # ALL has empty segments, so "outer" needs no case without rows (NONE).
  for sizes in [ALL, ONE] if op == "outer" else [ALL, NONE]:
    inputs = _inputs(sizes, dtype)
    with interpret():
      results = run(jnp.int32(sizes), *inputs)
    eps = 1e-5 if op == "outer" else float(jnp.finfo(dtype).eps) / 2
    for actual, expected in zip(
      results, _expected(op, sizes, *inputs), strict=True
    ):
      assert actual.dtype == (jnp.float32 if op == "outer" else dtype)
      np.testing.assert_allclose(np.float64(actual), expected, 1.01 * eps, 1e-4)


@pytest.mark.parametrize(
  ("tail", "sums"), [("unspecified", SUMS[0]), ("nan", SUMS[1])]
)
def test_interpreted_tails(tail, sums, interpret):
  """Unused rows of the output are NaN, from checked mode or fresh memory."""
  sizes = [63, 0, 1, 0, 9]
  inputs = _inputs(sizes, jnp.bfloat16)
  options = _options("expand", sums)
  run = jax.jit(functools.partial(_run, "expand", tail=tail, **options))
  with interpret():
    (out,) = run(jnp.int32(sizes), *inputs)
  assert np.isfinite(np.float32(out[:73])).all()
  assert np.isnan(np.float32(out[73:])).all()


@pytest.mark.parametrize("op", [*BLOCKS, "rows"])
def test_warpgroups_do_not_race(op, interpret, monkeypatch):
  """Each result is in one block; the last blocks of other shapes overlap."""
  from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

  for name in "C", "F", "G":
    monkeypatch.setitem(globals(), name, 128)
  if op == "rows":
    run, args = functools.partial(_map_rows, _gradients), _rows(C)
  else:
    options = _options(op, SUMS[0])
    options["blocks"] = Blocks(columns=64, stages=2)
    run = functools.partial(_run, op, **options)
    sizes = [0, 13, 0, 77, 38]
    args = jnp.int32(sizes), *_inputs(sizes, jnp.bfloat16)
  with interpret(detect_races=True):
    jax.block_until_ready(jax.jit(run)(*args))
  assert not interpret_pallas_call.get_races().races_found


def _hidden(gates, values, holds_token, weights):
  gates = jnp.where(repeated(holds_token, gates) > 0, gates, 0)
  return [weighted(jax.nn.relu(values) * jax.nn.silu(gates), weights)]


def _gradients(gates, values, holds_token, weights, cotangent):
  def of(*args):
    return _hidden(*args[:2], holds_token, args[2])

  return jax.vjp(of, gates, values, weights)[1]([cotangent])


def _rows(num_used, dtype=jnp.bfloat16):
  """Returns the number of used rows, and arrays with NaN in unused rows."""
  rng = np.random.default_rng(0)
  gates, values, cotangent = (
    rng.normal(size=(C, F)).astype(dtype) for _ in range(3)
  )
  weights = np.float32(rng.normal(size=C))
  for x in (gates, values, cotangent, weights):
    x[num_used:] = np.nan
  holds_token = np.int32(np.arange(C) % 3)
  return np.int32(num_used), gates, values, holds_token, weights, cotangent


def _map_rows(fn, num_used, *arrays, num_cores=3):
  return mosaic_row_map.map_rows(fn, num_used, arrays, num_cores=num_cores)


def test_interpreted_functions_of_rows(interpret):
  """Blocks after the used rows keep the NaNs of the interpreter's memory."""
  run = jax.jit(functools.partial(_map_rows, _gradients))
  for used in (0, 1, 130, C):
    num_used, *arrays = _rows(used)
    with interpret():
      results = run(num_used, *arrays)
    exact = _gradients(*(np.float32(x) if x.ndim == 2 else x for x in arrays))
    for actual, expected in zip(results, exact, strict=True):
      actual, eps = np.float32(actual), 1e-5 if actual.ndim == 1 else 4e-3
      np.testing.assert_allclose(actual[:used], expected[:used], eps, 1e-5)
      end = -(-used // ROWS) * ROWS
      assert np.isnan(actual[end:]).all()


@pytest.mark.parametrize(
  "fn",
  [
    lambda x, w: [jax.nn.softmax(x)],
    lambda x, w: [x - jax.jit(lambda x: x.sum(axis=1))(x)[:, None]],
    lambda x, w: [x, 2 * w],
    lambda x, w: [jnp.cumsum(x, axis=1)],
  ],
)
def test_functions_that_need_all_columns_are_refused(fn):
  num_used, rows, _, _, weights, _ = _rows(C)
  with pytest.raises(NotImplementedError, match="each element|sum of columns"):
    jax.eval_shape(functools.partial(_map_rows, fn), num_used, rows, weights)


def _program(op):
  """Returns a function that runs one kernel, and its arguments."""
  if op == "rows":
    return functools.partial(_map_rows, _gradients), _rows(C)
  options = dict(num_cores=132, accumulate=mosaic_sums.in_registers)
  run = functools.partial(_run, op, **options)
  return run, (np.int32(ALL), *_inputs(ALL, jnp.bfloat16))


@pytest.mark.parametrize("op", [*BLOCKS, "rows"])
def test_lowered_for_cuda(op):
  run, args = _program(op)
  traced = jax.jit(run).trace(*args)
  text = traced.lower(lowering_platforms=("cuda",)).as_text()
  assert text.count("stablehlo.custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize(
  ("width", "columns"),
  [(64, 64), (192, 192), (320, 192), (384, 192), (704, 256), (14336, 256)],
)
def test_columns_of_a_block(width, columns):
  assert Blocks.of(128, width).columns == columns
