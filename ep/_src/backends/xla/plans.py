# SPDX-License-Identifier: Apache-2.0
"""The plan of a routing, and its format in `EpHandle.mem`, for backend "xla".

A rank sorts its choices by expert. A *slice* is the choices of one rank for one
expert: consecutive in the sorted choices of that rank, and consecutive slots on
the rank of the expert. All ranks compute their plans from the same table: the
number of tokens of each rank that chose each expert.
"""

from __future__ import annotations

from typing import NamedTuple
import zlib

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from ep._src.base.group import Sizes

# The number of uint32 values. If a key and its value fit into one uint32, they
# are sorted as one.
_WORDS = 1 << 32


class Slices(NamedTuple):
  """Positions and sizes of the slices that a rank sends or receives, int32 [V].

  The slices of a rank's choices are in the order of the expert slots. The
  slices of its slots are in the order of source rank, then local expert.
  """

  start: jax.Array  # first row of a slice on this rank
  size: jax.Array  # rows of a slice
  remote: jax.Array  # first row of a slice on the other rank


class Plan(NamedTuple):
  """The source and destination of each row of one rank.

  A choice is an index in `topk_idx.reshape(-1)`.
  """

  order: jax.Array  # int32 [T * K] the choices, sorted by expert
  place: jax.Array  # int32 [T * K] index in `order`; T * K if it is not sent
  choices: Slices  # of `order`
  slots: Slices
  used: jax.Array  # int32 [1] slots before the tail
  routing: jax.Array  # int32 [1] a digest of all choices, equal on all ranks


class Choices(NamedTuple):
  """The choices of a rank, sorted by expert; unused and invalid ones last."""

  order: jax.Array  # [T * K] the choices
  expert: jax.Array  # [T * K] the expert of each; V if it is unused or invalid
  start: jax.Array  # [V + 1] start of the choices of each expert slot


def sort_choices(sizes: Sizes, idx: jax.Array) -> Choices:
  """Returns the choices of `topk_idx` [T, K] in the order of their experts."""
  flat = idx.reshape(-1)
  is_valid = (flat >= 0) & (flat < sizes.E)
  expert = jnp.where(is_valid, flat, sizes.V)
  expert, order = _sort(
    sizes.V + 1, expert, flat.size, lax.iota(jnp.int32, flat.size)
  )
  slots = lax.iota(jnp.int32, sizes.V + 1)
  start = jnp.searchsorted(expert, slots, method="compare_all")
  return Choices(order, expert, start.astype(jnp.int32))


