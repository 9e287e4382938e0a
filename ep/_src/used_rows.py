# SPDX-License-Identifier: Apache-2.0
"""Applies a function to the used rows of arrays, not to all of their capacity.

A rank's receive buffer is as large as the worst routing needs, and the rows
that came are usually few of it. An activation of whole arrays would read and
write all of that memory. On CPUs `map_used_rows` goes over blocks of rows and
ends with the last used one, and so do its derivatives. The function of
`map_slabs` also multiplies rows by the matrices of their slab; its blocks are
the tiles of tiles.py. So one loop computes products and activations together,
and in the backward pass the gradients of rows and matrices.

Both are one primitive, which has a function of blocks as its parameter. Its
tangent is the same primitive with the tangent function, and its transpose the
same one with the transposed function, so derivatives of all orders, in both
modes, exist. A result may be a sum over the blocks of each slab, as the
gradient of a matrix is. Its cotangent is a matrix of each slab in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from ep._src import checked, compat, row_buffers, tiles
from ep._src.batching import batch_sequentially
from ep._src.compat import ad
from ep._src.grouped_matmul import grouped_matmuls
from ep._src.row_buffers import cut

# Rows of a block. More make no difference to time, but a block that is as high
# as a small capacity would round otherwise there than in a larger one.
_HEIGHT = 128


def map_used_rows(
  fn: Callable[..., Any],
  group_sizes: jax.Array,
  *arrays: jax.Array,
  tail: str = "unspecified",
) -> Any:
  """Returns `fn(*arrays)`, where `fn` treats each row by itself.

  Differentiable in the arrays, in both modes, to any order, with the same
  property: rows after the last slab affect no other, whatever they hold, NaN
  included. With `tail="unspecified"` those after the last used block are not
  read or written, and what is in the others means nothing.

  Args:
    fn: a function of blocks [B, ...] of rows of each array, for any B, to one
      array [B, ...] or a sequence of them. If `fn` is a new function object in
      each call, an eager call compiles each time. If it closes over traced
      values, it is applied to the whole arrays instead, at the cost of that.
    group_sizes: int32 [L], rows of slabs, of a sum up to C.
    *arrays: [C, ...].
    tail: what results, tangents and gradients hold after the last slab:
      "zero" or "unspecified".

  Returns:
    What `fn` returns, with C for B.
  """
  return _map(_OfRows(fn), group_sizes, None, arrays, (), tail, None)


def map_slabs(
  fn: Callable[..., Any],
  group_sizes: jax.Array,
  arrays: Sequence[jax.Array],
  matrices: Sequence[jax.Array],
  *,
  segments: jax.Array | None = None,
  expected_rows: int | None = None,
) -> Any:
  """Returns `fn(slabs, *arrays, *matrices)`, one loop over slabs on CPUs.

  It is `map_used_rows` for a function that multiplies rows by matrices, with
  `slabs.multiply(rows, [matrix, ...])`, which gives what `grouped_matmuls`
  does. `fn` uses the matrices in no other way. Differentiable in arrays and
  matrices.

  Args:
    fn: as in `map_used_rows`, but for these arguments.
    group_sizes: int32 [L].
    arrays: at least one [C, ...].
    matrices: [L, F, G]. They are multiplied in the dtype of the first array; if
      their own is wider, CPUs do not round their gradients to it.
    segments: as in `grouped_matmuls`.
    expected_rows: how many rows the slabs have together as a rule; None is C.
      CPUs are fastest for so many. They round alike wherever it is the same,
      for any C that is at least as high as a tile (tiles.py).
  """
  tail = "unspecified"
  return _map(fn, group_sizes, segments, arrays, matrices, tail, expected_rows)


def _map(fn, group_sizes, segments, arrays, matrices, tail, expected_rows):
  if segments is None:
    segments = jnp.zeros((*group_sizes.shape, 0), jnp.int32)
  operands = (*arrays, *matrices)
  is_matrix = (False,) * len(arrays) + (True,) * len(matrices)
  types = tiles.block_types(operands, is_matrix, arrays[0].shape[0])
  of_block = functools.partial(fn, tiles.Block())
  traced, structure = jax.make_jaxpr(of_block, return_shape=True)(*types)
  if any(isinstance(c, jax.core.Tracer) for c in traced.consts):
    num_used = group_sizes.sum()
    slabs = _Slabs(group_sizes, segments, "zero")
    outs = fn(slabs, *(cut(x, num_used) for x in arrays), *matrices)
    return jax.tree.map(lambda x: cut(x, num_used), outs)
  group_sizes, segments, *operands = compat.vary_together(
    group_sizes, segments, *operands
  )
  outs = _map_p.bind(
    group_sizes,
    segments,
    *operands,
    fn=_Flat(fn),
    is_matrix=is_matrix,
    sums=(None,) * jax.tree.structure(structure).num_leaves,
    tail=checked.tail(tail),
    expected_rows=expected_rows,
  )
  return jax.tree.unflatten(jax.tree.structure(structure), outs)


# The functions that are parameters are values, which are equal if their parts
# are, because JAX's caches compare them.


@dataclasses.dataclass(frozen=True)
class _OfRows:
  """A function of rows alone."""

  fn: Callable[..., Any]

  def __call__(self, slabs, *blocks):
    del slabs
    return self.fn(*blocks)


@dataclasses.dataclass(frozen=True)
class _Flat:
  """The function that returns the leaves of what `fn` returns."""

  fn: Callable[..., Any]

  def __call__(self, slabs, *blocks):
    return jax.tree.leaves(self.fn(slabs, *blocks))


@dataclasses.dataclass(frozen=True)
class _Tangent:
  """A function of blocks, and of tangents of the `moving` ones."""

  fn: Callable[..., Any]
  moving: tuple[int, ...]

  def __call__(self, slabs, *blocks_and_tangents):
    split = len(blocks_and_tangents) - len(self.moving)
    blocks, tangents = blocks_and_tangents[:split], blocks_and_tangents[split:]

    def of_moving(*values):
      return self.fn(slabs, *_replaced(blocks, self.moving, values))

    values = tuple(blocks[i] for i in self.moving)
    return jax.jvp(of_moving, values, tangents)[1]


@dataclasses.dataclass(frozen=True)
class _Transposed:
  """A function of the other operands, and of the `present` cotangents.

  `fn` is linear in the operands `linear`, which are [C, *shape] or, if they are
  matrices, [L, *shape]; `types` has shape, dtype and whether they are matrices.
  """

  fn: Callable[..., Any]
  linear: tuple[int, ...]
  types: tuple[tuple[tuple[int, ...], Any, bool], ...]
  present: tuple[int, ...]
  first_rows: int

  def __call__(self, slabs, *others_and_cts):
    split = len(others_and_cts) - len(self.present)
    others, cts = others_and_cts[:split], others_and_cts[split:]
    height = others_and_cts[self.first_rows].shape[0]

    def of_linear(*values):
      blocks = list(others)
      for i, value in zip(self.linear, values, strict=True):
        blocks.insert(i, value)
      outs = self.fn(slabs, *blocks)
      return [outs[i] for i in self.present]

    blocks = [
      slabs.matrix_type(shape, dtype)
      if is_matrix
      else jax.ShapeDtypeStruct((height, *shape), dtype)
      for shape, dtype, is_matrix in self.types
    ]
    return list(jax.linear_transpose(of_linear, *blocks)(list(cts)))


@dataclasses.dataclass(frozen=True)
class _Slabs:
  """All slabs, for a function of whole arrays; compare `tiles.Block`."""

  group_sizes: jax.Array
  segments: jax.Array
  tail: str

  def multiply(self, rows, matrices):
    matrices = [w.astype(rows.dtype) for w in matrices]
    return grouped_matmuls(
      rows,
      matrices,
      self.group_sizes,
      segments=self.segments,
      tail=self.tail,
    )

  def matrix_type(self, shape, dtype):
    return jax.ShapeDtypeStruct((*self.group_sizes.shape, *shape), dtype)


def _replaced(values, places, new):
  values = list(values)
  for i, value in zip(places, new, strict=True):
    values[i] = value
  return values


def _apply(group_sizes, segments, *operands, fn, sums, tail, **_):
  outs = fn(_Slabs(group_sizes, segments, tail), *operands)
  num_used = group_sizes.sum()
  return [
    cut(out, num_used, tail) if dtype is None else out
    for out, dtype in zip(outs, sums, strict=True)
  ]


def _apply_on_cpu(group_sizes, segments, *operands, fn, **params):
  if not any(params["is_matrix"]) and not any(
    s is not None for s in params["sums"]
  ):
    return _apply_by_blocks(group_sizes, *operands, fn=fn, tail=params["tail"])
  return tiles.apply(fn, group_sizes, segments, operands, **params)


def _apply_by_blocks(group_sizes, *arrays, fn, tail):
  """Goes over blocks that need not lie in one slab."""
  num_used = group_sizes.sum(dtype=jnp.int32)
  num_rows = arrays[0].shape[0]
  height = min(_HEIGHT, num_rows)
  readers = [row_buffers.Reader(x, num_used) for x in arrays]

  def step(i, outs):
    start = jnp.minimum(i * height, num_rows - height)
    blocks = [read(start, height) for read in readers]
    return [
      row_buffers.write(out, rows, start)
      for out, rows in zip(outs, fn(None, *blocks), strict=True)
    ]

  types = jax.eval_shape(functools.partial(fn, None), *arrays)
  outs = [row_buffers.new(t.shape, t.dtype) for t in types]
  num_blocks = lax.div(num_used + (height - 1), jnp.int32(height))
  outs = lax.fori_loop(0, num_blocks, step, outs)
  return [
    row_buffers.finish(out, t.dtype, num_used, tail)
    for out, t in zip(outs, types, strict=True)
  ]


_map_p = compat.Primitive("ep_map_used_rows")
_map_p.multiple_results = True
compat.compile_eager(
  _map_p, ["fn", "is_matrix", "sums", "tail", "expected_rows"]
)
batch_sequentially(_map_p)


@_map_p.def_abstract_eval
def _types(sizes, segments, *avals, fn, is_matrix, sums, **_):
  del segments
  first = avals[is_matrix.index(False)]
  types = tiles.block_types(avals, is_matrix, first.shape[0])
  outs = jax.eval_shape(functools.partial(fn, tiles.Block()), *types)
  return [
    compat.out_aval(o.shape, o.dtype, first)
    if dtype is None
    else compat.out_aval((*sizes.shape, *o.shape), dtype, first)
    for o, dtype in zip(outs, sums, strict=True)
  ]


def _jvp(primals, tangents, *, fn, is_matrix, **params):
  outs = _map_p.bind(*primals, fn=fn, is_matrix=is_matrix, **params)
  tangents = tangents[2:]
  moving = tuple(i for i, t in enumerate(tangents) if type(t) is not ad.Zero)
  out_tangents = _map_p.bind(
    *primals,
    *(tangents[i] for i in moving),
    fn=_Tangent(fn, moving),
    is_matrix=is_matrix + tuple(is_matrix[i] for i in moving),
    **params,
  )
  return outs, out_tangents


def _transpose(
  cts, group_sizes, segments, *operands, fn, is_matrix, sums, **params
):
  linear = tuple(i for i, x in enumerate(operands) if ad.is_undefined_primal(x))
  present = tuple(i for i, ct in enumerate(cts) if type(ct) is not ad.Zero)
  grads = [None] * len(operands)
  if present:
    types = tuple(
      (operands[i].aval.shape[1:], operands[i].aval.dtype, is_matrix[i])
      for i in linear
    )
    others = [i for i in range(len(operands)) if i not in linear]
    kinds = (
      *(is_matrix[i] for i in others),
      *(sums[i] is not None for i in present),
    )
    outs = _map_p.bind(
      group_sizes,
      segments,
      *(operands[i] for i in others),
      *(cts[i] for i in present),
      fn=_Transposed(fn, linear, types, present, kinds.index(False)),
      is_matrix=kinds,
      sums=tuple(dtype if m else None for _, dtype, m in types),
      **params,
    )
    grads = _replaced(grads, linear, outs)
  return [None, None, *grads]


ad.primitive_jvps[_map_p] = _jvp
ad.primitive_transposes[_map_p] = _transpose
compat.mlir.register_lowering(_map_p, compat.lower_local(_apply))
compat.mlir.register_lowering(_map_p, compat.lower_local(_apply_on_cpu), "cpu")
