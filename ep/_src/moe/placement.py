# SPDX-License-Identifier: Apache-2.0
"""Placement: which expert each slot of each rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ep._src.base import arguments


@jax.tree_util.register_pytree_with_keys_class
class Placement:
  """Says which expert is where: rank r of P has slots r * L to r * L + L - 1.

      placement = ep.place(loads, cluster)      # or ep.Placement([2, 0, 3, 1])
      params = ep.moe.move(
        layer.group, params, layer.specs(), old=None, new=placement
      )
      y, metrics = layer(params, x, state, placement=placement)

  A program numbers its experts as it likes; the ops number slots. A layer that
  gets a placement takes the experts' numbers everywhere but in the leading axis
  of its experts' parameters, which has the order of the slots.

  It is a pytree of one array. So a jitted program gets another placement
  without being compiled again, and stacked layers, each with a placement of its
  own, are scanned with it.

  Args:
    experts: integers [..., V], the expert of each slot; axes in front are
      layers. Each expert of 0..E-1 has a slot or several, which hold its
      copies; `ep.MoE` takes V = E. An array of JAX's is not checked.

  Attributes:
    experts: int32 [..., V], NumPy's unless it was given as JAX's.

  Raises:
    ValueError: an expert has no slot, or a number is negative.
    TypeError: these are no integers.
  """

  experts: np.ndarray | jax.Array

  def __init__(self, experts: Sequence[Any] | np.ndarray | jax.Array) -> None:
    if not isinstance(experts, jax.Array):
      experts = _checked(experts)
    self.experts = experts

  @property
  def slots(self) -> np.ndarray | jax.Array:
    """int32 [..., E], the slot of each expert, if each has one."""
    return self.experts.argsort(axis=-1).astype(np.int32)

  def slots_of(self, ids: jax.Array) -> jax.Array:
    """Returns the slots of experts, for `ep_prepare` and `ep.moe_layer`.

    Of one layer whose experts have one slot each.

    Args:
      ids: int32 or int64 [..., K]. What is no expert, such as -1, stays.
    """
    ids, slots = jnp.asarray(ids), jnp.asarray(self.slots)
    is_expert = (ids >= 0) & (ids < slots.size)
    return jnp.where(is_expert, slots.at[ids].get(mode="clip"), ids)

  def __repr__(self) -> str:
    return f"Placement({self.experts!r})"

  def tree_flatten_with_keys(self) -> tuple[Any, None]:
    """Returns the array, as JAX asks for it."""
    return [(jax.tree_util.GetAttrKey("experts"), self.experts)], None

  @classmethod
  def tree_unflatten(cls, _: None, leaves: Sequence[Any]) -> Placement:
    """Returns a placement of what JAX has put in the place of the array."""
    self = object.__new__(cls)
    (self.experts,) = leaves
    return self


def check_placement(
  what: str, name: str, placement: Placement | None, num_experts: int
) -> None:
  """Raises unless it is None, or a placement with a slot for each expert."""
  if placement is None:
    return
  if not isinstance(placement, Placement):
    raise TypeError(
      f"{what}: {name} is a {type(placement).__name__}, but an ep.Placement or"
      " None is expected."
    )
  experts = placement.experts
  arguments.check(
    experts.shape[-1:] == (num_experts,)
    and not (
      isinstance(experts, np.ndarray)
      and (experts.max(axis=-1) != num_experts - 1).any()
    ),
    what,
    f"{name} has slots {experts.shape} and not one for each of {num_experts}"
    " experts; copies of a step are those of MoEConfig.replica_slots.",
  )


def _checked(experts) -> np.ndarray:
  experts = np.asarray(experts)
  if experts.dtype.kind not in "iu":
    raise TypeError(
      f"ep.Placement: experts are {experts.dtype}, but integers are expected."
    )
  arguments.check(
    experts.size > 0
    and experts.ndim > 0
    and experts.min() == 0
    and all(
      np.unique(of_layer).size == int(of_layer.max()) + 1
      for of_layer in experts.reshape(-1, experts.shape[-1])
    ),
    "ep.Placement",
    f"experts have shape {experts.shape}, but they must be [..., V], the expert"
    " of each slot of each rank in turn, with each of 0..E-1 once or more.",
  )
  return experts.astype(np.int32)