def _sort(
  num_keys: int, keys: jax.Array, num_values: int, values: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns int32 keys < `num_keys`, sorted, and the value of each.

  Equal keys are in the order of their values, which are < `num_values`.
  """
  keys, values = keys.astype(jnp.uint32), values.astype(jnp.uint32)
  bits = (num_values - 1).bit_length()
  if num_keys << bits <= _WORDS:  # one array is sorted faster than two
    words = lax.sort(keys << np.uint32(bits) | values, is_stable=False)
    keys, values = words >> np.uint32(bits), words & np.uint32((1 << bits) - 1)
  else:
    keys, values = lax.sort((keys, values), num_keys=2, is_stable=False)
  return keys.astype(jnp.int32), values.astype(jnp.int32)


def make_plan(
  sizes: Sizes, choices: Choices, start: jax.Array, digests: jax.Array
) -> tuple[Plan, jax.Array, jax.Array]:
  """Returns the plan of this rank, and the layout of the slabs of all ranks.

  Args:
    sizes: the sizes of the op.
    choices: the choices of this rank.
    start: `Choices.start` of all ranks, int32 [P, V + 1].
    digests: a digest of `topk_idx` of each rank, int32 [P].

  Returns:
    plan: the plan.
    offset: int32 [P, L + 1], the first slot of each slab; the end of the last.
    tokens: int32 [P, L], the choices of each local expert.
  """
  P, L, alignment = sizes.P, sizes.L, np.int32(sizes.alignment)
  counts = jnp.diff(start).T.reshape(P, L, P)  # the last axis: source ranks
  before = _sums(counts)
  tokens = before[..., -1]
  padded = lax.div(tokens + (alignment - 1), alignment) * alignment
  offset = _sums(padded)
  me = lax.axis_index(sizes.group.axis_name)
  slot = offset[:, :-1, None] + before[..., :-1]
  size = jnp.clip(sizes.C - slot, 0, counts)
  of_choices = Slices(
    start[me, :-1], size[..., me].reshape(-1), slot[..., me].reshape(-1)
  )
  remote = lax.dynamic_slice_in_dim(start, me * L, L, 1)
  of_slots = Slices(*(x.reshape(-1) for x in (slot[me].T, size[me].T, remote)))

  num = choices.order.size
  index = lax.iota(jnp.int32, num)
  is_sent = choices.expert < sizes.V
  if sizes.overflow != "error":
    end = of_choices.start + of_choices.size
    is_sent &= index < take(end, choices.expert)
  place = jnp.where(is_sent, index, num)
  # A sort inverts the permutation: on TPUs a scatter copies word after word.
  _, place = _sort(num, choices.order, num + 1, place)
  plan = Plan(
    choices.order,
    place,
    of_choices,
    of_slots,
    used=offset[me, -1:].clip(max=sizes.C),
    routing=digest(digests)[None],
  )
  return plan, offset, tokens


def pack(sizes: Sizes, plan: Plan) -> jax.Array:
  """Returns a plan as int32 words: a checksum, then the plan's arrays."""
  body = jnp.concatenate(jax.tree.leaves(plan))
  return jnp.concatenate([_stamp(sizes, body)[None], body])


def unpack(sizes: Sizes, mem: jax.Array) -> tuple[Plan, jax.Array]:
  """Returns the plan in `mem`, and whether its checksum fits this rank."""
  words = lax.bitcast_convert_type(mem.reshape(-1, 4), jnp.int32)
  leaves = jnp.split(words[1:], np.cumsum(_sizes(sizes))[:-1])
  order, place, *slices, used, routing = leaves
  ends = Slices(*slices[:3]), Slices(*slices[3:])
  plan = Plan(order, place, *ends, used, routing)
  return plan, words[0] == _stamp(sizes, words[1:])


def mem_bytes(sizes: Sizes) -> int:
  return 4 * (1 + sum(_sizes(sizes)))


def _sizes(sizes: Sizes) -> list[int]:
  """Returns the length of each array of a plan."""
  return [sizes.T * sizes.K] * 2 + [sizes.V] * 6 + [1, 1]


def _stamp(sizes: Sizes, body: jax.Array) -> jax.Array:
  """Returns a checksum of a plan's arrays, the static sizes and the rank."""
  key = sizes.P, sizes.E, sizes.T, sizes.K, sizes.C, sizes.alignment
  kind = np.int32(zlib.crc32(repr(key).encode()) >> 1)
  rank = lax.axis_index(sizes.group.axis_name) * np.int32(0x61C88647)
  return digest(body) ^ (kind + rank)


def digest(words: jax.Array) -> jax.Array:
  """Returns a hash of int32 words.

  A change of one word always changes the hash, because factors are odd. High
  bits are mixed into low bits, because high bits of words may cancel in a sum.
  """
  factors = jnp.arange(1, 2 * words.size, 2, dtype=jnp.int32)
  mixed = words ^ lax.shift_right_logical(words, np.int32(16))
  return (mixed * factors).sum(dtype=jnp.int32)


def take(x: jax.Array, index: jax.Array) -> jax.Array:
  """Returns `x[index]`, with indices clipped to the valid range."""
  return x.at[index].get(mode="clip", wrap_negative_indices=False)


def _sums(x: jax.Array) -> jax.Array:
  """Returns the sums of the first 0, 1, 2... words of the last axis."""
  n = x.shape[-1]
  is_before = np.arange(n) < np.arange(n + 1)[:, None]
  terms = jnp.where(is_before, x[..., None, :], 0)
  return terms.sum(-1, dtype=jnp.int32)
