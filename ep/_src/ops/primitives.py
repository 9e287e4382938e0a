# SPDX-License-Identifier: Apache-2.0
"""Makes the JAX primitives of the ops, and declares their linearity.

Each primitive has one parameter, the frozen `Sizes`. Its operands are the
arrays of one rank. A *mover* is an op that sends rows. Its operands are the
handle's `mem` and `group_sizes`, then arrays `xs`, in which it is linear.
`linear_op` declares its transpose. JAX then has forward mode, reverse mode,
their compositions and `jax.checkpoint`; a `custom_vjp` has no forward mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
from typing import Any

import jax
import jax.numpy as jnp

from ep._src.base import compat
from ep._src.base.compat import ad
from ep._src.base.group import Sizes
from ep._src.lax import primitive
from ep._src.ops import fp8_transport

OutTypes = Callable[..., Sequence[jax.ShapeDtypeStruct]]


def op(name: str, out_types: OutTypes) -> compat.Primitive:
  """Makes the primitive `name`, which the group's connection lowers.

  `out_types(sizes, *operands)` returns shapes and dtypes of the outputs.
  """

  def lower(ctx: Any, *operands: Any, sizes: Sizes) -> Any:
    return sizes.connection.lower(name, ctx, *operands, sizes=sizes)

  return _new(name, out_types, lower)


def row_types(to_slots: bool, with_weights: bool = False) -> OutTypes:
  """Returns the types of an op that sends rows [C, H] to slots, or back.

  Without `to_slots` the op returns rows [T, H]. With weights, the op also
  returns weights [C], or [T, K].
  """

  def types(
    sizes: Sizes, mem: Any, group_sizes: Any, rows: Any, *others: Any
  ) -> list[jax.ShapeDtypeStruct]:
    del mem, group_sizes, others
    shape = (sizes.C,) if to_slots else (sizes.T, sizes.K)
    outs = [jax.ShapeDtypeStruct((shape[0], rows.shape[1]), rows.dtype)]
    if with_weights:
      outs.append(jax.ShapeDtypeStruct(shape, jnp.float32))
    return outs

  return types


def mover(
  name: str,
  *,
  to_slots: bool,
  with_weights: bool = False,
  target: str | None = None,
  of_bytes: compat.Primitive | None = None,
) -> compat.Primitive:
  """Makes the primitive of an op that sends rows `xs[0]`, and optional weights.

  Args:
    name: the name of the primitive; its operands are `(mem, group_sizes, *xs)`.
    to_slots: whether the op sends rows of tokens to slots; if not, rows of
      slots to tokens.
    with_weights: whether the op also returns weights.
    target: the name by which the connection lowers the op; None is `name`.
    of_bytes: the same op for packed fp8 rows, for layers with a `wire` format.
  """

  def lower(
    ctx: Any, mem: Any, group_sizes: Any, *xs: Any, sizes: Sizes
  ) -> Any:
    if of_bytes is not None and sizes.wire is not None:
      send = functools.partial(fp8_transport.send, of_bytes, sizes)
      return compat.lower_local(send)(ctx, mem, group_sizes, *xs)
    of_mem, _, *of_xs = ctx.avals_in
    ctx = ctx.replace(avals_in=[of_mem, *of_xs])
    lower_op = sizes.connection.lower
    return lower_op(target or name, ctx, mem, *xs, sizes=sizes)

  return _new(name, row_types(to_slots, with_weights), lower)


def composite(
  name: str, fn: Callable[..., Sequence[jax.Array]], out_types: OutTypes
) -> compat.Primitive:
  """Makes a primitive of a function `fn(*operands, sizes=...)` that calls ops.

  The collectives of `fn` get the named scope `name`. The caller declares the
  derivatives.
  """
  return _new(name, out_types, compat.lower_local(jax.named_scope(name)(fn)))


def _new(
  name: str, out_types: OutTypes, lower: Callable[..., Any]
) -> compat.Primitive:
  def types(*avals: Any, sizes: Sizes) -> list[Any]:
    outs = out_types(sizes, *avals)
    return [compat.out_aval(o.shape, o.dtype, avals[0]) for o in outs]

  # Lowering gives each op a unique position, so JAX must not cache lowerings.
  return primitive.new(name, types, lower, cacheable=False)


def bind(
  primitive: compat.Primitive, sizes: Sizes, *operands: jax.Array
) -> list[jax.Array]:
  """Binds the primitive of an op to the arrays of one rank."""
  if not sizes.connection.is_open:
    sizes.connection.check_open(primitive.name)
  axes = [sizes.group.axis_name]
  operands = compat.vary_together(*operands, axes=axes)
  outs: list[jax.Array] = primitive.bind(*operands, sizes=sizes)
  return outs


def linear_op(
  primitive: compat.Primitive, transposed: compat.Primitive
) -> None:
  """Declares that a mover is linear in its operands `xs`.

  The transpose of the mover is `transposed(mem, group_sizes, *cts)`.
  """

  def jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, sizes: Sizes
  ) -> tuple[list[Any], list[Any]]:
    mem, group_sizes, *_ = primals
    ts = map(compat.instantiate_zeros, tangents[2:])
    return (
      primitive.bind(*primals, sizes=sizes),
      primitive.bind(mem, group_sizes, *ts, sizes=sizes),
    )

  def transpose(
    cts: Sequence[Any], mem: Any, group_sizes: Any, *_: Any, sizes: Sizes
  ) -> list[Any]:
    cts = [*map(compat.instantiate_zeros, cts)]
    return [None, None, *bind(transposed, sizes, mem, group_sizes, *cts)]

  ad.primitive_jvps[primitive] = jvp
  ad.primitive_transposes[primitive] = transpose
