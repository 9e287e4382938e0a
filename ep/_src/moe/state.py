# SPDX-License-Identifier: Apache-2.0
"""State: what a MoE layer keeps between steps besides its parameters."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ep._src.base import arguments, arrays


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

    Loads are compared as whole numbers: an expert with exactly the mean keeps
    its entry.

    Args:
      load: [..., E], the `Metrics.load` of the step, or the sum of the loads of
        its microbatches.
      rate: how far an entry moves, in units of a score.

    Raises:
      ValueError: the shapes differ.
      TypeError: the bias is not float32.
    """
    what = "ep.moe.State.after"
    bias = arrays.float32(what, "bias", self.bias)
    load = jnp.asarray(load).astype(jnp.float32)
    arguments.check(
      bias.shape == load.shape,
      what,
      f"bias has shape {bias.shape}, but load {load.shape}; pass the"
      " Metrics.load of the same layers.",
    )
    # A mean of float32 rounds, and the product E * load, which needs no mean,
    # would round as well. The sums of quotients and of remainders are small.
    experts = load.shape[-1]
    load -= load.min(axis=-1, keepdims=True)
    quotient = jnp.floor(load / experts)
    remainder = load - experts * quotient
    above = load - quotient.sum(axis=-1, keepdims=True)
    side = jnp.sign(remainder.sum(axis=-1, keepdims=True) - experts * above)
    return State(bias + (rate * side).astype(bias.dtype))
