# SPDX-License-Identifier: Apache-2.0
"""Applies a function to used rows: a Pallas Mosaic GPU kernel, from Hopper on.

Each thread block loops over blocks of used rows; the device reads the number of
blocks. For a block of rows, a pipeline copies one block of columns after
another to shared memory (TMA).

So the function must be elementwise. Arrays are [C, F], or [C] with one value
for each row. A result [C] is a sum over the columns of a row.

The kernel computes the function in float32 and rounds the results once, as
XLA's kernels do with 16-bit floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from ep._src.base import compat
from ep._src.matmul import mosaic_sums, row_tiles

ROWS = COLUMNS = 64  # the rows and the columns of a block

# Two thread blocks share a multiprocessor and its 227 KiB of shared memory:
# while one thread block begins a block of rows, the other one computes.
_PER_CORE = 2
_PIPELINE_BYTES = 80 << 10
_MOST_STEPS = 4  # most pipeline steps with blocks in shared memory

_ELEMENTWISE = frozenset(
  """abs add and atan2 clamp convert_element_type copy cos div eq erf exp exp2
  ge gt integer_pow is_finite le log logistic lt max min mul ne neg not or pow
  rem round rsqrt select_n sign sin sqrt square stop_gradient sub tanh
  xor""".split()
)

# The primitives that call a function; `_evaluate` inlines them.
_CALLS = "jit", "custom_jvp_call", "custom_vjp_call"


def map_rows(
  fn: Callable[..., Sequence[jax.Array]],
  num_used: jax.Array,
  arrays: Sequence[jax.Array],
  *,
  num_cores: int,
) -> list[jax.Array]:
  """Returns `fn(*arrays)`; rows after the last used block are unwritten.

  The number of rows is a multiple of 8, at least ROWS; the number of columns is
  a multiple of COLUMNS. Raises `NotImplementedError` if `fn` is not
  elementwise.
  """
  out_types = jax.eval_shape(fn, *arrays)
  num_rows, num_columns = next(x.shape for x in arrays if x.ndim == 2)
  num_blocks = lax.div(num_used + (ROWS - 1), jnp.int32(ROWS))
  of_block = compat.jaxpr_as_fun(_of_block(fn, arrays))

  def body(count: Any, *refs: Any) -> None:
    ins, outs = refs[: len(arrays)], refs[len(arrays) :]
    wide, narrow = ([x for x in outs if x.ndim == n] for n in (2, 1))

    def write(rows: Any, staged: Any, sums: Any) -> None:
      def compute(steps: Any, *blocks_and_sums: Any) -> list[jax.Array]:
        *blocks, sums = blocks_and_sums
        results = of_block(*map(_load, blocks))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        _store((x for x in results if x.ndim == 2), staged)
        columns = pl.ds(steps[0] * COLUMNS, COLUMNS)
        for block, out in zip(staged, wide, strict=True):
          plgpu.copy_smem_to_gmem(block, out.at[rows, columns])
        terms = (x for x in results if x.ndim == 1)
        return [*map(jnp.add, sums, terms)]

      zeros = [jnp.zeros(x.shape, x.dtype) for x in sums]
      totals = plgpu.emit_pipeline(
        compute,
        grid=(num_columns // COLUMNS,),
        in_specs=[plgpu.BlockSpec(_block_shape(x), _place(x)) for x in ins],
        max_concurrent_steps=_num_steps(arrays),
        init_carry=[*map(_laid_out, zeros)],
      )(*(x.at[rows] for x in ins))
      _store(totals, sums)
      for block, out in zip(sums, narrow, strict=True):
        plgpu.copy_smem_to_gmem(block, out.at[rows])
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @plgpu.nd_loop((count[0],), collective_axes="core")
    def _(loop: Any) -> None:
      start = lax.min(loop.index[0] * ROWS, jnp.int32(num_rows - ROWS))
      rows = pl.ds(pl.multiple_of(start, row_tiles.ALIGNMENT), ROWS)
      memory = [
        [plgpu.SMEM(_block_shape(x), x.dtype) for x in refs]
        for refs in (wide, narrow)
      ]
      pl.run_scoped(functools.partial(write, rows), *memory)

  out_type, num_thread_blocks = list(out_types), _PER_CORE * num_cores
  operands = num_blocks[None], *arrays
  return list(mosaic_sums.run(body, out_type, num_thread_blocks, *operands))


def _of_block(fn: Callable[..., Any], arrays: Sequence[jax.Array]) -> Any:
  """Returns the jaxpr of `fn` for blocks, in float32 and without calls."""
  new: Any = jax.ShapeDtypeStruct
  rows = [new((ROWS, *x.shape[1:]), x.dtype) for x in arrays]
  blocks = [new(_block_shape(x), _wide(x.dtype)) for x in arrays]
  # A block is on no mesh, so its values need no `reshard`.
  no_mesh = jax.sharding.AbstractMesh((), ())
  with jax.enable_x64(False), jax.sharding.use_abstract_mesh(no_mesh):
    evaluate = functools.partial(_evaluate, jax.make_jaxpr(fn)(*rows))
    traced = jax.make_jaxpr(evaluate)(*blocks)
  _check(traced.jaxpr)
  return traced


def _check(jaxpr: Any) -> None:
  """Raises unless all equations are elementwise, or sums for a result [C]."""
  read = {v for e in jaxpr.eqns for v in e.invars if not _is_literal(v)}
  sums = {e.outvars[0] for e in jaxpr.eqns if _is_sum(e)} - read
  for e in jaxpr.eqns:
    is_fine = e.primitive.name in _ELEMENTWISE or _repeats(e)
    if not is_fine and sums.isdisjoint(e.outvars):
      raise NotImplementedError(
        f"{e.primitive.name} does not treat each element by itself"
      )
  if any(v.aval.ndim < 2 and v not in sums for v in jaxpr.outvars):
    raise NotImplementedError("a result [C] is not a sum of columns")


def _evaluate(traced: Any, *operands: Any) -> list[jax.Array]:
  """Evaluates the equations of rows for a block of columns, in float32.

  Inlines calls, and replaces `add_any`, which Mosaic GPU cannot lower.
  """
  jaxpr = traced.jaxpr
  values = dict(zip(jaxpr.constvars, traced.consts, strict=True))
  values |= zip(jaxpr.invars, operands, strict=True)

  def value(variable: Any) -> Any:
    if _is_literal(variable):
      return np.asarray(variable.val, _wide(variable.aval.dtype))
    return values[variable]

  for e in jaxpr.eqns:
    inputs, params = [*map(value, e.invars)], e.params
    if e.primitive.name in _CALLS:
      called = params.get("jaxpr", params.get("call_jaxpr"))
      results = _evaluate(called, *inputs)
    elif e.primitive.name == "add_any":
      results = [lax.add(*inputs)]
    elif e.primitive.name == "convert_element_type":
      (x,) = inputs
      results = [lax.convert_element_type(x, _wide(params["new_dtype"]))]
    elif _repeats(e):
      (x,), shape = inputs, _block_shape(e.outvars[0].aval)
      results = [lax.broadcast_in_dim(x, shape, params["broadcast_dimensions"])]
    else:
      results = e.primitive.bind(*inputs, **params)
      results = results if e.primitive.multiple_results else [results]
    values |= zip(e.outvars, results, strict=True)
  return [*map(value, jaxpr.outvars)]


def _wide(dtype: jnp.dtype) -> jnp.dtype:
  is_short = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
  return jnp.dtype(jnp.float32) if is_short else dtype


def _is_literal(variable: Any) -> bool:
  return isinstance(variable, compat.Literal)


def _is_sum(equation: Any) -> Any:
  name, params = equation.primitive.name, equation.params
  return name == "reduce_sum" and params["axes"] == (1,)


def _repeats(equation: Any) -> Any:
  """Returns whether an equation broadcasts a scalar, or one value per row."""
  name, params = equation.primitive.name, equation.params
  dims = params.get("broadcast_dimensions")
  return name == "broadcast_in_dim" and dims in ((), (0,))


def _block_shape(array: Any) -> tuple[int, ...]:
  return (ROWS, COLUMNS)[: array.ndim]


def _place(array: Any) -> Callable[[Any], tuple[Any, ...]]:
  """Returns a function that maps a pipeline step to the step's block index."""
  return lambda step: (0, step)[: array.ndim]


def _load(block: Any) -> jax.Array:
  return _laid_out(block[...]).astype(_wide(block.dtype))


def _laid_out(values: jax.Array) -> jax.Array:
  """Returns values in a register layout in which rows can be summed."""
  layout = plgpu.Layout.WGMMA
  values = plgpu.layout_cast(
    values, layout if values.ndim == 2 else layout.reduce(1)
  )
  return values


def _store(values: Iterable[jax.Array], blocks: Any) -> None:
  for block, x in zip(blocks, values, strict=True):
    block[...] = x.astype(block.dtype)
  plgpu.commit_smem()


def _num_steps(arrays: Sequence[jax.Array]) -> int:
  step = sum(ROWS * COLUMNS * x.dtype.itemsize for x in arrays if x.ndim == 2)
  return max(2, min(_MOST_STEPS, _PIPELINE_BYTES // step))
