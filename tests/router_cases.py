# SPDX-License-Identifier: Apache-2.0
"""Draws logits for the router's tests."""

import numpy as np

E, K = 8, 3


def logits_of(*lead, dtype=np.float32, seed=0):
  """Draws logits `[*lead, E]`."""
  rng = np.random.default_rng(seed)
  return np.asarray(rng.normal(size=(*lead, E)) * 2, dtype)
