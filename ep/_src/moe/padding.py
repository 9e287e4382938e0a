# SPDX-License-Identifier: Apache-2.0
"""Pads tokens of the global view to a number that ranks can share.

In the global view the first axis of tokens is split over R ranks, in parts of
one size. A batch of 1 or 6 cannot be split over 4 ranks, so tokens that visit
no expert are added to it.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ep._src.ops import views


@dataclasses.dataclass(frozen=True)
class Padding:
  """The tokens that are added to [*lead, ...] so that all ranks get as many.

  No tokens are added, and arrays stay as they are, if the first axis is a
  multiple of R already, and in the local view, where a rank has any number of
  tokens. Differentiable.

  Attributes:
    lead: the leading axes of the tokens.
    count: how many tokens are added to the flattened leading axes; None for
      none.
  """

  lead: tuple[int, ...]
  count: int | None = None

  @classmethod
  def of(cls, view: views.View, lead: Sequence[int]) -> Padding:
    """Returns the least padding in a view."""
    lead, ranks = tuple(lead), view.group.num_token_ranks
    if view.is_local or (lead and lead[0] % ranks == 0):
      return cls(lead)
    return cls(lead, -math.prod(lead) % ranks)

  def add(self, array: jax.Array, value: jax.typing.ArrayLike) -> jax.Array:
    """Returns [*lead, ...] as [tokens, ...]; added tokens have `value`.

    The result is not split over the ranks; `View.call` splits it.
    """
    if self.count is None:
      return array
    rest = array.shape[len(self.lead) :]
    array = _whole(array).reshape(math.prod(self.lead), *rest)
    widths = [(0, self.count), *[(0, 0)] * len(rest)]
    return jnp.pad(array, widths, constant_values=value)

  def remove(self, array: jax.Array) -> jax.Array:
    """Returns [tokens, ...] as [*lead, ...], without those that were added.

    The result is not split over the ranks, because it cannot be.
    """
    if self.count is None:
      return array
    array = _whole(array)[: math.prod(self.lead)]
    return array.reshape(*self.lead, *array.shape[1:])


def _whole(array: jax.Array) -> jax.Array:
  """Returns the array with a type that splits it over no Explicit axis."""
  mesh = jax.typeof(array).sharding.mesh
  return views.resharded(mesh, PartitionSpec(), array)
