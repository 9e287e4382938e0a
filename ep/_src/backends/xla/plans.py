# SPDX-License-Identifier: Apache-2.0
"""backend="xla": the plan of a routing, and how `EpHandle.mem` holds it.

The choices of a rank, sorted by expert, are P streams of rows: one for each
destination, in the order of the slots there. A row is known on both sides by a
*code*: on the sender `d * B + i` is the i-th of the stream to rank d, on the
receiver `s * B + i` is the i-th of the stream from rank s, where B is the
length of the longest stream that there can be. All ranks compute their plans
from the same table: how many tokens of each rank chose each expert.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple
import zlib

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from ep._src.base.config import LayerConfig


@dataclasses.dataclass(frozen=True)
class Dims:
  """The static values of an op; sizes have their names in docs/semantics.md.

  Attributes:
    layer: the layer's values.
    T: tokens of a rank.
    drop: whether rows past the capacity are dropped; otherwise prepare fails.
    can_raise: whether the program can call Python, for it to raise.
    nan_tail: whether rows past the last slab are NaN; otherwise they are zero.
  """

  layer: LayerConfig
  T: int
  drop: bool = True
  can_raise: bool = True
  nan_tail: bool = False

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
    """Rows of the longest stream that there can be."""
    return min(self.T * min(self.K, self.L), self.C)

  @property
  def no_code(self) -> int:
    """The code of a row that is not sent."""
    return self.P * self.B


class Choices(NamedTuple):
  """The choices of a rank, sorted by expert. Unused and invalid ones are last.

  A choice is known by its index in `topk_idx.reshape(-1)`.
  """

  order: jax.Array  # [T * K] the choices
  expert: jax.Array  # [T * K] the expert of each; E if it is unused or invalid
  start: jax.Array  # [E + 1] where the choices of each expert start

  @property
  def counts(self) -> jax.Array:
    """[E] how many tokens chose each expert."""
    return jnp.diff(self.start)


class Slabs(NamedTuple):
  """The slabs of each rank: int32 [P, L], as in reference.py."""

  tokens: jax.Array  # tokens of the expert
  offset: jax.Array  # first slot
  end: jax.Array  # the slot after the last, padding included


class Streams(NamedTuple):
  """The streams to and from each rank, seen from one: int32 [P]."""

  to_start: jax.Array  # where the stream to each rank starts in `order`
  to_size: jax.Array  # rows of the stream to each rank
  from_start: jax.Array  # where the stream from each starts in `slots`
  from_size: jax.Array  # rows of the stream from each rank
  remote_from: jax.Array  # on each rank, `from_start` of this rank
  remote_to: jax.Array  # on each rank, `to_start` of this rank


class Plan(NamedTuple):
  """The source and destination of each row, seen from one rank: int32 [...].

  Rows are sent, and received, in sequence: stream after stream.
  """

  order: jax.Array  # [T * K] the choices in sequence; unused ones at the end
  code: jax.Array  # [T * K] code of each choice
  slots: jax.Array  # [C] the slots in sequence
  source: jax.Array  # [C] code of each slot
  streams: jax.Array  # [6 * P] the arrays of `by_rank`
  used: jax.Array  # [1] slots before the tail
  routing: jax.Array  # [1] a digest of all choices, alike on all ranks

  @property
  def by_rank(self) -> Streams:
    """The streams, of which `streams` has one array after the other."""
    return Streams(*jnp.split(self.streams, len(Streams._fields)))


class _Runs(NamedTuple):
  """The rows from one rank to one expert: int32 [P, E], by rank and expert."""

  slot: jax.Array  # the first slot
  size: jax.Array  # rows that the capacity lets through
  row: jax.Array  # the place of the first row in its stream


def sort_choices(dims: Dims, idx: jax.Array) -> Choices:
  """Returns the choices of `topk_idx` [T, K] in the order of their experts."""
  flat = idx.reshape(-1)
  is_valid = (flat >= 0) & (flat < dims.E)
  expert = int32(jnp.where(is_valid, flat, dims.E))
  choice = jnp.arange(flat.size, dtype=jnp.int32)
  expert, order = lax.sort((expert, choice), num_keys=1, is_stable=True)
  experts = jnp.arange(dims.E + 1, dtype=jnp.int32)
  return Choices(order, expert, int32(jnp.searchsorted(expert, experts)))


def make_slabs(dims: Dims, counts: jax.Array) -> Slabs:
  """Returns the slabs for `counts` [P, E], by source rank and expert."""
  tokens = _sum(counts, 0).reshape(dims.P, dims.L)
  alignment = dims.layer.alignment
  padded = -(-tokens // alignment) * alignment
  offset = _sum_before(padded, 1)
  return Slabs(tokens, offset, offset + padded)


def make_plan(
  dims: Dims,
  choices: Choices,
  counts: jax.Array,
  slabs: Slabs,
  digests: jax.Array,
) -> Plan:
  """Returns the plan of this rank.

  `counts` is as in `make_slabs`, and `digests` [P] has one of each rank's ids.
  """
  P, L = dims.P, dims.L
  me = lax.axis_index(dims.axis)
  by_rank = counts.reshape(P, P, L)  # [source, destination, expert there]
  slot = slabs.offset.reshape(-1) + _sum_before(counts, 0)
  runs = _Runs(
    slot=slot,
    size=jnp.clip(dims.C - slot, 0, counts),
    row=_sum_before(by_rank, 2).reshape(P, dims.E),
  )
  size = _sum(runs.size.reshape(P, P, L), 2)
  to_start = _sum_before(_sum(by_rank, 2), 1)
  from_start = _sum_before(size, 0)
  slots, source = _slots_of_rank(dims, runs, from_start)
  streams = Streams(
    to_start, size, from_start.T, size.T, from_start, to_start.T
  )
  return Plan(
    choices.order,
    _codes_of_choices(dims, choices, runs),
    slots,
    source,
    jnp.stack(streams)[:, me].reshape(-1),
    used=slabs.end[me, -1:].clip(max=dims.C),
    routing=digest(digests)[None],
  )


def _codes_of_choices(dims: Dims, choices: Choices, runs: _Runs) -> jax.Array:
  """Returns the code of each of this rank's choices."""
  me = lax.axis_index(dims.axis)
  in_order = jnp.arange(choices.order.size, dtype=jnp.int32)
  row = in_order - choices.start[choices.expert]  # in its run
  expert = jnp.minimum(choices.expert, dims.E - 1)
  is_sent = (choices.expert < dims.E) & (row < runs.size[me, expert])
  code = expert // dims.L * dims.B + runs.row[me, expert] + row
  code = jnp.where(is_sent, code, dims.no_code)
  return (
    jnp.zeros_like(code)
    .at[choices.order]
    .set(code, mode="promise_in_bounds", unique_indices=True)
  )


