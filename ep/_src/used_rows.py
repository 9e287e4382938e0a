# SPDX-License-Identifier: Apache-2.0
"""Applies a function to the used rows of arrays, not to all of their capacity.

A rank's receive buffer is as large as the worst routing needs, and the rows
that came are usually few of it. An activation of whole arrays would read and
write all of that memory. On CPUs `map_used_rows` goes over blocks of rows and
ends with the last used one, and so do its derivatives.

The primitive has a function of blocks as its parameter. Its tangent is the same
primitive with the tangent function, and its transpose the same one with the
transposed function, so derivatives of all orders, in both modes, exist.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from ep._src import checked, compat, row_buffers
from ep._src.batching import batch_sequentially
from ep._src.compat import ad

_HEIGHT = 256  # rows of a block; from 128 to 1024 it makes no difference


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
  blocks = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
  traced, structure = jax.make_jaxpr(fn, return_shape=True)(*blocks)
  if any(isinstance(c, jax.core.Tracer) for c in traced.consts):
    num_used = group_sizes.sum()
    outs = fn(*(cut(x, num_used) for x in arrays))
    return jax.tree.map(lambda x: cut(x, num_used), outs)
  operands = compat.vary_together(group_sizes, *arrays)
  outs = _map_p.bind(*operands, fn=_Flat(fn), tail=checked.tail(tail))
  return jax.tree.unflatten(jax.tree.structure(structure), outs)


def cut(rows: jax.Array, num_used: jax.Array, tail: str = "zero") -> jax.Array:
  """Returns the rows, with a tail of zeros, NaNs, or as it is."""
  if tail == "unspecified":
    return rows
  value = {"zero": 0, "nan": jnp.nan}[tail]
  used = jnp.arange(rows.shape[0]) < num_used
  return jnp.where(used.reshape(-1, *[1] * (rows.ndim - 1)), rows, value)


# The functions that are parameters are values, which are equal if their parts
# are, because JAX's caches compare them.


@dataclasses.dataclass(frozen=True)
class _Flat:
  """The function that returns the leaves of what `fn` returns."""

  fn: Callable[..., Any]

  def __call__(self, *blocks):
    return jax.tree.leaves(self.fn(*blocks))


@dataclasses.dataclass(frozen=True)
class _Tangent:
  """A function of blocks, and of tangents of the `moving` ones."""

  fn: Callable[..., Any]
  moving: tuple[int, ...]

  def __call__(self, *blocks_and_tangents):
    split = len(blocks_and_tangents) - len(self.moving)
    blocks, tangents = blocks_and_tangents[:split], blocks_and_tangents[split:]

    def of_moving(*values):
      return self.fn(*_replaced(blocks, self.moving, values))

    values = tuple(blocks[i] for i in self.moving)
    return jax.jvp(of_moving, values, tangents)[1]


@dataclasses.dataclass(frozen=True)
class _Transposed:
  """A function of the other blocks, and of the `present` cotangents.

  `fn` is linear in the operands `linear`, whose rows have the shapes and dtypes
  `rows`.
  """

  fn: Callable[..., Any]
  linear: tuple[int, ...]
  rows: tuple[tuple[tuple[int, ...], Any], ...]
  present: tuple[int, ...]

  def __call__(self, *others_and_cts):
    split = len(others_and_cts) - len(self.present)
    others, cts = others_and_cts[:split], others_and_cts[split:]
    height = others_and_cts[0].shape[0]

    def of_linear(*values):
      blocks = list(others)
      for i, value in zip(self.linear, values, strict=True):
        blocks.insert(i, value)
      outs = self.fn(*blocks)
      return [outs[i] for i in self.present]

    blocks = [jax.ShapeDtypeStruct((height, *s), d) for s, d in self.rows]
    return list(jax.linear_transpose(of_linear, *blocks)(list(cts)))


def _replaced(values, places, new):
  values = list(values)
  for i, value in zip(places, new, strict=True):
    values[i] = value
  return values


def _apply(group_sizes, *arrays, fn, tail):
  return [cut(x, group_sizes.sum(), tail) for x in fn(*arrays)]


def _apply_by_blocks(group_sizes, *arrays, fn, tail):
  num_used = group_sizes.sum(dtype=jnp.int32)
  num_rows = arrays[0].shape[0]
  height = min(_HEIGHT, num_rows)
  readers = [row_buffers.Reader(x, num_used) for x in arrays]

  def step(i, outs):
    start = jnp.minimum(i * height, num_rows - height)
    blocks = [read(start, height) for read in readers]
    inside = None
    if tail != "unspecified":
      inside = start + jnp.arange(height) < num_used
    return [
      row_buffers.write(out, rows, start, inside)
      for out, rows in zip(outs, fn(*blocks), strict=True)
    ]

  types = jax.eval_shape(fn, *arrays)
  outs = [row_buffers.new(t.shape, t.dtype, tail) for t in types]
  num_blocks = lax.div(num_used + (height - 1), jnp.int32(height))
  outs = lax.fori_loop(0, num_blocks, step, outs)
  return [
    row_buffers.finish(out, t.dtype, num_used, tail)
    for out, t in zip(outs, types, strict=True)
  ]


_map_p = compat.Primitive("ep_map_used_rows")
_map_p.multiple_results = True
compat.compile_eager(_map_p, ["fn", "tail"])
batch_sequentially(_map_p)


@_map_p.def_abstract_eval
def _types(group_sizes, *avals, fn, tail):
  del group_sizes, tail
  blocks = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]
  outs = jax.eval_shape(fn, *blocks)
  return [compat.out_aval(o.shape, o.dtype, avals[0]) for o in outs]


def _jvp(primals, tangents, *, fn, tail):
  outs = _map_p.bind(*primals, fn=fn, tail=tail)
  tangents = tangents[1:]
  moving = tuple(i for i, t in enumerate(tangents) if type(t) is not ad.Zero)
  out_tangents = _map_p.bind(
    *primals,
    *(tangents[i] for i in moving),
    fn=_Tangent(fn, moving),
    tail=tail,
  )
  return outs, out_tangents


def _transpose(cts, group_sizes, *arrays, fn, tail):
  linear = tuple(i for i, x in enumerate(arrays) if ad.is_undefined_primal(x))
  present = tuple(i for i, ct in enumerate(cts) if type(ct) is not ad.Zero)
  grads = [None] * len(arrays)
  if present:
    rows = tuple(
      (arrays[i].aval.shape[1:], arrays[i].aval.dtype) for i in linear
    )
    others = (x for i, x in enumerate(arrays) if i not in linear)
    outs = _map_p.bind(
      group_sizes,
      *others,
      *(cts[i] for i in present),
      fn=_Transposed(fn, linear, rows, present),
      tail=tail,
    )
    grads = _replaced(grads, linear, outs)
  return [None, *grads]


ad.primitive_jvps[_map_p] = _jvp
ad.primitive_transposes[_map_p] = _transpose
compat.mlir.register_lowering(_map_p, compat.lower_local(_apply))
compat.mlir.register_lowering(
  _map_p, compat.lower_local(_apply_by_blocks), "cpu"
)
