# SPDX-License-Identifier: Apache-2.0
"""Pads tokens of the global view to a number that ranks can share.

There the first axis of tokens is split over R ranks, in parts of one size. A
batch of 1 or 6 on 4 ranks is not; with tokens that visit no expert beside it,
it is.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ep._src import sharding
from ep._src.group import EpGroup


@dataclasses.dataclass(frozen=True)
class Padding:
  """The tokens that are added to [*lead, ...] so that all ranks get as many.

  None are, and arrays stay as they are, if the first axis is a multiple of R
  already, and in the local view, where a rank has any number of tokens.
  Differentiable.

  Attributes:
    lead: the leading axes of the tokens.
    axes: the mesh axes over which tokens are split, if any are added.
    count: how many are added to the flattened leading axes.
  """

  lead: tuple[int, ...]
  axes: tuple[str, ...] = ()
  count: int = 0

  @classmethod
  def of(cls, group: EpGroup, op: str, lead: Sequence[int]) -> Padding:
    """Returns the least padding in the current view."""
    lead, ranks = tuple(lead), group.num_token_ranks
    if sharding.is_local_view(group, op) or (lead and lead[0] % ranks == 0):
      return cls(lead)
    return cls(lead, group.token_axes, -math.prod(lead) % ranks)

  def add(self, array: jax.Array, value: jax.typing.ArrayLike) -> jax.Array:
    """Returns [*lead, ...] as [tokens, ...], with `value` where they are added.

    The result is split over the ranks as tokens are.
    """
    if not self.axes:
      return array
    rest = array.shape[len(self.lead) :]
    array = _resharded(array).reshape(math.prod(self.lead), *rest)
    widths = [(0, self.count), *[(0, 0)] * len(rest)]
    array = jnp.pad(array, widths, constant_values=value)
    return _resharded(array, self.axes)

  def remove(self, array: jax.Array) -> jax.Array:
    """Returns [tokens, ...] as [*lead, ...], without those that were added.

    The result is not split over the ranks, because it cannot be.
    """
    if not self.axes:
      return array
    array = _resharded(array)[: math.prod(self.lead)]
    return array.reshape(*self.lead, *array.shape[1:])


def _resharded(array: jax.Array, *axes: Any) -> jax.Array:
  """Returns the array with another sharding, if its type has one.

  On Auto axes XLA chooses it.
  """
  mesh = jax.typeof(array).sharding.mesh
  if AxisType.Explicit not in mesh.axis_types:
    return array
  return jax.sharding.reshard(array, NamedSharding(mesh, PartitionSpec(*axes)))
