# SPDX-License-Identifier: Apache-2.0
"""Logits, choices, and the losses that the tests of the router share."""

import jax
import numpy as np

import ep

E, K = 8, 3

LOSSES = {
  "load": lambda x, i, m, a=(): ep.load_balancing_loss(
    x, i, mask=m, axis_name=a
  ),
  "load_sigmoid": lambda x, i, m, a=(): ep.load_balancing_loss(
    x, i, score="sigmoid", mask=m, axis_name=a
  ),
  "sequence": lambda x, i, m, a=(): ep.sequence_balancing_loss(
    x, i, score="sigmoid", mask=m, axis_name=a
  ),
  "z": lambda x, i, m, a=(): ep.router_z_loss(x, mask=m, axis_name=a),
  "entropy": lambda x, i, m, a=(): ep.router_entropy(x, mask=m, axis_name=a),
}


def logits_of(*lead, dtype=np.float32, seed=0):
  """Draws logits `[*lead, E]`."""
  rng = np.random.default_rng(seed)
  return np.asarray(rng.normal(size=(*lead, E)) * 2, dtype)


def batch():
  """Returns logits, choices and mask of 8 sequences, one of them empty.

  What is masked has choices, and logits that are NaN or large.
  """
  logits = logits_of(8, 6)
  idx = np.argsort(-logits, axis=-1)[..., :K]
  idx[1, 2, 0] = -1
  mask = np.random.default_rng(1).random((8, 6)) < 0.7
  mask[3] = False
  logits[~mask] = 50.0
  logits[3] = np.nan
  return logits, idx, mask


def all_with_gradients(logits, idx, mask, axis_name=()):
  """Returns the value of each loss, and its gradient."""
  return {
    name: jax.value_and_grad(loss)(logits, idx, mask, axis_name)
    for name, loss in LOSSES.items()
  }