def _slots_of_rank(
  dims: Dims, runs: _Runs, from_start: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns this rank's slots in sequence, and the code of each slot.

  `from_start` [P, P] is where the stream from each rank starts on each rank.
  """
  me = lax.axis_index(dims.axis)

  # The runs to this rank, in the order of their slots.
  streams = jnp.broadcast_to(from_start[:, me, None], (dims.P, dims.L))
  mine = [lax.dynamic_slice_in_dim(x, me * dims.L, dims.L, 1) for x in runs]
  table = jnp.stack([*mine, streams]).mT.reshape(4, -1)
  slots = jnp.arange(dims.C, dtype=jnp.int32)
  run = int32(jnp.searchsorted(table[0], slots, side="right")) - 1
  start, size, first, stream = table.T[run].T
  row = slots - start
  is_filled = row < size
  in_stream = first + row
  rank = run % dims.P
  source = jnp.where(is_filled, rank * dims.B + in_stream, dims.no_code)
  at = jnp.where(is_filled, stream + in_stream, dims.C)
  return jnp.zeros_like(slots).at[at].set(slots, mode="drop"), source


def pack(dims: Dims, plan: Plan) -> jax.Array:
  """Returns a plan as int32 words: a stamp, then the plan's arrays."""
  body = jnp.concatenate(plan)
  return jnp.concatenate([_stamp(dims, body), body])


def unpack(dims: Dims, mem: jax.Array) -> tuple[Plan, jax.Array]:
  """Returns the plan in `mem`, and whether it is one that this rank packed.

  `mem` has the bytes of `pack`, for these `dims`.
  """
  words = lax.bitcast_convert_type(mem.reshape(-1, 4), jnp.int32)
  stamp, *plan = jnp.split(words, np.cumsum(_word_counts(dims))[:-1])
  return Plan(*plan), (stamp == _stamp(dims, words[stamp.size :])).all()


def mem_bytes(dims: Dims) -> int:
  """Returns the bytes of a packed plan."""
  return 4 * sum(_word_counts(dims))


def _word_counts(dims: Dims) -> list[int]:
  """Returns the lengths of the stamp and of each array of a plan."""
  choices, slots, ranks = dims.T * dims.K, dims.C, dims.P
  return [3, *[choices] * 2, *[slots] * 2, 6 * ranks, 1, 1]


def _stamp(dims: Dims, body: jax.Array) -> jax.Array:
  """Returns words that differ for other layers, tokens, ranks and bodies."""
  sizes = dims.P, dims.E, dims.T, dims.K, dims.C, dims.layer.alignment
  kind = np.int32(zlib.crc32(repr(sizes).encode()) >> 1)
  return jnp.stack([kind, lax.axis_index(dims.axis), digest(body)])


def digest(words: jax.Array) -> jax.Array:
  """Returns a sum of int32 words that differs for nearly all other words.

  Any change of one word changes it, for factors are odd. High bits are added to
  low ones, since the high bits of two words may cancel each other in a sum.
  """
  factors = jnp.arange(1, 2 * words.size, 2, dtype=jnp.int32)
  return _sum((words ^ lax.shift_right_logical(words, np.int32(16))) * factors)


def int32(x: jax.Array) -> jax.Array:
  return x.astype(jnp.int32)


def _sum(x: jax.Array, axis: int | None = None) -> jax.Array:
  return x.sum(axis, dtype=jnp.int32)


def _sum_before(x: jax.Array, axis: int) -> jax.Array:
  """Returns, for each element, the sum of those before it along an axis."""
  x = jnp.moveaxis(x, axis, -1)
  place = jnp.arange(x.shape[-1])
  sums = _sum(jnp.where(place < place[:, None], x[..., None, :], 0), -1)
  return jnp.moveaxis(sums, -1, axis)
