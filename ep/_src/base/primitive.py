# SPDX-License-Identifier: Apache-2.0
"""Makes JAX primitives of ops with frozen parameters.

An op is a primitive whose first operand is the routing (`mem`, or for prepare
the ids themselves) and whose other operands it is linear in. Linearity is all
that JAX needs to know: `linear_op` states the transpose, and forward mode,
reverse mode, their compositions and `jax.checkpoint` follow. (A `custom_vjp`
would lose forward mode and add nothing.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax

from ep._src.base import compat
from ep._src.base.backend import OpParams
from ep._src.base.batching import batch_sequentially
from ep._src.base.compat import ad


def op(
  name: str,
  out_types: Callable[..., Sequence[jax.ShapeDtypeStruct]],
  target: str | None = None,
) -> compat.Primitive:
  """Makes the primitive `name`, which the group's connection lowers.

  `out_types(params, *operands)` returns shapes and dtypes of the outputs;
  `target` is the connection's name of the op, by default the same.
  """

  def lower(ctx, *operands, params: OpParams):
    lower_op = params.connection.lower
    return lower_op(target or name, ctx, *operands, params=params)

  return _primitive(name, out_types, lower)


def of_rank(
  name: str,
  out_types: Callable[..., Sequence[jax.ShapeDtypeStruct]],
  fn: Callable[..., Sequence[jax.Array]],
) -> compat.Primitive:
  """Makes a primitive of `fn(params, *operands)`, which has no derivative.

  `fn` works on the arrays of a rank and may call collectives, which have the
  scope `name`.
  """

  def lower(ctx, *operands, params: OpParams):
    scoped = jax.named_scope(name)(functools.partial(fn, params))
    return compat.lower_local(scoped)(ctx, *operands)

  return _primitive(name, out_types, lower)


def _primitive(
  name: str,
  out_types: Callable[..., Sequence[jax.ShapeDtypeStruct]],
  lower: Callable[..., Any],
) -> compat.Primitive:
  primitive = compat.Primitive(name)
  primitive.multiple_results = True

  @primitive.def_abstract_eval
  def _(*avals, params: OpParams):
    outs = out_types(params, *avals)
    return [compat.out_aval(o.shape, o.dtype, avals[0]) for o in outs]

  # Not cacheable: each op of a program has its own position in it.
  compat.mlir.register_lowering(primitive, lower, cacheable=False)
  batch_sequentially(primitive)
  return primitive


def composite(
  name: str, fn: Callable[..., Sequence[jax.Array]]
) -> compat.Primitive:
  """Makes a primitive of a function of ops; the caller adds its rules."""
  primitive = compat.Primitive(name)
  primitive.multiple_results = True
  primitive.def_abstract_eval(
    lambda *avals, params: [
      compat.out_aval(o.shape, o.dtype, avals[1])
      for o in jax.eval_shape(functools.partial(fn, params=params), *avals)
    ]
  )
  compat.mlir.register_lowering(
    primitive,
    compat.mlir.lower_fun(fn, multiple_results=True),
    cacheable=False,
  )
  batch_sequentially(primitive)
  return primitive


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
  """Declares that `primitive(mem, *xs)` is linear in `xs`.

  Its transpose, for the same `mem`, is `transposed(mem, *cts)`.
  """

  def jvp(primals, tangents, *, params: OpParams):
    mem, *xs = primals
    ts = map(compat.instantiate_zeros, tangents[1:])
    return (
      primitive.bind(mem, *xs, params=params),
      primitive.bind(mem, *ts, params=params),
    )

  def transpose(cts, mem, *xs, params: OpParams) -> list[Any]:
    del xs
    cts = map(compat.instantiate_zeros, cts)
    return [None, *bind(transposed, params, mem, *cts)]

  ad.primitive_jvps[primitive] = jvp
  ad.primitive_transposes[primitive] = transpose
