# SPDX-License-Identifier: Apache-2.0
"""The plan of a routing, and its format in `EpHandle.mem`, for backend "xla".

The choices of a rank, sorted by expert, are P streams of rows: one for each
destination, in the order of its slots. A *code* identifies a row: on the
sender, `d * B + i` is the i-th row of the stream to rank d; on the receiver,
`s * B + i` is the i-th row of the stream from rank s. B is the largest length
of a stream. All ranks compute their plans from the same table: the number of
tokens of each rank that chose each expert.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple
import zlib

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from ep._src.base.arrays import iota
from ep._src.base.config import LayerConfig

# The number of uint32 values. A choice and its expert are sorted as one uint32
# if they fit.
_KEYS = 1 << 32


@dataclasses.dataclass(frozen=True)
class Dims:
  """The static sizes and options of an op, named as in docs/semantics.md."""

  layer: LayerConfig
  T: int  # tokens of a rank
  drop: bool = True  # drop rows past the capacity; otherwise prepare fails
  can_raise: bool = True  # whether the program can call Python
  nan_tail: bool = False  # write NaN past the last slab; otherwise zero

  @property
  def axis(self) -> str:
    return self.layer.group.axis_name

  @property
  def P(self) -> int:
    return self.layer.ep_size

  @property
  def E(self) -> int:
    return self.layer.group.num_experts

  @property
  def L(self) -> int:
    return self.layer.num_local_experts

  @property
  def K(self) -> int:
    return self.layer.top_k

  @property
  def C(self) -> int:
    return self.layer.capacity_for(self.T)

  @property
  def B(self) -> int:
    """The number of rows of the longest possible stream."""
    return min(self.T * min(self.K, self.L), self.C)

  @property
  def no_code(self) -> int:
    """The code of a row that is not sent."""
    return self.P * self.B


class End(NamedTuple):
  """One end of an exchange of rows: the choices or the slots of a rank.

  Rows are sent and received in sequence, stream after stream. All are int32.
  """

  sequence: jax.Array  # [n] choices, or slots; those without a row are last
  codes: jax.Array  # [n] code of each choice, or slot
  start: jax.Array  # [P] start of the stream to, or from, each rank
  size: jax.Array  # [P] rows of the stream to, or from, each rank
  remote: jax.Array  # [P] each rank's `start` of its stream with this rank


class Plan(NamedTuple):
  """The source and destination of each row of one rank.

  A choice is an index in `topk_idx.reshape(-1)`.
  """

  choices: End  # the end with n = T * K choices
  slots: End  # the end with n = C slots
  used: jax.Array  # int32 [1] slots before the tail
  routing: jax.Array  # int32 [1] a digest of all choices, equal on all ranks


class Choices(NamedTuple):
  """The choices of a rank, sorted by expert; unused and invalid ones last."""

  order: jax.Array  # [T * K] the choices
  expert: jax.Array  # [T * K] the expert of each; E if it is unused or invalid
  start: jax.Array  # [E + 1] start of the choices of each expert


class Slabs(NamedTuple):
  """The layout of the expert slabs of all ranks, int32."""

  start: jax.Array  # [P, E + 1] `Choices.start` of each rank
  counts: jax.Array  # [P, L, P] tokens for each rank's experts, by source rank
  before: jax.Array  # [P, L, P + 1] sums of `counts` over earlier sources
  offset: jax.Array  # [P, L + 1] first slot of each slab; end of the last slab


def sort_choices(dims: Dims, idx: jax.Array) -> Choices:
  """Returns the choices of `topk_idx` [T, K] in the order of their experts."""
  flat = idx.reshape(-1)
  is_valid = (flat >= 0) & (flat < dims.E)
  expert = jnp.where(is_valid, flat, dims.E).astype(jnp.uint32)
  order = jnp.arange(flat.size, dtype=jnp.uint32)
  bits = (flat.size - 1).bit_length()
  if (dims.E + 1) << bits <= _KEYS:  # one array is sorted faster than two
    key = lax.sort(expert << np.uint32(bits) | order, is_stable=False)
    expert, order = key >> np.uint32(bits), key & np.uint32((1 << bits) - 1)
  else:
    expert, order = lax.sort((expert, order), num_keys=2, is_stable=False)
  counts = jnp.zeros(dims.E, jnp.int32).at[expert].add(1, mode="drop")
  return Choices(int32(order), int32(expert), _sums(counts))


def make_slabs(dims: Dims, start: jax.Array) -> Slabs:
  """Returns the slab layout from `Choices.start` of all ranks, [P, E + 1]."""
  P, L = dims.P, dims.L
  counts = jnp.diff(start).T.reshape(P, L, P)
  before = _sums(counts)
  alignment = dims.layer.alignment
  padded = div(before[..., -1] + (alignment - 1), alignment) * alignment
  return Slabs(start, counts, before, _sums(padded))


def make_plan(
  dims: Dims, choices: Choices, slabs: Slabs, digests: jax.Array
) -> Plan:
  """Returns the plan of this rank; `digests` [P] are digests of `topk_idx`."""
  P, L = dims.P, dims.L
  me = lax.axis_index(dims.axis)
  slot = slabs.offset[:, :-1, None] + slabs.before[..., :-1]
  size = jnp.clip(dims.C - slot, 0, slabs.counts)
  # Rows past the capacity, which are dropped, are the last rows of a stream.
  from_start = _sums(size.mT.reshape(P, -1), L)
  size = jnp.diff(from_start)  # [destination, source]
  to_start = slabs.start[:, :-1:L]  # [source, destination]

  of_choice = div(choices.expert, L)
  to_codes = _codes(dims, of_choice, to_start[me], size[:, me])

  # Starts, in the receive sequence, of the rows from each rank for each expert.
  first = lax.dynamic_slice_in_dim(slabs.start, me * L, L, 1)
  first = first - first[:, :1] + from_start[me, :-1, None]
  first = jnp.minimum(first, from_start[me, 1:, None]).reshape(-1)
  run = _last_at_most(first, dims.C)
  shift = slot[me].T.reshape(-1) - first
  from_codes = _codes(dims, div(run, L), from_start[me, :-1], size[me])
  in_sequence = iota(dims.C)
  slots = jnp.where(
    from_codes < dims.no_code, in_sequence + take(shift, run), dims.C
  )
  return Plan(
    End(
      choices.order,
      _by_place(dims, choices.order, to_codes),
      to_start[me],
      size[:, me],
      to_start[:, me],
    ),
    End(
      slots,
      _by_place(dims, slots, from_codes),
      from_start[me, :-1],
      size[me],
      from_start[:, me],
    ),
    used=slabs.offset[me, -1:].clip(max=dims.C),
    routing=digest(digests)[None],
  )


def _codes(
  dims: Dims, rank: jax.Array, start: jax.Array, size: jax.Array
) -> jax.Array:
  """Returns the codes of rows in sequence, sent to or received from `rank`."""
  row = iota(rank.size) - take(start, rank)
  return jnp.where(row < take(size, rank), rank * dims.B + row, dims.no_code)


def _by_place(dims: Dims, sequence: jax.Array, codes: jax.Array) -> jax.Array:
  """Scatters codes from sequence order to the order of choices or slots."""
  none = jnp.full_like(codes, dims.no_code)
  return none.at[sequence].set(codes, mode="drop")


def pack(dims: Dims, plan: Plan) -> jax.Array:
  """Returns a plan as int32 words: a checksum, then the plan's arrays."""
  body = jnp.concatenate(jax.tree.leaves(plan))
  return jnp.concatenate([_stamp(dims, body)[None], body])


