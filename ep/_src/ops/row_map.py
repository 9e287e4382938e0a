# SPDX-License-Identifier: Apache-2.0
"""Applies a function to the used rows of arrays, not to their whole capacity.

A receive buffer has the capacity for the worst routing, but usually only few of
its rows are used. `map_used_rows` and its derivatives read and write only the
blocks of used rows, in a loop on CPUs. GPUs and TPUs compute all rows.

The functions bind one primitive, whose parameter is a function of blocks. The
tangent is the same primitive with the tangent function; the transpose has the
transposed function. So derivatives of all orders exist, in both modes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from ep._src.base import compat, contexts
from ep._src.base.arrays import cut, expanded, read_rows, TAILS, write_rows
from ep._src.base.compat import ad
from ep._src.lax import primitive
from ep._src.native import ffi

# The rows of a block. Larger blocks are not faster. An array of fewer rows is
# one smaller block, which may round differently; deterministic layers have only
# larger arrays (moe/config.py).
HEIGHT = 128


def map_used_rows(
  fn: Callable[..., Any],
  group_sizes: jax.Array,
  *arrays: jax.Array,
  is_padding: jax.Array | None = None,
  tail: str = "unspecified",
) -> Any:
  """Returns `fn(*arrays)`, where `fn` maps each row independently.

  Differentiable in the arrays, in both modes, to any order. Rows after the last
  slab, even NaNs, affect no other row, in results and derivatives. With
  `tail="unspecified"` rows after the last used block are neither read nor
  written, and the unused rows of that block are unspecified.

  Args:
    fn: maps blocks [B, ...] of each array, for any B, to one array [B, ...] or
      a sequence of them. If `fn` is a new function object in each call, an
      eager call compiles each time. If `fn` closes over traced values, it is
      applied to the whole arrays instead, which takes longer.
    group_sizes: int32 [L], rows of slabs, of a sum up to C.
    *arrays: [C, ...].
    is_padding: int32 [C], 1 for the rows that pad a slab, or None if no row
      does. `fn` reads zeros from these rows. Results, tangents and gradients
      are zero there, even if the value or a derivative of `fn` at 0 is not
      finite.
    tail: the rows of results, tangents and gradients after the last slab:
      "zero" or "unspecified".

  Returns:
    The results of `fn`, with C rows instead of B.
  """
  num_used = group_sizes.sum(dtype=jnp.int32)
  blocks = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
  traced, types = jax.make_jaxpr(fn, return_shape=True)(*blocks)
  if any(isinstance(c, jax.core.Tracer) for c in traced.consts):
    return _map_all_rows(fn, num_used, is_padding, arrays)
  flat: Callable[..., Any] = _Flat(fn)
  if is_padding is not None:
    arrays = is_padding, *arrays
    flat = _OfTokens(flat)
  num_used, *arrays = compat.vary_together(num_used, *arrays)
  outs = _map_p.bind(num_used, *arrays, fn=flat, tail=contexts.tail(tail))
  return jax.tree.unflatten(jax.tree.structure(types), outs)


def _map_all_rows(
  fn: Callable[..., Any],
  num_used: jax.Array,
  is_padding: jax.Array | None,
  arrays: Sequence[jax.Array],
) -> Any:
  """Applies `fn` to all C rows; results are zero in rows without a token.

  The gradient of a value over which `fn` closes is a sum over all C rows. So
  rows without a token read the first row, where `fn` is as finite as in other
  rows. The first row has a token, unless no row has one.
  """
  is_token = lax.iota(jnp.int32, arrays[0].shape[0]) < num_used
  if is_padding is not None:
    is_token &= is_padding == 0

  def with_tokens(x: jax.Array, others: jax.Array | int) -> jax.Array:
    return jnp.where(expanded(is_token, x.ndim), x, others)

  def read(x: jax.Array) -> jax.Array:
    first = lax.stop_gradient(x[:1])
    return with_tokens(x, jnp.where(is_token[:1].any(), first, 1))

  outs = fn(*map(read, arrays))
  return jax.tree.map(lambda x: with_tokens(x, 0), outs)


def weighted(rows: jax.Array, weights: jax.Array) -> jax.Array:
  """Returns rows [B, H] times weights [B], multiplied in float32."""
  products = weights[:, None] * rows.astype(jnp.float32)
  return products.astype(rows.dtype)


# The functions that are parameters of the primitive are dataclasses, which
# compare by value, because JAX's caches compare parameters.


@dataclasses.dataclass(frozen=True)
class _Flat:
  """The function `fn`, with its result flattened to a list."""

  fn: Callable[..., Any]

  def __call__(self, *blocks: jax.Array) -> list[jax.Array]:
    return jax.tree.leaves(self.fn(*blocks))


@dataclasses.dataclass(frozen=True)
class _OfTokens:
  """The function `fn`, with constant zeros as operands and results in padding.

  The zero operands make gradients of `fn` zero in padding rows, even if a
  derivative is infinite; the zero results keep NaNs out of matrix gradients.
  """

  fn: Callable[..., Any]

  def __call__(self, is_padding: jax.Array, *blocks: jax.Array) -> Any:
    def masked(arrays: Sequence[jax.Array]) -> list[jax.Array]:
      return [jnp.where(expanded(is_padding > 0, x.ndim), 0, x) for x in arrays]

    return masked(self.fn(*masked(blocks)))


@dataclasses.dataclass(frozen=True)
class _Tangent:
  """The tangent of `fn`: maps blocks and tangents of the `active` blocks."""

  fn: Callable[..., Any]
  active: tuple[int, ...]

  def __call__(self, *blocks_and_tangents: jax.Array) -> Any:
    split = len(blocks_and_tangents) - len(self.active)
    blocks, tangents = blocks_and_tangents[:split], blocks_and_tangents[split:]

    def of_active(*values: jax.Array) -> Any:
      return self.fn(*_replaced(blocks, self.active, values))

    values = tuple(blocks[i] for i in self.active)
    return jax.jvp(of_active, values, tangents)[1]


@dataclasses.dataclass(frozen=True)
class _Transposed:
  """The transpose of `fn`: a function of nonlinear operands and cotangents.

  `fn` is linear in the operands `linear`, which have rows of `types`. Only the
  cotangents `present` are not symbolic zeros.
  """

  fn: Callable[..., Any]
  linear: tuple[int, ...]
  types: tuple[tuple[tuple[int, ...], Any], ...]
  present: tuple[int, ...]

  def __call__(self, *others_and_cts: jax.Array) -> list[jax.Array]:
    split = len(others_and_cts) - len(self.present)
    others, cts = others_and_cts[:split], others_and_cts[split:]

    def of_linear(*values: jax.Array) -> list[jax.Array]:
      blocks = list(others)
      for i, value in zip(self.linear, values, strict=True):
        blocks.insert(i, value)
      outs = self.fn(*blocks)
      return [outs[i] for i in self.present]

    height = cts[0].shape[0]
    blocks = [
      jax.ShapeDtypeStruct((height, *shape), dtype)
      for shape, dtype in self.types
    ]
    return list(jax.linear_transpose(of_linear, *blocks)(list(cts)))


def _replaced(
  values: Sequence[Any], places: Sequence[int], new: Sequence[Any]
) -> list[Any]:
  values = list(values)
  for i, value in zip(places, new, strict=True):
    values[i] = value
  return values


def _apply_to_all_rows(
  num_used: jax.Array, *arrays: jax.Array, fn: Callable[..., Any], tail: str
) -> list[jax.Array]:
  return [cut(out, num_used, tail) for out in fn(*arrays)]


def _lower_on_cpu(ctx: Any, *operands: Any, **params: Any) -> Any:
  apply: Callable[..., Any] = _apply_to_all_rows  # one block needs no loop
  if ctx.avals_in[1].shape[0] > HEIGHT:
    apply = functools.partial(_apply_by_blocks, is_native=ffi.is_native(ctx))
  return compat.lower_local(apply)(ctx, *operands, **params)


def _apply_by_blocks(
  num_used: jax.Array,
  *arrays: jax.Array,
  fn: Callable[..., Any],
  tail: str,
  is_native: bool,
) -> list[jax.Array]:
  """Fills the blocks of used rows, in a loop on XLA:CPU.

  The native library has two operations that XLA:CPU lacks:

    * an uninitialized array. XLA:CPU fills a new array with zeros, which takes
      time and memory for all pages, also for pages without used rows.
    * a bitcast of the used rows of an array. The loop accesses 16-bit floats as
      integers, because XLA:CPU would convert the whole array to float32 in each
      step. XLA's bitcast copies all rows.

  Without the library, or for another process, XLA's operations replace them.
  """
  num_rows = arrays[0].shape[0]

  def retyped(x: jax.Array, dtype: jnp.dtype, count: jax.Array) -> jax.Array:
    """Returns an array whose first `count` rows have the bits of `x`."""
    if x.dtype == dtype or not is_native:
      return lax.bitcast_convert_type(x, dtype)
    result = jax.ShapeDtypeStruct(x.shape, dtype)
    return jax.ffi.ffi_call("ep_retyped", result)(x, count)

  def new(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    if tail != "unspecified" or not is_native:
      filled = jnp.full(shape, TAILS[tail], dtype)
      return lax.bitcast_convert_type(filled, _bits(dtype))
    result = jax.ShapeDtypeStruct(shape, _bits(dtype))
    # Without a side effect, XLA would hoist the array out of a scan over
    # layers, and copy the array in each layer.
    return jax.ffi.ffi_call("ep_unwritten", result, has_side_effect=True)()

  def step(i: jax.Array, outs: list[jax.Array]) -> list[jax.Array]:
    start = jnp.minimum(i * HEIGHT, num_rows - HEIGHT)
    blocks = [
      lax.bitcast_convert_type(read_rows(x, start, HEIGHT), array.dtype)
      for x, array in zip(operands, arrays, strict=True)
    ]
    rows = (cut(y, num_used - start, tail) for y in fn(*blocks))
    return [
      write_rows(out, lax.bitcast_convert_type(y, out.dtype), start)
      for out, y in zip(outs, rows, strict=True)
    ]

  types = jax.eval_shape(fn, *arrays)
  operands = [retyped(x, _bits(x.dtype), num_used) for x in arrays]
  outs = [new(t.shape, t.dtype) for t in types]
  num_blocks = lax.div(num_used + (HEIGHT - 1), jnp.int32(HEIGHT))
  outs = lax.fori_loop(0, num_blocks, step, outs)
  written = num_used if tail == "unspecified" else jnp.int32(num_rows)
  return [
    retyped(out, t.dtype, written) for out, t in zip(outs, types, strict=True)
  ]


def _bits(dtype: jnp.dtype) -> jnp.dtype:
  """Returns the type of the bits of 16-bit floats, and other types as is."""
  is_short = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
  return jnp.dtype(f"uint{8 * dtype.itemsize}") if is_short else dtype


def _types(
  num_used: Any, *arrays: Any, fn: Callable[..., Any], tail: str
) -> list[Any]:
  del num_used, tail
  blocks = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
  return [
    compat.out_aval(t.shape, t.dtype, arrays[0])
    for t in jax.eval_shape(fn, *blocks)
  ]


def _jvp(
  primals: Sequence[Any],
  tangents: Sequence[Any],
  *,
  fn: Callable[..., Any],
  tail: str,
) -> tuple[list[Any], list[Any]]:
  outs = _map_p.bind(*primals, fn=fn, tail=tail)
  tangents = tangents[1:]
  active = tuple(i for i, t in enumerate(tangents) if type(t) is not ad.Zero)
  out_tangents = _map_p.bind(
    *primals,
    *(tangents[i] for i in active),
    fn=_Tangent(fn, active),
    tail=tail,
  )
  return outs, out_tangents


def _transpose(
  cts: Sequence[Any],
  num_used: Any,
  *arrays: Any,
  fn: Callable[..., Any],
  tail: str,
) -> list[Any]:
  linear = tuple(i for i, x in enumerate(arrays) if ad.is_undefined_primal(x))
  present = tuple(i for i, ct in enumerate(cts) if type(ct) is not ad.Zero)
  grads = [None] * len(arrays)
  if present:
    avals = [arrays[i].aval for i in linear]
    outs = _map_p.bind(
      num_used,
      *(x for x in arrays if not ad.is_undefined_primal(x)),
      *(cts[i] for i in present),
      fn=_Transposed(
        fn, linear, tuple((a.shape[1:], a.dtype) for a in avals), present
      ),
      tail=tail,
    )
    grads = _replaced(grads, linear, outs)
  return [None, *grads]


_map_p = primitive.new(
  "ep_map_used_rows",
  _types,
  compat.lower_local(_apply_to_all_rows),
  cpu=_lower_on_cpu,
  static=["fn", "tail"],
)
ad.primitive_jvps[_map_p] = _jvp
ad.primitive_transposes[_map_p] = _transpose
