# SPDX-License-Identifier: Apache-2.0
"""Experts: the feed-forward network of each expert, as plain data."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

Activation = Callable[[jax.Array], jax.Array]
Weigh = Literal["late", "early", "input"]


@dataclasses.dataclass(frozen=True)
class Experts:
  """Describes the network of an expert, for a row x.

  The hidden activations h are, with gates and without,

      activation(x @ w_gate + b_gate) * up_activation(x @ w_up + b_up)
      activation(x @ w_up + b_up)

  and the expert's output is h @ w_down + b_down. An expert has gates and biases
  if its parameters do.

  Attributes:
    activation: elementwise.
    up_activation: elementwise; None is the identity.
    weigh: whether the routing weights multiply the outputs while they are
      summed ("late"), or h ("early"), which gives the same but for rounding, or
      x ("input"), which is another function.
    deterministic: whether gradients of parameters are sums over source ranks,
      added as in ordered_sum.py.
  """

  activation: Activation = jax.nn.silu
  up_activation: Activation | None = None
  weigh: Weigh = "late"
  deterministic: bool = False

  def is_traced(self) -> bool:
    """Returns whether its functions close over values that are traced now.

    Then programs with it must not be kept: they would keep these values.
    """
    block = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    return any(
      isinstance(value, jax.core.Tracer)
      for fn in (self.activation, self.up_activation)
      if fn is not None
      for value in jax.make_jaxpr(fn)(block).consts
    )

  def hidden(self, up: jax.Array, gate: jax.Array | None = None) -> jax.Array:
    """Returns h of the two products with x, biases included."""
    if gate is None:
      return self.activation(up)
    if self.up_activation is not None:
      up = self.up_activation(up)
    return self.activation(gate) * up
