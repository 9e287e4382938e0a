# SPDX-License-Identifier: Apache-2.0
"""The shared expert, and when it runs beside the exchange."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses

import jax
from jax import lax
import jax.numpy as jnp

from ep._src.base import compat
from ep._src.moe.config import MoEConfig


@dataclasses.dataclass(frozen=True)
class SharedExpert:
  """The expert of all tokens, in two halves: products before and after h.

  Its output is 0 where `mask` is False.
  """

  config: MoEConfig
  params: Mapping[str, jax.Array]
  mask: jax.Array | None = None

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.output(self.hidden(x))

  @jax.named_scope("shared_experts")
  def hidden(self, x: jax.Array) -> jax.Array:
    """Returns h [..., S] of tokens [..., H]."""
    names = ["up", "gate"] if self.config.gated else ["up"]
    products = (self._product(x, name) for name in names)
    return self.config.experts.hidden(*products)

  @jax.named_scope("shared_experts")
  def output(self, hidden: jax.Array) -> jax.Array:
    """Returns the output [..., H] of h."""
    out = self._product(hidden, "down")
    return out if self.mask is None else jnp.where(self.mask[..., None], out, 0)

  def _product(self, x, name):
    return x @ self.params["shared_" + name].astype(x.dtype)


def together(*xs: jax.Array) -> tuple[jax.Array, ...]:
  """Returns arrays, none of which XLA uses before it has computed all.

  The same holds for their cotangents. So where one array comes from an
  exchange, the others are computed while rows are under way.
  """
  return tuple(lax.optimization_barrier(compat.vary_together(*xs)))
