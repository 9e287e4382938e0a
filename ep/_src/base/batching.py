# SPDX-License-Identifier: Apache-2.0
"""`vmap` of a primitive: one application for each example, in order."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ep._src.base import compat


def batch_sequentially(primitive: compat.Primitive) -> None:
  """Gives a primitive of several results a rule for any batched operands."""

  def rule(args, dims, **params):
    is_batched = [d is not None for d in dims]
    batched = [
      jnp.moveaxis(x, d, 0)
      for x, d in zip(args, dims, strict=True)
      if d is not None
    ]

    def one(examples):
      examples = iter(examples)
      operands = [
        next(examples) if b else x
        for x, b in zip(args, is_batched, strict=True)
      ]
      return primitive.bind(*operands, **params)

    outs = jax.lax.map(one, batched)
    return outs, [0] * len(outs)

  compat.batching.primitive_batchers[primitive] = rule
