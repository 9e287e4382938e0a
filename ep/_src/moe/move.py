# SPDX-License-Identifier: Apache-2.0
"""move: brings the arrays of experts from one placement to another."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from ep._src.base import arguments
from ep._src.base.arrays import iota
from ep._src.group.group import EpGroup
from ep._src.lax.ragged_all_to_all import ragged_all_to_all
from ep._src.moe.placement import check_placement, Placement
from ep._src.ops import views


def move(
  group: EpGroup,
  arrays: Any,
  specs: Any,
  *,
  old: Placement | None,
  new: Placement | None,
) -> Any:
  """Moves arrays of experts from one placement to another, bit for bit.

      new = ep.place(loads, cluster)
      params = ep.moe.move(
        layer.group, params, layer.specs(), old=placement, new=new
      )
      saved = ep.moe.move(layer.group, params, layer.specs(), old=new, new=None)

  Collective over the EP domain. None is the order of the experts, which a
  checkpoint should have, so that it does not depend on placements. Parameters
  and whatever has their shape, such as an optimizer's moments, move alike.

  An array is one of experts if its spec names the EP axis. Experts that change
  ranks are sent, each to its new rank alone, by `ep.lax.ragged_all_to_all`; on
  CPUs each rank gathers all of them, one array after another. The result needs
  memory of its own.

  Works in both views, and outside of `jax.jit`, too, where it compiles a
  program for each shape and dtype, which serves all placements. It has a
  derivative.

  Args:
    group: whose EP axis the experts are split over.
    arrays: a pytree of arrays. Those of experts have E entries along the axis
      that is split, or L in the local view, and any dtype.
    specs: a `PartitionSpec` for each array, or a pytree of them whose leaves
      stand for all arrays below.
    old: where experts are now; None for their own order.
    new: where they shall be. If both are None, nothing moves. If a placement
      has axes of layers in front, arrays have the same axes in front of that of
      the experts; a placement without them is that of all layers.

  Returns:
    A pytree like `arrays`, in which arrays of no experts are the same objects.

  Raises:
    ValueError: a shape or spec does not fit; the array is named.
    TypeError: a placement is none, or the dtype is that of keys.
  """
  op = "ep.moe.move"
  view = views.View.of(group, op)
  if old is None and new is None:
    return arrays
  # The group of a layer with replica slots counts these, too.
  sizes = [p.experts.shape[-1] for p in (old, new) if isinstance(p, Placement)]
  E = min([group.num_experts, *sizes])
  for name, placement in dict(old=old, new=new).items():
    check_placement(op, name, placement, E)

  def of(path, x, spec):
    split = [i for i, axes in enumerate(spec) if _names(axes, group.axis_name)]
    if not split:
      return x
    what = f"{op}: arrays{jax.tree_util.keystr(path)} of shape {x.shape}"
    (at,) = split
    arguments.check(
      spec[at] in (group.axis_name, (group.axis_name,)),
      what,
      f"is split by {spec[at]}, but experts are split over"
      f" {group.axis_name!r} alone; give it another spec.",
    )
    experts = E // group.ep_size if view.is_local else E
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
    return view.call(
      _moved,
      [group.axis_name, at],
      [old, new, x],
      [views.REPLICATED] * 2 + [spec],
      spec,
    )

  return jax.tree.map_with_path(of, arrays, jax.tree.broadcast(specs, arrays))


def _names(axes, name):
  return axes == name or (isinstance(axes, tuple) and name in axes)


def _moved(axis_name, at, old, new, x):
  """Returns a rank's part [*layers, L, ...] of an array after the move.

  Each expert of each layer is a slice for each rank, which has one row on its
  new rank, and none on the others.
  """
  if not x.size:
    return x
  P, L = lax.axis_size(axis_name), x.shape[at]
  to = _new_slots(old, new, P * L)
  to = jnp.broadcast_to(to, (*x.shape[:at], P * L)).reshape(-1, P, L)
  rank, me = iota(P)[:, None, None], lax.axis_index(axis_name)
  own = to[:, me]
  goes, comes = own // L == rank, to.swapaxes(0, 1) // L == me  # [P, layers, L]
  first = L * iota(len(to))[:, None]

  def of_slices(values):
    return jnp.broadcast_to(values, goes.shape).ravel().astype(jnp.int32)

  rows = x.reshape(-1, *x.shape[at + 1 :])
  moved = ragged_all_to_all(
    rows,
    jnp.zeros_like(rows),
    of_slices(first + iota(L)),
    of_slices(goes),
    of_slices(first + own % L),
    of_slices(comes),
    axis_name=axis_name,
  )
  return moved.reshape(x.shape)


def _new_slots(old, new, num_experts):
  """Returns [..., E], the new slot of what each old slot holds."""
  experts = iota(num_experts) if old is None else jnp.asarray(old.experts)
  if new is None:
    return experts
  slots = jnp.asarray(new.slots)
  shape = jnp.broadcast_shapes(experts.shape, slots.shape)
  experts, slots = (jnp.broadcast_to(x, shape) for x in (experts, slots))
  return jnp.take_along_axis(slots, experts, axis=-1)
