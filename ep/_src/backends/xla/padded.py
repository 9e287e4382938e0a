# SPDX-License-Identifier: Apache-2.0
"""backend="xla": sends rows in buckets, on CPUs and in domains of one rank.

The rows from rank s to rank d are a *stream*: the slices for the experts of d,
in their order. Each rank sends a bucket of B rows to each rank, where B is the
largest length of a stream, in one all-to-all. A *code* identifies a row: on the
receiver, `s * B + i` is the i-th row of the stream from rank s.

All arrays of an op share one exchange. Rows are sent as integers, so that the
CPU flushes no denormal and changes no NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np

from ep._src.backends.xla.plans import div, Plan, sources, take
from ep._src.base.arrays import iota
from ep._src.base.group import Sizes


def to_slots(
  sizes: Sizes, plan: Plan, is_sound: jax.Array, *arrays: jax.Array
) -> list[jax.Array]:
  """Sends rows to slots [C], from arrays as in `plans.sources`.

  All results of a rank where `is_sound` is False are NaN.
  """
  sent = plan.choices.start[:: sizes.L, None] + iota(_bucket(sizes))[None]
  at = [take(x, sent.reshape(-1)) for x in sources(sizes, plan, len(arrays))]
  filler = jnp.zeros(sizes.C, bool)
  if sizes.tail == "nan":
    filler = iota(sizes.C) >= plan.used
  codes = _codes_of_slots(sizes, plan)
  return _exchange(sizes, is_sound, at, arrays, codes, filler)


def to_choices(
  sizes: Sizes, plan: Plan, is_sound: jax.Array, *arrays: jax.Array
) -> list[jax.Array]:
  """Sends arrays [C, ...] of slots back to choices, as [K, T, ...]."""
  at = [_slots_of_rows(sizes, plan)] * len(arrays)
  codes = _codes_of_choices(sizes, plan)
  filler = jnp.zeros(codes.size, bool)
  rows = _exchange(sizes, is_sound, at, arrays, codes, filler)
  return [x.reshape(sizes.K, sizes.T, *x.shape[1:]) for x in rows]


def _bucket(sizes: Sizes) -> int:
  """Returns B, the number of rows of the longest possible stream."""
  return min(sizes.T * min(sizes.K, sizes.L), sizes.C)


def _no_code(sizes: Sizes) -> int:
  """Returns the code that marks rows that are not sent."""
  return sizes.P * _bucket(sizes)


def _in_stream(sizes: Sizes, plan: Plan) -> jax.Array:
  """Returns int32 [P, L], the offset of each slice of slots in its stream."""
  remote = plan.slots.remote.reshape(sizes.P, sizes.L)
  return remote - remote[:, :1]


def _codes_of_slots(sizes: Sizes, plan: Plan) -> jax.Array:
  """Returns, for each slot, the code of its row, int32 [C]."""
  # The slices in the order of their slots: by expert, then by source.
  by_slot = iota(sizes.V).reshape(sizes.P, sizes.L).T.reshape(-1)
  start = take(plan.slots.start, by_slot)
  slice_ = take(by_slot, _last_at_most(start, iota(sizes.C)))
  row = iota(sizes.C) - take(plan.slots.start, slice_)
  code = take(_in_stream(sizes, plan).reshape(-1), slice_) + row
  code += div(slice_, sizes.L) * _bucket(sizes)
  is_sent = (row >= 0) & (row < take(plan.slots.size, slice_))
  return jnp.where(is_sent, code, _no_code(sizes))


def _slots_of_rows(sizes: Sizes, plan: Plan) -> jax.Array:
  """Returns, for each code, the slot of its row, int32 [P * B]."""
  B = _bucket(sizes)
  start = _in_stream(sizes, plan).clip(max=B) + B * iota(sizes.P)[:, None]
  start, codes = start.reshape(-1), iota(sizes.P * B)
  slice_ = _last_at_most(start, codes)
  return take(plan.slots.start - start, slice_) + codes


def _codes_of_choices(sizes: Sizes, plan: Plan) -> jax.Array:
  """Returns, for each choice, the code of its row, int32 [K * T]."""
  place = plan.place.reshape(sizes.T, sizes.K).T.reshape(-1)
  start = plan.choices.start[:: sizes.L]
  rank = _last_at_most(start, place)
  code = rank * _bucket(sizes) + place - take(start, rank)
  return jnp.where(place < place.size, code, _no_code(sizes))


def _last_at_most(table: jax.Array, values: jax.Array) -> jax.Array:
  """Returns, for each value, the index of the last table[i] <= value."""
  after = jnp.searchsorted(table, values, side="right", method="scan_unrolled")
  return after.astype(jnp.int32) - 1


def _exchange(
  sizes: Sizes,
  is_sound: jax.Array,
  at: Sequence[jax.Array],
  arrays: Sequence[jax.Array],
  codes: jax.Array,
  is_nan: jax.Array,
) -> list[jax.Array]:
  """Sends the rows `at` [P * B] of each array; returns the rows for `codes`.

  The rows of `is_nan` that no rank sends are NaN, and other such rows are 0.
  """
  # Words have 2 bytes or more. Workaround (seen in jax 0.12.0): XLA rejects its
  # own merge of casts of uint8 [n, 4] to float32 [n], and to uint16 [n, 2].
  unit = f"uint{8 * max(2, min(array.dtype.itemsize for array in arrays))}"
  bits = [_words(x, unit) for x in arrays]
  is_sent = codes < _no_code(sizes)
  if sizes.P == 1:
    at = [take(x, codes) for x in at]
  columns = [take(x, i) for x, i in zip(bits, at, strict=True)]
  out = jnp.concatenate(columns, -1)
  if sizes.P > 1:
    sent = sound(is_sound, out).reshape(sizes.P, _bucket(sizes), -1)
    axis = sizes.group.axis_name
    sent = lax.all_to_all(lax.optimization_barrier(sent), axis, 0, 0)
    out = take(sent.reshape(_no_code(sizes), -1), codes)

  # The filler is a variable. Workaround (seen in jax 0.12.0): XLA:CPU loses
  # bits in a select between a bfloat16 and a constant. For a traced bool s and
  # uint16 [7] x,
  #
  #   bitcast_convert_type(jnp.where(s, x, jnp.uint16(65535)), jnp.bfloat16)
  #
  # flushes a denormal, and makes a NaN quiet, in the last element. LLVM selects
  # after the cast, and on x86 it converts the bfloat16 to float32 and back.
  filler = jnp.where(is_nan | ~is_sound, nan(out.dtype), 0).astype(out.dtype)
  out = jnp.where((is_sound & is_sent)[:, None], out, filler[:, None])
  starts = np.cumsum([x.shape[1] for x in bits])[:-1]
  columns = jnp.split(out, starts, axis=1)
  return [*map(_of_words, columns, arrays)]


def sound(is_sound: jax.Array, x: jax.Array) -> jax.Array:
  """Returns `x` if `is_sound`, and otherwise NaN."""
  return jnp.where(is_sound, x, nan(x.dtype))


def nan(dtype: DTypeLike) -> jax.Array:
  """Returns NaN; for an integer dtype, bits that are NaN in any float dtype."""
  if jnp.issubdtype(dtype, jnp.floating):
    return jnp.array(jnp.nan, dtype)
  return jnp.array(jnp.iinfo(dtype).max, dtype)


def _words(array: jax.Array, unit: str) -> jax.Array:
  """Returns the bits of rows [n, ...] as words [n, m] of the type `unit`."""
  if array.dtype.itemsize < np.dtype(unit).itemsize:
    array = array.reshape(len(array), -1, 2)
  return lax.bitcast_convert_type(array, unit).reshape(len(array), -1)


def _of_words(words: jax.Array, like: jax.Array) -> jax.Array:
  """Returns words [n, m] as rows of the shape and dtype of `like`."""
  shape = len(words), *like.shape[1:]
  if like.dtype.itemsize > words.dtype.itemsize:
    words = words.reshape(*shape, -1)
  return lax.bitcast_convert_type(words, like.dtype).reshape(shape)
