# SPDX-License-Identifier: Apache-2.0
"""Contexts that change how programs are traced.

The value of each context is part of the key of `jax.jit`'s caches.
"""

from __future__ import annotations

import contextlib
import os

import jax

from ep._src.base import arguments

_checked = jax.make_user_context(
  default_value=os.environ.get("EP_CHECKED", "0") not in ("", "0")
)


def checked(enabled: bool = True) -> contextlib.AbstractContextManager[None]:
  """Returns a context in which programs are traced with checks.

      with ep.checked():
        loss = step(params, batch)      # traced anew, once

  EP_CHECKED=1 in the environment turns on checked mode for the whole process.
  All processes must use the same mode. In checked mode

  * rows and weights past the last slab are NaN where `tail="unspecified"`, in
    dispatch and in the backward of combine, so a program that reads them
    computes NaN (under `jax_debug_nans` or `jax_debug_infs` they are zero in
    both modes);
  * a result of combine that is not finite fails the run. With "host" the run
    fails on that rank, with the element and its source row, and on the others
    at their next exchange of the run. With "xla" the run fails on all ranks,
    with the element. With "nccl" `EpGroup.raise_failures` or `ep_finalize`
    fails on that rank;
  * errors name the step, counted from the program's first launch ("host").

  Programs of "xla" then also raise the faults of a routing if the group has
  `errors="flag"`. In both modes `ep_prepare` compares a hash of the
  configurations of group and layer across the ranks.
  """
  enabled = arguments.flag("ep.checked", "enabled", enabled)
  context: contextlib.AbstractContextManager[None] = _checked(enabled)
  return context


def is_checked() -> bool:
  """Returns whether JAX traces in checked mode now."""
  return bool(_checked.value)


def tail(asked: str) -> str:
  """Returns how ops that JAX traces now fill the rows past the last slab.

  An unspecified tail is NaN in checked mode, and zero under jax_debug_nans and
  jax_debug_infs, because JAX would fail ops that return a NaN. JAX does not
  trace a function again when one of the two debug options changes.
  """
  if asked == "zero" or jax.debug_nans.value or jax.debug_infs.value:
    return "zero"
  return "nan" if _checked.value else asked
