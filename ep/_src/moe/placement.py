# SPDX-License-Identifier: Apache-2.0
"""Placement: which expert each slot of each rank holds."""

from __future__ import annotations

from collections.abc import Sequence
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ep._src.base import arguments, arrays


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

  It is a pytree of one array. So a jitted program gets another placement of as
  many experts without being compiled again, and stacked layers, each with a
  placement of its own, are scanned with it.

  Args:
    experts: integers [..., V], the expert of each slot; axes in front are
      layers. Each expert of 0..E-1 has a slot or several, which hold its
      copies; `ep.MoE` takes V = E. An array of JAX's is not checked: each of
      its experts must have one slot.

  Attributes:
    experts: int32 [..., V], NumPy's unless it was given as JAX's.
    num_experts: E.

  Raises:
    ValueError: an expert has no slot, or a number is negative.
    TypeError: these are no integers.
  """

  experts: np.ndarray | jax.Array
  num_experts: int

  def __init__(self, experts: Sequence[Any] | np.ndarray | jax.Array) -> None:
    if isinstance(experts, jax.Array):
      *_, self.num_experts = experts.shape
    else:
      experts = _checked(experts)
      self.num_experts = int(experts.max()) + 1
    self.experts = experts

  @property
  def slots(self) -> np.ndarray | jax.Array:
    """int32 [..., E], the slot of each expert.

    Raises:
      ValueError: an expert has several.
    """
    V, E = self.experts.shape[-1], self.num_experts
    arguments.check(
      V == E,
      "ep.Placement.slots",
      f"{V} slots hold {E} experts, so an expert has several; slots_of(ids)"
      " returns one of them for each choice.",
    )
    return self._by_expert

  @property
  def _by_expert(self) -> np.ndarray | jax.Array:
    """int32 [..., V], the slots of expert 0, then those of 1, and so on."""
    return self.experts.argsort(axis=-1, stable=True).astype(np.int32)

  def slots_of(self, ids: jax.Array) -> jax.Array:
    """Returns the slots of experts, for `ep_prepare` and `ep.moe_layer`.

    Their group has V experts. Tokens visit the n copies of an expert in turn:
    token t of `ids` visits copy t % n.

    Args:
      ids: integers [..., K]. What is no expert becomes no slot, which the op
        refuses; -1 stays.

    Returns:
      int32 [..., K].

    Raises:
      ValueError: the placement is of several layers.
      TypeError: ids are no integers.
    """
    op = "ep.Placement.slots_of"
    arguments.check(
      self.experts.ndim == 1,
      op,
      f"slots of shape {self.experts.shape} are of several layers; take the"
      " placement of one.",
    )
    ids, slots = arrays.integers(op, "ids", ids), jnp.asarray(self._by_expert)
    V, E = slots.size, self.num_experts
    is_expert, at = (ids >= 0) & (ids < E), ids.clip(0, E - 1)
    if V > E:
      held = jnp.asarray(self.experts)[slots]
      first = jnp.searchsorted(held, jnp.arange(E + 1, dtype=held.dtype))
      *lead, _ = ids.shape
      token = jnp.arange(math.prod(lead), dtype=first.dtype).reshape(*lead, 1)
      at = first[at] + token % jnp.diff(first)[at]
    others = jnp.where(ids < 0, ids, ids + (V - E))
    return jnp.where(is_expert, slots.at[at].get(mode="clip"), others)

  def __repr__(self) -> str:
    return f"Placement({self.experts!r})"

  def tree_flatten_with_keys(self) -> tuple[Any, int]:
    """Returns the array, as JAX asks for it, and E."""
    leaves = [(jax.tree_util.GetAttrKey("experts"), self.experts)]
    return leaves, self.num_experts

  @classmethod
  def tree_unflatten(cls, num_experts: int, leaves: Sequence[Any]) -> Placement:
    """Returns a placement of what JAX has put in the place of the array."""
    self = object.__new__(cls)
    (self.experts,), self.num_experts = leaves, num_experts
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
  slots = placement.experts.shape
  arguments.check(
    slots[-1] == placement.num_experts == num_experts,
    what,
    f"{name} has slots {slots} and not one for each of {num_experts} experts;"
    " copies of a step are those of MoEConfig.replica_slots.",
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
      np.unique(of_layer).size == int(experts.max()) + 1
      for of_layer in experts.reshape(-1, experts.shape[-1])
    ),
    "ep.Placement",
    f"experts have shape {experts.shape}, but they must be [..., V], the expert"
    " of each slot of each rank in turn, with each of 0..E-1 once or more.",
  )
  return experts.astype(np.int32)
