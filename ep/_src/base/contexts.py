# SPDX-License-Identifier: Apache-2.0
"""Contexts that change how programs are traced.

The value of each is a part of the key of `jax.jit`'s caches.
"""

from __future__ import annotations

import contextlib
import os

import jax

# Checked mode costs time and finds mistakes where they are made.
_checked = jax.make_user_context(
  default_value=os.environ.get("EP_CHECKED", "0") not in ("", "0")
)


def checked(enabled: bool = True) -> contextlib.AbstractContextManager[None]:
  """Returns a context in which programs are traced with checks.

      with ep.checked():
        loss = step(params, batch)      # traced anew, once

  EP_CHECKED=1 in the environment turns it on for the whole process. All
  processes must do the same. In checked mode

  * rows and weights past the last slab are NaN where `tail="unspecified"`, in
    dispatch and in the backward of combine, so that results of a program that
    reads them are NaN (under `jax_debug_nans` or `jax_debug_infs` they are
    zero, checked or not);
  * what combine returns must be finite, or the run fails. With "host" it fails
    on that rank, with the element and the row that it came from, and on the
    others at their next exchange of the run. With "xla" it fails on all ranks,
    with the element. With "nccl" `EpGroup.check` or `ep_finalize` fails, on
    that rank;
  * errors name the step, counted from the program's first launch ("host").

  Checked or not, `ep_prepare` compares a hash of the configuration of group and
  layer across the ranks.
  """
  return _checked(enabled)


def is_checked() -> bool:
  """Returns whether ops that are traced here are checked."""
  return _checked.value


def tail(asked: str) -> str:
  """Returns what ops traced here write past the last slab.

  An unspecified tail is NaN in checked mode. It is zero where JAX fails ops
  that return a NaN or an infinity (jax_debug_nans, jax_debug_infs). A function
  that was traced before such an option changed is not traced again.
  """
  if asked == "zero" or jax.debug_nans.value or jax.debug_infs.value:
    return "zero"
  return "nan" if is_checked() else asked


# Whether ops that are traced here belong to a trace; see `ep.trace`.
in_trace = jax.make_user_context(
  default_value=os.environ.get("EP_TRACE", "") != ""
)

# The function that sees every routing which `ep_prepare` traces here, or None.
# It is called as `tap(layer, topk_idx, topk_weights, leaves)` with the arrays of
# a rank, where `topk_weights` may be None, and the leaves of its handle. It
# returns the leaves, so that a use of one has the tap look. It is hashable.
tapping = jax.make_user_context(default_value=None)
