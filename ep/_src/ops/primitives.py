# SPDX-License-Identifier: Apache-2.0
"""Turns an op into a JAX primitive, and states what it is linear in.

A primitive has one parameter: the frozen `OpParams`. Its operands are arrays of
one rank. For a mover these are first the handle's `mem` and `group_sizes`, then
what it is linear in. Linearity is all that JAX needs to know: `linear_op`
states the transpose, and forward mode, reverse mode, their compositions and
`jax.checkpoint` follow. (A `custom_vjp` would lose forward mode and add
nothing.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax

from ep._src.base import compat, primitive
from ep._src.base.backend import OpParams
from ep._src.base.compat import ad
from ep._src.ops import wire

OutTypes = Callable[..., Sequence[jax.ShapeDtypeStruct]]


def op(name: str, out_types: OutTypes) -> compat.Primitive:
  """Makes the primitive `name`, which the group's connection lowers.

  `out_types(params, *operands)` returns shapes and dtypes of the outputs.
  """

  def lower(ctx, *operands, params: OpParams):
    return params.connection.lower(name, ctx, *operands, params=params)

  return _new(name, out_types, lower)


def mover(
  name: str,
  out_types: OutTypes,
  *,
  target: str | None = None,
  of_bytes: compat.Primitive | None = None,
) -> compat.Primitive:
  """Makes the primitive of an op that moves rows `xs[0]`, and perhaps weights.

  Its operands are `(mem, group_sizes, *xs)`. `out_types(params, *xs)` returns
  shapes and dtypes of the outputs; `target` is the connection's name of the op,
  by default the same. `of_bytes` moves rows of bytes as this one moves those of
  floats: it takes them if the layer has a `wire`.
  """

  def types(params: OpParams, mem, group_sizes, *xs):
    del mem, group_sizes
    return out_types(params, *xs)

  def lower(ctx, mem, group_sizes, *xs, params: OpParams):
    format = params.layer.wire
    if of_bytes is not None and format is not None:
      move = functools.partial(wire.move, of_bytes, format, params)
      return compat.lower_local(move)(ctx, mem, group_sizes, *xs)
    of_mem, _, *of_xs = ctx.avals_in
    ctx = ctx.replace(avals_in=[of_mem, *of_xs])
    lower_op = params.connection.lower
    return lower_op(target or name, ctx, mem, *xs, params=params)

  return _new(name, types, lower)


def of_rank(
  name: str,
  out_types: OutTypes,
  fn: Callable[..., Sequence[jax.Array]],
) -> compat.Primitive:
  """Makes a primitive of `fn(params, *operands)`, which has no derivative.

  `fn` works on the arrays of a rank and may call collectives, which have the
  scope `name`.
  """

  def lower(ctx, *operands, params: OpParams):
    scoped = jax.named_scope(name)(functools.partial(fn, params))
    return compat.lower_local(scoped)(ctx, *operands)

  return _new(name, out_types, lower)


def composite(
  name: str, fn: Callable[..., Sequence[jax.Array]]
) -> compat.Primitive:
  """Makes a primitive of a function of ops; the caller adds its rules."""

  def out_types(params: OpParams, *avals):
    return jax.eval_shape(functools.partial(fn, params=params), *avals)

  return _new(name, out_types, compat.mlir.lower_fun(fn, multiple_results=True))


def _new(
  name: str, out_types: OutTypes, lower: Callable[..., Any]
) -> compat.Primitive:
  def types(*avals, params: OpParams):
    outs = out_types(params, *avals)
    return [compat.out_aval(o.shape, o.dtype, avals[0]) for o in outs]

  # Not cacheable: each op of a program has its own position in it.
  return primitive.new(name, types, lower, cacheable=False)


def bind(
  primitive: compat.Primitive, params: OpParams, *operands: jax.Array
) -> list[jax.Array]:
  """Applies an op in the local view."""
  params.connection.check_open(primitive.name)
  operands = compat.vary_together(
    *operands, axes=[params.layer.group.axis_name]
  )
  return primitive.bind(*operands, params=params)


def linear_op(
  primitive: compat.Primitive, transposed: compat.Primitive
) -> None:
  """Declares that a mover is linear in `xs`.

  Its transpose, for the same routing, is `transposed(mem, group_sizes, *cts)`.
  """

  def jvp(primals, tangents, *, params: OpParams):
    mem, group_sizes, *_ = primals
    ts = map(compat.instantiate_zeros, tangents[2:])
    return (
      primitive.bind(*primals, params=params),
      primitive.bind(mem, group_sizes, *ts, params=params),
    )

  def transpose(cts, mem, group_sizes, *_, params: OpParams) -> list[Any]:
    cts = map(compat.instantiate_zeros, cts)
    return [None, None, *bind(transposed, params, mem, group_sizes, *cts)]

  ad.primitive_jvps[primitive] = jvp
  ad.primitive_transposes[primitive] = transpose
