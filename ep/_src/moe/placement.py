# SPDX-License-Identifier: Apache-2.0
"""`Placement` maps slots to experts; `move` reorders arrays of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from ep._src.base import arguments, arrays
from ep._src.base.group import check_group, EpGroup
from ep._src.lax.ragged_all_to_all import ragged_all_to_all
from ep._src.moe.parameters import split_axis
from ep._src.ops.views import mapped, REPLICATED, View


@jax.tree_util.register_pytree_with_keys_class
class Placement:
  """A map from slots to experts: rank r has slots r * L to r * L + L - 1.

      placement = ep.place(loads, num_ranks)    # or ep.Placement([2, 0, 3, 1])
      params = ep.moe.move(
        layer.group, params, layer.specs(), old=None, new=placement
      )
      y, metrics = layer(params, x, state, placement=placement)

  The ops take slots as ids. A layer with a placement takes expert ids; only the
  leading axis of its experts' parameters has the order of the slots.

  A placement is a pytree of one array. So a jitted program takes another
  placement without compiling again, and `lax.scan` over stacked layers takes a
  placement for each layer.

  Args:
    experts: integers [..., V], the expert of each slot, where V = P * L;
      leading axes are layers. Each of 0..V-1 has one slot. If P does not divide
      E, the numbers from E on are empty slots. The values of a JAX array are
      not checked.

  Attributes:
    experts: int32 [..., V], a NumPy array unless a JAX array was given.

  Raises:
    ValueError: an expert has no slot.
    TypeError: the experts are no integers.
  """

  experts: np.ndarray | jax.Array

  def __init__(self, experts: Sequence[Any] | np.ndarray | jax.Array) -> None:
    what, is_known = "ep.Placement", not isinstance(experts, jax.Array)
    array: Any = np.asarray(experts) if is_known else experts
    if not jnp.issubdtype(array.dtype, jnp.integer):
      raise TypeError(
        f"{what}: experts are {array.dtype}, but integers are expected."
      )
    is_valid = array.size > 0 and array.ndim > 0
    if is_valid and is_known:
      is_valid = bool((np.sort(array) == np.arange(array.shape[-1])).all())
    arguments.check(
      is_valid,
      what,
      f"experts have shape {array.shape}, but they must be [..., V], the expert"
      " of each slot, with each of 0..V-1 once.",
    )
    self.experts = array.astype(np.int32)

  @property
  def slots(self) -> np.ndarray | jax.Array:
    """int32 [..., V], the slot of each expert."""
    return self.experts.argsort(axis=-1).astype(np.int32)

  def slots_of(self, ids: jax.Array) -> jax.Array:
    """Returns the slots of experts, for `ep_prepare` and `ep.moe_layer`.

    The group must have V experts.

    Args:
      ids: integers [..., K], where -1 is an unused choice. An invalid id
        becomes an invalid slot, which the op refuses.

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
    ids, slots = arrays.integers(op, "ids", ids), jnp.asarray(self.slots)
    is_expert = (ids >= 0) & (ids < slots.size)
    return jnp.where(is_expert, slots.at[ids].get(mode="clip"), ids)

  def __repr__(self) -> str:
    return f"Placement({self.experts!r})"

  def tree_flatten_with_keys(self) -> tuple[Any, None]:
    """Returns the array with its pytree key; a placement has no static data."""
    return [(jax.tree_util.GetAttrKey("experts"), self.experts)], None

  @classmethod
  def tree_unflatten(cls, static: None, leaves: Sequence[Any]) -> Placement:
    """Returns a placement without checks: leaves may be any objects."""
    del static
    self = object.__new__(cls)
    (self.experts,) = leaves
    return self


def check_placement(
  what: str, name: str, placement: Placement | None, num_slots: int
) -> None:
  """Raises unless `placement` is None or has `num_slots` slots."""
  if placement is None:
    return
  cure = "pass an ep.Placement, or None"
  arguments.check_type(what, name, placement, Placement, cure)
  slots = placement.experts.shape
  arguments.check(
    slots[-1] == num_slots,
    what,
    f"{name} has slots {slots}, but {num_slots} are expected: one for each"
    " expert and each empty slot.",
  )


