# SPDX-License-Identifier: Apache-2.0
"""Parameters and arrays that several test files share."""

import jax.numpy as jnp
import numpy as np
import pytest

from ep.testing._routings import ROUTINGS
from groups import E, T

DTYPES = pytest.mark.parametrize(
  "dtype", [jnp.float32, jnp.bfloat16, jnp.float16]
)

EVERY_ROUTING = pytest.mark.parametrize("routing", ROUTINGS)

# Options of `groups.layer`.
LAYERS = pytest.mark.parametrize(
  "options",
  [
    dict(mesh="dp2_ep2", alignment=4, top_k=1),
    dict(mesh="dp2_ep2", top_k=E),
    dict(mesh="dp4_ep1", alignment=8),
  ],
  ids=str,
)

# Leading dimensions of one rank's tokens.
LEADING_DIMS = pytest.mark.parametrize("lead", [(1, 2, 2), (T - 2,)], ids=str)


def logits_of(*lead, dtype=np.float32):
  """Draws a router's logits `[*lead, E]`."""
  rng = np.random.default_rng(0)
  return np.asarray(rng.normal(size=(*lead, E)) * 2, dtype)
