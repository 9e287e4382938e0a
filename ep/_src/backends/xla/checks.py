# SPDX-License-Identifier: Apache-2.0
"""Raises an error of any rank on all ranks, for the backend "xla".

An op calls a Python function, which raises. In a program that cannot call
Python, the op's results are NaN instead.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from ep._src.backends.xla.exchanges import share
from ep._src.backends.xla.plans import (
  Choices,
  Dims,
  div,
  int32,
  take,
)
from ep._src.base import errors
from ep._src.base.errors import fail_if


def find_fault(dims: Dims, idx: jax.Array, choices: Choices) -> jax.Array:
  """Returns int32 [fault, *id] of the first wrong expert id in `topk_idx`.

  The fault is as in `errors.wrong_choice`, or `errors.NO_FAULT` if all ids are
  right. The id has one or two words, by the dtype of `topk_idx`.
  """
  flat = idx.reshape(-1)
  is_wrong = (flat < -1) | (flat >= dims.E)
  order, expert, _ = choices
  token = div(order, dims.K)
  is_same = (jnp.diff(expert, prepend=-1) | jnp.diff(token, prepend=-1)) == 0
  fault = jnp.minimum(
    jnp.where(
      is_wrong,
      jnp.arange(0, 2 * flat.size, 2, dtype=jnp.int32),
      errors.NO_FAULT,
    ),
    jnp.where(is_same & (expert < dims.E), 2 * order + 1, errors.NO_FAULT),
  ).min()
  words = lax.bitcast_convert_type(take(flat, div(fault, 2)), jnp.int32)
  return jnp.concatenate([fault[None], words.reshape(-1)])


def check_routing(
  dims: Dims,
  dtype: jnp.dtype,
  faults: jax.Array,
  configs: jax.Array,
  needed: jax.Array,
) -> jax.Array:
  """Fails `ep_prepare` if any rank has an error; see `fail_if`.

  `dtype` is the dtype of `topk_idx`. Each rank has a row of `find_fault` in
  `faults` [P, n], a hash of its configuration in `configs` [P], and the receive
  rows that it needs in `needed` [P].
  """
  layer = dims.layer
  op = f'ep_prepare(layer "{layer.name}")'

  def fail(faults: Any, configs: Any, needed: Any) -> NoReturn:
    if (configs != configs[0]).any():
      raise _disagreement(op, "a hash of the configuration", configs)
    for rank, (fault, *words) in enumerate(faults):
      if fault == errors.NO_FAULT:
        continue
      expert = np.array(words, np.int32).view(dtype)[0]
      raise errors.wrong_choice(
        f"{op}, rank {rank}", int(fault), expert, dims.K, dims.E
      )
    rank = int(np.argmax(needed > dims.C))
    raise ValueError(
      f"{op}: rank {rank} needs {needed[rank]} receive rows, but the capacity"
      f" is {dims.C}; raise capacity_factor or recv_capacity_per_rank, balance"
      ' the routing, or use overflow="drop"'
    )

  failed = (faults[:, 0] < errors.NO_FAULT) | (configs != configs[0])
  if not dims.drop:
    failed |= needed > dims.C
  return fail_if(
    failed.any(), fail, faults, configs, needed, can_raise=dims.can_raise
  )


def check_plan(
  dims: Dims, op: str, routing: jax.Array, is_sound: jax.Array
) -> jax.Array:
  """Returns `is_sound`; on CPUs, fails unless all ranks have sound plans.

  The plans must have the same routing. On other platforms, where a check would
  make each op wait for the host, results of unsound plans are NaN instead.
  """
  what = f'{op}(layer "{dims.layer.name}")'

  def fail(shared: np.ndarray) -> NoReturn:
    unsound, routing = shared.T
    if unsound.any():
      raise ValueError(
        f"{what}, rank {np.argmax(unsound)}: handle.mem is not the routing"
        " state that ep_prepare returned on this rank for this layer; pass that"
        " handle unchanged"
      )
    raise _disagreement(what, "the routing of the handle", routing)

  def check(routing: jax.Array, is_sound: jax.Array) -> jax.Array:
    shared = jnp.concatenate([int32(~is_sound)[None], routing])
    (shared,) = share(dims, shared)
    failed = (shared[:, 0] > 0).any() | (shared[:, 1] != shared[0, 1]).any()
    return is_sound & (fail_if(failed, fail, shared, can_raise=True) == 0)

  if not dims.can_raise:
    return is_sound
  checked: jax.Array = lax.platform_dependent(
    routing, is_sound, cpu=check, default=lambda _, is_sound: is_sound
  )
  return checked


def _disagreement(what: str, value: str, of_ranks: np.ndarray) -> ValueError:
  other = int(np.argmax(of_ranks != of_ranks[0]))
  return ValueError(
    f"{what}: the ranks disagree on {value}: {of_ranks[0]} on rank 0,"
    f" {of_ranks[other]} on rank {other}; every rank must run the same program"
    " on the same layer and handle"
  )


def check_finite(dims: Dims, out: jax.Array) -> jax.Array:
  """Returns `out` [T, H] of `ep_combine`; fails if an element is not finite."""
  wrong = ~jnp.isfinite(out).reshape(-1)
  first = jnp.stack([int32(wrong.any()), int32(jnp.argmax(wrong))])
  (all_first,) = share(dims, first)

  def fail(all_first: np.ndarray) -> NoReturn:
    rank = int(np.argmax(all_first[:, 0]))
    token, column = divmod(int(all_first[rank, 1]), out.shape[1])
    raise ValueError(
      f'ep_combine(layer "{dims.layer.name}"): out[{token}, {column}] of rank'
      f" {rank} is not finite"
    )

  failed = fail_if(
    (all_first[:, 0] > 0).any(), fail, all_first, can_raise=dims.can_raise
  )
  checked: jax.Array = lax.optimization_barrier((out, failed))[0]
  return checked
