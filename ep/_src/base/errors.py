# SPDX-License-Identifier: Apache-2.0
"""`EpError`, and the faults that programs without native code find.

A fault is int32 [24], equal on all ranks of a domain. A program raises it, or
returns it, for `ep.check`. The first five words are computed, and the others
are of the layer:

    0       the kind of the fault; 0 is none
    1       the rank that has it
    2 to 4  what the kind says
    5 to 7  top_k, the number of experts, the capacity
    8 to 23 the first 64 bytes of the name, in UTF-8
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from ep._src.base import arguments

# The errors of failed programs. JAX chooses the class: usually a RuntimeError,
# `jax.errors.JaxRuntimeError`. If a repeated call of a jitted function fails
# before it returns, JAX's C++ path raises a ValueError.
EpError: tuple[type[Exception], ...] = (RuntimeError, ValueError)

FAULT_WORDS = 24
_COMPUTED = 5
_NAME_BYTES = 4 * (FAULT_WORDS - 8)

# The kinds of a fault, and what words 2 to 4 say.
_WRONG_CHOICE = 1  # `first_wrong_choice` of the rank
_OVERFLOW = 2  # the rows that the rank needs
_DISAGREEMENT = 3  # hashes of the configuration on rank 0, and on the rank

# The first word of `first_wrong_choice` if all choices are right.
_NO_CHOICE = np.int32(arguments.INT32_MAX)


def first_wrong_choice(topk_idx: jax.Array, num_experts: int) -> jax.Array:
  """Returns int32 [3]: the first wrong choice of `topk_idx` [T, K], and its id.

  The first word is twice the index of the choice in `topk_idx.reshape(-1)`,
  plus one if its expert is repeated rather than out of range. The others are
  the low and the high half of the id.
  """
  is_wrong = (topk_idx < -1) | (topk_idx >= num_experts)
  is_same = topk_idx[:, :, None] == topk_idx[:, None, :]
  repeats = jnp.tril(is_same, -1).any(2) & (topk_idx >= 0)
  choice = 2 * jnp.arange(topk_idx.size, dtype=jnp.int32)
  choice = choice.reshape(topk_idx.shape) + jnp.where(is_wrong, 0, 1)
  choice = jnp.where(is_wrong | repeats, choice, _NO_CHOICE).min()
  expert = topk_idx.ravel().at[choice // 2].get(mode="clip")
  words = lax.bitcast_convert_type(expert, jnp.int32).reshape(-1)
  return jnp.concatenate([choice[None], words, words[-1:] >> 31])[:3]


def fault_of(
  of_ranks: jax.Array,
  name: str,
  top_k: int,
  num_experts: int,
  capacity: int,
  needed: jax.Array | None = None,
  configs: jax.Array | None = None,
) -> jax.Array:
  """Returns the fault of a routing, in the layer `name`.

  Args:
    of_ranks: `first_wrong_choice` of all ranks, int32 [P, 3].
    name: the name of the layer.
    top_k: its number of choices of a token.
    num_experts: its number of experts.
    capacity: its receive rows of a rank.
    needed: the receive rows that each rank needs, int32 [P]; None accepts any.
    configs: a hash of each rank's configuration, int32 [P]; None for no check.
  """
  is_wrong = of_ranks[:, 0] < _NO_CHOICE
  rank = jnp.argmax(is_wrong)
  fault = _words(is_wrong.any(), _WRONG_CHOICE, rank, *of_ranks[rank])
  if needed is not None:
    rank = jnp.argmax(needed > capacity)
    is_over = (fault[0] == 0) & (needed[rank] > capacity)
    fault += _words(is_over, _OVERFLOW, rank, needed[rank])
  if configs is not None:
    rank = jnp.argmax(configs != configs[0])
    differs = configs[rank] != configs[0]
    other = _words(differs, _DISAGREEMENT, rank, configs[0], configs[rank])
    fault = jnp.where(differs, other, fault)
  text = name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
  label = np.array([top_k, num_experts, capacity], np.int32)
  label = np.concatenate([label, np.frombuffer(text, "<i4")])
  return jnp.concatenate([fault, jnp.where(fault[0] > 0, label, 0)])


def _words(is_fault: jax.Array, *words: Any) -> jax.Array:
  """Returns the computed words of a fault; all are 0 if it is none."""
  words += (0,) * (_COMPUTED - len(words))
  stacked = jnp.stack([jnp.asarray(w, jnp.int32) for w in words])
  return jnp.where(is_fault, stacked, 0)


def raise_fault(fault: np.ndarray) -> None:
  """Raises `ValueError` if there is a fault.

  The texts are the same as in ep_ffi/core/faults.h.
  """
  kind, rank, *says = fault[:_COMPUTED].tolist()
  top_k, num_experts, capacity = fault[_COMPUTED:8].tolist()
  name = np.asarray(fault[8:], "<i4").tobytes().rstrip(b"\0")
  op = f'ep_prepare(layer "{name.decode(errors="ignore")}")'
  if kind == 0:
    return
  if kind == _WRONG_CHOICE:
    choice, low, high = says
    index, repeats = divmod(choice, 2)
    token, k = divmod(index, top_k)
    expert = (high << 32) + (low & 0xFFFFFFFF)
    what = f"{op}, rank {rank}: topk_idx[{token}, {k}] = {expert}"
    if repeats:
      raise ValueError(
        f"{what} repeats an expert of token {token}; the top-k experts of a"
        " token must be distinct (use -1 for an unused choice)"
      )
    raise ValueError(
      f"{what}, but num_experts = {num_experts}; valid ids are"
      f" -1..{num_experts - 1}"
    )
  if kind == _OVERFLOW:
    raise ValueError(
      f"{op}: rank {rank} needs {says[0]} receive rows, but the capacity is"
      f" {capacity}; raise capacity_factor or recv_capacity_per_rank, balance"
      ' the routing, or use overflow="drop"'
    )
  if kind == _DISAGREEMENT:
    hashes = np.array([says[0]] * rank + [says[1]])
    raise disagreement(op, "a hash of the configuration", hashes)
  raise ValueError(
    "the words of a fault were changed; pass the handle or the metrics as the"
    " op or the layer returned them"
  )


def carried_fault(array: jax.Array) -> jax.Array:
  """Returns the first fault in the last 96 bytes of each row, as int32 [24].

  A row is of `Metrics.fault`, or of `EpHandle.mem` if `Connection.flags`.
  """
  faults = array[..., -4 * FAULT_WORDS // array.dtype.itemsize :]
  if array.dtype == jnp.uint8:
    faults = faults.reshape(-1, FAULT_WORDS, 4)
    faults = lax.bitcast_convert_type(faults, jnp.int32)
  faults = faults.reshape(-1, FAULT_WORDS)
  return faults[jnp.argmax(faults[:, 0] != 0)]


def raise_carried(array: jax.Array) -> None:
  """Raises the `carried_fault` of this process's part of an array, if any."""
  for shard in array.addressable_shards:
    raise_fault(np.asarray(carried_fault(shard.data)))


def disagreement(op: str, value: str, of_ranks: np.ndarray) -> ValueError:
  """Returns the error of ranks that have another `value` than rank 0."""
  other = int(np.argmax(of_ranks != of_ranks[0]))
  return ValueError(
    f"{op}: the ranks disagree on {value}: {of_ranks[0]} on rank 0,"
    f" {of_ranks[other]} on rank {other}; every rank must run the same program"
    " on the same layer and handle"
  )
