# SPDX-License-Identifier: Apache-2.0
"""Parameters and arrays that several test files share."""

import jax.numpy as jnp
import numpy as np
import pytest

from groups import E

DTYPES = pytest.mark.parametrize(
  "dtype", [jnp.float32, jnp.bfloat16, jnp.float16]
)


def logits_of(*lead, dtype=np.float32):
  """Draws a router's logits `[*lead, E]`."""
  rng = np.random.default_rng(0)
  return np.asarray(rng.normal(size=(*lead, E)) * 2, dtype)
