# SPDX-License-Identifier: Apache-2.0
"""Raises an error of any rank on all ranks, for the backend "xla".

An op calls a Python function, which raises. In a program that cannot call
Python, or must not (`ep_bootstrap(errors="flag")`), the op's results are NaN
instead, and a handle carries the fault of its routing.
"""

from __future__ import annotations

from typing import NoReturn

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from ep._src.backends.xla.exchanges import share
from ep._src.backends.xla.plans import int32
from ep._src.base import errors
from ep._src.base.errors import fail_if
from ep._src.base.group import Sizes


def check_plan(
  sizes: Sizes,
  on_cpus: bool | None,
  op: str,
  routing: jax.Array,
  is_sound: jax.Array,
) -> jax.Array:
  """Returns `is_sound`; on CPUs, fails unless all ranks have sound plans.

  The plans must have the same routing. On other platforms, where a check would
  make each op wait for the host, results of unsound plans are NaN instead.
  """
  what = f'{op}(layer "{sizes.name}")'

  def fail(shared: np.ndarray) -> NoReturn:
    unsound, routing = shared.T
    if unsound.any():
      raise ValueError(
        f"{what}, rank {np.argmax(unsound)}: handle.mem is not the routing"
        " state that ep_prepare returned on this rank for this layer; pass that"
        " handle unchanged"
      )
    raise errors.disagreement(what, "the routing of the handle", routing)

  def check(routing: jax.Array, is_sound: jax.Array) -> jax.Array:
    shared = jnp.concatenate([int32(~is_sound)[None], routing])
    (shared,) = share(sizes, shared)
    failed = (shared[:, 0] > 0).any() | (shared[:, 1] != shared[0, 1]).any()
    return is_sound & (fail_if(failed, fail, shared, can_raise=True) == 0)

  if not sizes.raises or on_cpus is False:
    return is_sound
  if on_cpus:
    return check(routing, is_sound)
  checked: jax.Array = lax.platform_dependent(
    routing, is_sound, cpu=check, default=lambda _, is_sound: is_sound
  )
  return checked


def check_finite(sizes: Sizes, out: jax.Array) -> jax.Array:
  """Returns `out` [T, H] of `ep_combine`; fails if an element is not finite."""
  wrong = ~jnp.isfinite(out).reshape(-1)
  first = jnp.stack([int32(wrong.any()), int32(jnp.argmax(wrong))])
  (all_first,) = share(sizes, first)

  def fail(all_first: np.ndarray) -> NoReturn:
    rank = int(np.argmax(all_first[:, 0]))
    token, column = divmod(int(all_first[rank, 1]), out.shape[1])
    raise ValueError(
      f'ep_combine(layer "{sizes.name}"): out[{token}, {column}] of rank'
      f" {rank} is not finite"
    )

  failed = fail_if(
    (all_first[:, 0] > 0).any(), fail, all_first, can_raise=sizes.raises
  )
  checked: jax.Array = lax.optimization_barrier((out, failed))[0]
  return checked