def move(
  group: EpGroup,
  arrays: Any,
  specs: Any,
  *,
  old: Placement | None,
  new: Placement | None,
) -> Any:
  """Reorders arrays of experts from one placement to another, bit for bit.

      new = ep.place(loads, layer.group.ep_size)
      params = ep.moe.move(
        layer.group, params, layer.specs(), old=placement, new=new
      )
      saved = ep.moe.move(layer.group, params, layer.specs(), old=new, new=None)

  Collective over the EP domain. None stands for the order of expert ids. Save
  checkpoints in this order, so that they do not depend on placements. Apply
  `move` also to arrays shaped like parameters, such as an optimizer's moments.

  `move` reorders each array whose spec names the EP axis, into a new array. It
  sends experts that change ranks by `ep.lax.ragged_all_to_all`; on CPUs each
  rank gathers all experts, one array after another.

  Differentiable. Works in both views. Outside of `jax.jit`, `move` compiles one
  program for each shape and dtype; the program takes any placement.

  Args:
    group: the group over whose EP axis the experts are split.
    arrays: a pytree of arrays of any dtype. The axis of experts has P * L
      entries, or L in the local view.
    specs: a `PartitionSpec` for each array, or a pytree of them that is a
      prefix of `arrays`.
    old: the current placement of the experts.
    new: the new placement. If both are None, `arrays` is returned. If a
      placement has axes of layers, arrays have the same axes before the axis of
      experts; a placement without them is for all layers.

  Returns:
    A pytree like `arrays`. Arrays without experts are the same objects.

  Raises:
    ValueError: a shape or spec does not fit; the array is named.
    TypeError: an argument is no placement, or an array holds PRNG keys.
  """
  op = "ep.moe.move"
  check_group(op, group)
  view = View.of(group, op)
  if old is None and new is None:
    return arrays
  V = group.num_expert_slots
  for name, placement in dict(old=old, new=new).items():
    check_placement(op, name, placement, V)

  def of(path: Any, x: jax.Array, spec: PartitionSpec) -> Any:
    at = split_axis(spec, group.axis_name)
    if at is None:
      return x
    what = f"{op}: arrays{jax.tree_util.keystr(path)} of shape {x.shape}"
    arguments.check(
      spec[at] in (group.axis_name, (group.axis_name,)),
      what,
      f"is split by {spec[at]}, but experts are split over"
      f" {group.axis_name!r} alone; give it another spec.",
    )
    experts = V // group.ep_size if view.is_local else V
    arguments.check(
      x.ndim > at and x.shape[at] == experts,
      what,
      f"has not {experts} entries along axis {at}, where {spec} splits the"
      " experts.",
    )
    for placement in (old, new):
      lead = () if placement is None else placement.experts.shape[:-1]
      arguments.check(
        not lead or (lead == x.shape[:at] and not any(spec[:at])),
        what,
        f"a placement is of layers {lead}, but the axes in front of the"
        f" experts are {x.shape[:at]}, split by {tuple(spec[:at])}; they must"
        " be the same, and whole on each rank.",
      )
    moved: jax.Array
    moved = _moved.in_view(view, [group.axis_name, at, spec], old, new, x)
    return moved

  return jax.tree.map_with_path(of, arrays, jax.tree.broadcast(specs, arrays))


@mapped(
  lambda axis_name, at, spec: [REPLICATED, REPLICATED, spec],
  lambda axis_name, at, spec: spec,
)
def _moved(
  axis_name: str,
  at: int,
  spec: PartitionSpec,
  old: Placement | None,
  new: Placement | None,
  x: jax.Array,
) -> jax.Array:
  """Returns a rank's part [*layers, L, ...] of an array after the move.

  An expert of a layer has one slice for each rank. The slice for its new rank
  has one row, the slices for other ranks have none.
  """
  del spec
  if not x.size:
    return x
  P, L = lax.axis_size(axis_name), x.shape[at]
  to = _new_slots(old, new, P * L)
  to = jnp.broadcast_to(to, (*x.shape[:at], P * L)).reshape(-1, P, L)
  rank, me = lax.iota(jnp.int32, P)[:, None, None], lax.axis_index(axis_name)
  own = to[:, me]
  sent, received = own[None] // L == rank, to.swapaxes(0, 1) // L == me
  first = L * lax.iota(jnp.int32, len(to))[:, None]

  def of_slices(values: jax.Array) -> jax.Array:
    """Broadcasts values to [P, layers, L], and flattens them to int32."""
    return jnp.broadcast_to(values, sent.shape).ravel().astype(jnp.int32)

  rows = x.reshape(-1, *x.shape[at + 1 :])
  moved = ragged_all_to_all(
    rows,
    jnp.zeros_like(rows),
    of_slices(first + lax.iota(jnp.int32, L)[None]),
    of_slices(sent),
    of_slices(first + own % L),
    of_slices(received),
    axis_name=axis_name,
  )
  return moved.reshape(x.shape)


def _new_slots(
  old: Placement | None, new: Placement | None, num_experts: int
) -> jax.Array:
  """Returns [..., E], the new slot of the expert in each old slot."""
  experts = lax.iota(jnp.int32, num_experts)
  if old is not None:
    experts = jnp.asarray(old.experts)
  if new is None:
    return experts
  slots = jnp.asarray(new.slots)
  shape = jnp.broadcast_shapes(experts.shape, slots.shape)
  experts, slots = (jnp.broadcast_to(x, shape) for x in (experts, slots))
  return jnp.take_along_axis(slots, experts, axis=-1)
