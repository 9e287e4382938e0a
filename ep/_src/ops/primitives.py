# SPDX-License-Identifier: Apache-2.0
"""Makes the JAX primitives of the ops, and declares their linearity.

Each primitive has one parameter, the frozen `OpParams`. Its operands are the
arrays of one rank. The operands of a mover are the handle's `mem` and
`group_sizes`, then the operands in which it is linear. `linear_op` declares the
transpose. From it JAX derives forward mode, reverse mode, their compositions
and `jax.checkpoint`; a `custom_vjp` would have no forward mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax

from ep._src.base import compat, primitive
from ep._src.base.backend import OpParams
from ep._src.base.compat import ad
from ep._src.ops import fp8_transport

OutTypes = Callable[..., Sequence[jax.ShapeDtypeStruct]]


def op(name: str, out_types: OutTypes) -> compat.Primitive:
  """Makes the primitive `name`, which the group's connection lowers.

  `out_types(params, *operands)` returns shapes and dtypes of the outputs.
  """

  def lower(ctx: Any, *operands: Any, params: OpParams) -> Any:
    return params.connection.lower(name, ctx, *operands, params=params)

  return _new(name, out_types, lower)


def mover(
  name: str,
  out_types: OutTypes,
  *,
  target: str | None = None,
  of_bytes: compat.Primitive | None = None,
) -> compat.Primitive:
  """Makes the primitive of an op that sends rows `xs[0]`, perhaps with weights.

  Args:
    name: the name of the primitive; its operands are `(mem, group_sizes, *xs)`.
    out_types: `out_types(params, *xs)` returns the types of the outputs.
    target: the connection's name of the op; None is `name`.
    of_bytes: the same op for packed rows; a layer with a `wire` uses it.
  """

  def types(
    params: OpParams, mem: Any, group_sizes: Any, *xs: Any
  ) -> Sequence[jax.ShapeDtypeStruct]:
    del mem, group_sizes
    return out_types(params, *xs)

  def lower(
    ctx: Any, mem: Any, group_sizes: Any, *xs: Any, params: OpParams
  ) -> Any:
    format = params.layer.wire
    if of_bytes is not None and format is not None:
      send = functools.partial(fp8_transport.send, of_bytes, format, params)
      return compat.lower_local(send)(ctx, mem, group_sizes, *xs)
    of_mem, _, *of_xs = ctx.avals_in
    ctx = ctx.replace(avals_in=[of_mem, *of_xs])
    lower_op = params.connection.lower
    return lower_op(target or name, ctx, mem, *xs, params=params)

  return _new(name, types, lower)


def composite(
  name: str,
  fn: Callable[..., Sequence[jax.Array]],
  out_types: OutTypes | None = None,
) -> compat.Primitive:
  """Makes a primitive of `fn(*operands, params)`, a function of ops.

  The collectives of `fn` have the scope `name`. The caller adds derivatives.
  Without `out_types`, JAX derives the output types from `fn`.
  """

  def derived(params: OpParams, *avals: Any) -> Any:
    return jax.eval_shape(functools.partial(fn, params=params), *avals)

  lower = compat.lower_local(jax.named_scope(name)(fn))
  return _new(name, out_types or derived, lower)


def _new(
  name: str, out_types: OutTypes, lower: Callable[..., Any]
) -> compat.Primitive:
  def types(*avals: Any, params: OpParams) -> list[Any]:
    outs = out_types(params, *avals)
    return [compat.out_aval(o.shape, o.dtype, avals[0]) for o in outs]

  # Each op has its own position in a program, so JAX must not cache lowerings.
  return primitive.new(name, types, lower, cacheable=False)


def bind(
  primitive: compat.Primitive, params: OpParams, *operands: jax.Array
) -> list[jax.Array]:
  """Applies an op in the local view."""
  params.connection.check_open(primitive.name)
  operands = compat.vary_together(
    *operands, axes=[params.layer.group.axis_name]
  )
  outs: list[jax.Array] = primitive.bind(*operands, params=params)
  return outs


def linear_op(
  primitive: compat.Primitive, transposed: compat.Primitive
) -> None:
  """Declares that a mover is linear in `xs`.

  Its transpose, for the same routing, is `transposed(mem, group_sizes, *cts)`.
  """

  def jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, params: OpParams
  ) -> tuple[list[Any], list[Any]]:
    mem, group_sizes, *_ = primals
    ts = map(compat.instantiate_zeros, tangents[2:])
    return (
      primitive.bind(*primals, params=params),
      primitive.bind(mem, group_sizes, *ts, params=params),
    )

  def transpose(
    cts: Sequence[Any], mem: Any, group_sizes: Any, *_: Any, params: OpParams
  ) -> list[Any]:
    cts = [*map(compat.instantiate_zeros, cts)]
    return [None, None, *bind(transposed, params, mem, group_sizes, *cts)]

  ad.primitive_jvps[primitive] = jvp
  ad.primitive_transposes[primitive] = transpose
