# SPDX-License-Identifier: Apache-2.0
"""backend="xla": sends rows in buckets.

Programs for CPUs, perhaps among other platforms, and domains of one rank use
buckets.

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
import numpy as np

from ep._src.backends.xla.plans import Plan, take
from ep._src.base.group import Sizes


def to_slots(
  sizes: Sizes,
  plan: Plan,
  is_sound: jax.Array,
  rows: jax.Array,
  *weights: jax.Array,
) -> list[jax.Array]:
  """Sends rows of tokens [T, H] and weights of choices [T, K] to slots [C].

  All results of a rank where `is_sound` is False are NaN.
  """
  iota = lax.iota(jnp.int32, sizes.C)
  first, B = _first_codes(sizes, plan)
  start, size, _ = plan.slots
  # The slices in the order of their slots: by expert, then by source.
  start, size, first = (
    x.reshape(sizes.P, sizes.L).T.reshape(-1) for x in (start, size, first)
  )
  slice_ = _last_at_most(start, iota)
  row = iota - take(start, slice_)
  is_sent = (row >= 0) & (row < take(size, slice_))
  codes = take(first, slice_) + row
  sent = plan.choices.start[:: sizes.L, None] + lax.iota(jnp.int32, B)[None]
  choices = take(plan.order, sent.reshape(-1))
  at = [lax.div(choices, np.int32(sizes.K)), *[choices] * len(weights)]
  arrays = [rows, *(x.reshape(-1) for x in weights)]
  is_nan = (sizes.tail == "nan") & (iota >= plan.used)
  return _exchange(sizes, is_sound, at, arrays, codes, is_sent, is_nan)


def to_choices(
  sizes: Sizes, plan: Plan, is_sound: jax.Array, *arrays: jax.Array
) -> list[jax.Array]:
  """Sends arrays [C, ...] of slots back to choices, as [K, T, ...].

  Choices without a slot get zeros. All results of a rank where `is_sound` is
  False are NaN.
  """
  first, B = _first_codes(sizes, plan)
  codes = lax.iota(jnp.int32, sizes.P * B)
  slice_ = _last_at_most(first, codes)
  at = [take(plan.slots.start - first, slice_) + codes] * len(arrays)
  place = plan.place.reshape(sizes.T, sizes.K).T.reshape(-1)
  start = plan.choices.start[:: sizes.L]
  rank = _last_at_most(start, place)
  codes = rank * B + place - take(start, rank)
  is_sent = place < place.size
  rows = _exchange(sizes, is_sound, at, arrays, codes, is_sent, False)
  return [x.reshape(sizes.K, sizes.T, *x.shape[1:]) for x in rows]


def _first_codes(sizes: Sizes, plan: Plan) -> tuple[jax.Array, int]:
  """Returns the code of the first row of each slice of slots, int32 [V]; B."""
  P, B = sizes.P, min(sizes.T * min(sizes.K, sizes.L), sizes.C)
  remote = plan.slots.remote.reshape(P, -1)
  in_stream = (remote - remote[:, :1]).clip(max=B)
  first = in_stream + B * lax.iota(jnp.int32, P)[:, None]
  return first.reshape(-1), B


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
  is_sent: jax.Array,
  is_nan: jax.Array | bool,
) -> list[jax.Array]:
  """Sends the rows `at` [P * B] of each array; returns the rows for `codes`.

  Rows that are not `is_sent` are NaN where `is_nan`, and otherwise 0.
  """
  # Words have 2 bytes or more. Workaround (seen in jax 0.12.0): XLA rejects its
  # own merge of casts of uint8 [n, 4] to float32 [n], and to uint16 [n, 2].
  unit = f"uint{8 * max(2, min(array.dtype.itemsize for array in arrays))}"
  nan = np.array(np.iinfo(unit).max, unit)  # NaN in any float dtype
  bits = [_words(x, unit) for x in arrays]
  if sizes.P == 1:
    at = [take(x, codes) for x in at]
  columns = [take(x, i) for x, i in zip(bits, at, strict=True)]
  out = jnp.concatenate(columns, -1)
  if sizes.P > 1:
    buckets = jnp.where(is_sound, out, nan).reshape(sizes.P, -1, out.shape[1])
    axis = sizes.group.axis_name
    buckets = lax.all_to_all(lax.optimization_barrier(buckets), axis, 0, 0)
    out = take(buckets.reshape(-1, out.shape[1]), codes)

  # The filler is a variable. Workaround (seen in jax 0.12.0): XLA:CPU loses
  # bits in a select between a bfloat16 and a constant. For a traced bool s and
  # uint16 [7] x,
  #
  #   bitcast_convert_type(jnp.where(s, x, jnp.uint16(65535)), jnp.bfloat16)
  #
  # flushes a denormal, and makes a NaN quiet, in the last element. LLVM selects
  # after the cast, and on x86 it converts the bfloat16 to float32 and back.
  is_filled = ~(is_sound & is_sent)
  filler = jnp.where(is_nan | ~is_sound, nan, jnp.zeros(len(codes), unit))
  out = jnp.where(is_filled[:, None], filler[:, None], out)
  starts = np.cumsum([x.shape[1] for x in bits])[:-1]
  columns = jnp.split(out, starts, axis=1)
  return [*map(_of_words, columns, arrays)]


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