def unpack(dims: Dims, mem: jax.Array) -> tuple[Plan, jax.Array]:
  """Returns the plan in `mem`, and whether its checksum fits this rank."""
  words = lax.bitcast_convert_type(mem.reshape(-1, 4), jnp.int32)
  leaves = jnp.split(words[1:], np.cumsum(_sizes(dims))[:-1])
  plan = Plan(End(*leaves[:5]), End(*leaves[5:10]), *leaves[10:])
  return plan, words[0] == _stamp(dims, words[1:])


def mem_bytes(dims: Dims) -> int:
  return 4 * (1 + sum(_sizes(dims)))


def _sizes(dims: Dims) -> list[int]:
  """Returns the length of each array of a plan."""
  by_rank = [dims.P] * 3
  choices, slots = dims.T * dims.K, dims.C
  return [choices, choices, *by_rank, slots, slots, *by_rank, 1, 1]


def _stamp(dims: Dims, body: jax.Array) -> jax.Array:
  """Returns a checksum of a plan's arrays, the static sizes and the rank."""
  sizes = dims.P, dims.E, dims.T, dims.K, dims.C, dims.layer.alignment
  kind = np.int32(zlib.crc32(repr(sizes).encode()) >> 1)
  rank = lax.axis_index(dims.axis) * np.int32(0x61C88647)
  return digest(body) ^ (kind + rank)


def digest(words: jax.Array) -> jax.Array:
  """Returns a hash of int32 words.

  A change of one word always changes the hash, because factors are odd. High
  bits are mixed into low bits, because high bits of words may cancel in a sum.
  """
  factors = jnp.arange(1, 2 * words.size, 2, dtype=jnp.int32)
  return _sum((words ^ lax.shift_right_logical(words, np.int32(16))) * factors)


def take(x: jax.Array, index: jax.Array) -> jax.Array:
  """Returns `x[index]`, with indices clipped to the valid range."""
  return x.at[index].get(mode="clip", wrap_negative_indices=False)


def div(x: jax.Array, n: int) -> jax.Array:
  """Returns `x // n` of int32 >= 0, in one instruction."""
  return lax.div(x, np.int32(n))


def int32(x: jax.Array) -> jax.Array:
  return x.astype(jnp.int32)


def _sum(x: jax.Array, axis: int | None = None) -> jax.Array:
  return x.sum(axis, dtype=jnp.int32)


def _sums(x: jax.Array, step: int = 1) -> jax.Array:
  """Returns the sums of the first 0, `step`, 2 * `step`... of the last axis."""
  n = x.shape[-1]
  ends = jnp.arange(0, n + 1, step, dtype=jnp.int32)
  is_before = iota(n) < ends[:, None]
  return _sum(jnp.where(is_before, x[..., None, :], 0), -1)


def _last_at_most(table: jax.Array, num: int) -> jax.Array:
  """Returns, for each i in 0..`num` - 1, the index of the last entry <= i.

  The table is sorted and begins with 0. The binary search is unrolled, because
  a loop would run several kernels.
  """
  words = iota(num)
  last = jnp.zeros_like(words)
  for bit in reversed(range((table.size - 1).bit_length())):
    later = last + (1 << bit)
    last = jnp.where(take(table, later) <= words, later, last)
  return jnp.minimum(last, table.size - 1)
