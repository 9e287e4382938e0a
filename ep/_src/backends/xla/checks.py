# SPDX-License-Identifier: Apache-2.0
"""backend="xla": finds what is wrong on any rank, and raises it on all.

An op fails by a call of Python that raises. A program that cannot call Python
goes on, with results that are NaN.
"""

from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from ep._src.backends.xla.exchanges import share
from ep._src.backends.xla.plans import Dims, int32, mem_bytes, Slabs
from ep._src.base.fail_if import fail_if


def find_fault(dims: Dims, idx: jax.Array) -> jax.Array:
  """Returns [kind, choice, id...] of the first wrong id.

  Kind 0 is none, 1 an id out of range, 2 an expert that its token repeats. The
  id takes as many words as its dtype.
  """
  T, K = idx.shape
  wrong = (idx < -1) | (idx >= dims.E)
  before = jnp.arange(K) < jnp.arange(K)[:, None]
  repeats = ((idx[:, :, None] == idx[:, None, :]) & before).any(2) & (idx >= 0)
  kind = jnp.where(wrong, 1, jnp.where(repeats, 2, 0)).reshape(T * K)
  choice = jnp.argmax(kind > 0)
  words = lax.bitcast_convert_type(idx.reshape(-1)[choice], jnp.int32)
  return jnp.concatenate(
    [int32(kind[choice])[None], int32(choice)[None], words.reshape(-1)]
  )


def check_routing(
  dims: Dims,
  dtype: jnp.dtype,
  faults: jax.Array,
  configs: jax.Array,
  slabs: Slabs,
) -> jax.Array:
  """Fails `ep_prepare` if a rank is at fault; see `fail_if`.

  Args:
    dims: the sizes of the op.
    dtype: the dtype of `topk_idx`.
    faults: [P, n], `find_fault` of each rank.
    configs: [P], the hash of each rank's configuration.
    slabs: the slabs of all ranks.
  """
  layer = dims.layer
  op = f'ep_prepare(layer "{layer.name}")'
  needed = slabs.end[:, -1]

  def fail(faults, configs, needed):
    if (configs != configs[0]).any():
      raise _disagreement(op, "a hash of the configuration", configs)
    for rank, (kind, choice, *words) in enumerate(faults):
      token, k = divmod(int(choice), dims.K)
      expert = np.array(words, np.int32).view(dtype)[0]
      what = f"{op}, rank {rank}: topk_idx[{token}, {k}] = {expert}"
      if kind == 1:
        raise ValueError(
          f"{what}, but num_experts = {dims.E}; valid ids are -1..{dims.E - 1}"
        )
      if kind == 2:
        raise ValueError(
          f"{what} repeats an expert of token {token}; the top-k experts of a"
          " token must be distinct (use -1 for an unused choice)"
        )
    rank = int(np.argmax(needed > dims.C))
    raise ValueError(
      f"{op}: rank {rank} needs {needed[rank]} receive rows, but"
      f" recv_capacity_per_rank = {dims.C}; raise the capacity, balance the"
      ' routing, or use overflow="drop"'
    )

  failed = (faults[:, 0] > 0).any() | (configs != configs[0]).any()
  if not dims.drop:
    failed |= (needed > dims.C).any()
  return fail_if(
    failed, fail, faults, configs, needed, can_raise=dims.can_raise
  )


def check_mem(dims: Dims, op: str, mem: jax.Array) -> None:
  """Raises `ValueError` if `mem` cannot be the packed plan of a rank."""
  size = mem_bytes(dims)
  if (mem.shape, mem.dtype) != ((size,), jnp.uint8):
    raise ValueError(
      f'{op}(layer "{dims.layer.name}"): handle.mem is {mem.dtype}'
      f" {list(mem.shape)}, but this layer's routing state is uint8 [{size}];"
      " pass the handle that ep_prepare returned for this layer and these"
      " tokens."
    )


def check_plan(
  dims: Dims, op: str, routing: jax.Array, is_sound: jax.Array
) -> jax.Array:
  """Returns `is_sound`; on CPUs, fails unless all ranks have sound plans.

  The plans must be of one routing. On other platforms a check would make the
  program wait for its host in every op, so there results are NaN instead.
  """
  what = f'{op}(layer "{dims.layer.name}")'

  def fail(shared):
    unsound, routing = shared.T
    if unsound.any():
      raise ValueError(
        f"{what}, rank {np.argmax(unsound)}: handle.mem is not the routing"
        " state that ep_prepare returned on this rank for this layer; pass that"
        " handle unchanged"
      )
    raise _disagreement(what, "the routing of the handle", routing)

  def check(routing, is_sound):
    shared = jnp.concatenate([int32(~is_sound)[None], routing])
    (shared,) = share(dims, shared)
    failed = (shared[:, 0] > 0).any() | (shared[:, 1] != shared[0, 1]).any()
    return is_sound & (fail_if(failed, fail, shared, can_raise=True) == 0)

  if not dims.can_raise:
    return is_sound
  return lax.platform_dependent(
    routing, is_sound, cpu=check, default=lambda _, is_sound: is_sound
  )


def _disagreement(what: str, value: str, of_ranks: np.ndarray) -> ValueError:
  other = int(np.argmax(of_ranks != of_ranks[0]))
  return ValueError(
    f"{what}: the ranks disagree on {value}: {of_ranks[0]} on rank 0,"
    f" {of_ranks[other]} on rank {other}; every rank must run the same program"
    " on the same layer and handle"
  )


def check_finite(dims: Dims, out: jax.Array) -> jax.Array:
  """Returns `out` [T, H] of `ep_combine`; fails if it is not finite."""
  wrong = ~jnp.isfinite(out).reshape(-1)
  first = jnp.stack([int32(wrong.any()), int32(jnp.argmax(wrong))])
  (all_first,) = share(dims, first)

  def fail(all_first):
    rank = int(np.argmax(all_first[:, 0]))
    token, column = divmod(int(all_first[rank, 1]), out.shape[1])
    raise ValueError(
      f'ep_combine(layer "{dims.layer.name}"): out[{token}, {column}] of rank'
      f" {rank} is not finite"
    )

  failed = fail_if(
    (all_first[:, 0] > 0).any(), fail, all_first, can_raise=dims.can_raise
  )
  return lax.optimization_barrier((out, failed))[0]
