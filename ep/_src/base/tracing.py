# SPDX-License-Identifier: Apache-2.0
"""Whether programs are traced for a trace; see `ep.trace`."""

from __future__ import annotations

import os

import jax

# The value of this context is a part of the key of `jax.jit`'s caches.
on = jax.make_user_context(default_value=os.environ.get("EP_TRACE", "") != "")


def is_on() -> bool:
  """Returns whether ops that are traced here belong to a trace."""
  return on.value
