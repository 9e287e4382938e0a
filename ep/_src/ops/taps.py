# SPDX-License-Identifier: Apache-2.0
"""Lets a context see every routing that `ep_prepare` traces in it."""

from __future__ import annotations

from typing import Protocol

import jax

from ep._src.base.config import LayerConfig


class Tap(Protocol):
  """What looks at routings. Hashable: it is a part of the key of JAX's caches.

  Attributes:
    weights: whether it looks at the weights as well.
  """

  weights: bool

  def wants(self, layer: str) -> bool:
    """Returns whether it looks at the routings of layers of this name."""
    ...

  def __call__(
    self,
    layer: LayerConfig,
    topk_idx: jax.Array,
    topk_weights: jax.Array | None,
    leaves: list[jax.Array | None],
  ) -> list[jax.Array | None]:
    """Returns the leaves of a handle, so that whoever uses one has it look.

    It gets the arrays of a rank, and the weights if it looks at them and there
    are any.
    """
    ...


# `with tapping(tap):` is the context; None ends one within.
tapping = jax.make_user_context(default_value=None)


def current(layer: LayerConfig) -> Tap | None:
  """Returns the tap of the context, if it looks at this layer's routings."""
  tap: Tap | None = tapping.value
  return tap if tap is not None and tap.wants(layer.name) else None
