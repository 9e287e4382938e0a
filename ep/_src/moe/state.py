# SPDX-License-Identifier: Apache-2.0
"""State: what a MoE layer keeps between steps besides its parameters."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ep._src.base import arguments


class State(NamedTuple):
  """Holds what changes from step to step without a gradient.

  A pytree, which belongs into a checkpoint with the parameters.

  Attributes:
    bias: float32 [..., E], added to the scores when experts are chosen, and to
      no weight. Axes in front are layers.
  """

  bias: jax.Array

  def after(self, load: jax.Array, rate: float = 1e-3) -> State:
    """Returns the state of the next step: the bias rises for idle experts.

    Each entry moves by `rate`, up if the expert had less than the mean load and
    down if it had more (Wang et al., "Auxiliary-Loss-Free Load Balancing
    Strategy for Mixture-of-Experts", arXiv 2408.15664, algorithm 1; DeepSeek-V3
    uses a rate of 0.001).

    Args:
      load: [..., E], the `Metrics.load` of the step, or the sum of the loads of
        its microbatches.
      rate: how far an entry moves, in units of a score.

    Raises:
      ValueError: the shapes differ.
    """
    arguments.check(
      jnp.shape(self.bias) == jnp.shape(load),
      "ep.moe.State.after",
      f"bias has shape {jnp.shape(self.bias)}, but load {jnp.shape(load)}; pass"
      " the Metrics.load of the same layers.",
    )
    mean = load.mean(axis=-1, keepdims=True)
    change = rate * jnp.sign(mean - load)
    return State(self.bias + change.astype(self.bias.dtype))
