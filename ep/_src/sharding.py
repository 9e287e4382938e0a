# SPDX-License-Identifier: Apache-2.0
"""The two views of an op: the global one is `shard_map` around the local one.

Inside `jax.shard_map` with the EP axis manual, an op works on the arrays of
its rank. Outside, it works on global arrays, and only this file maps one to the
other. Three kinds of arrays occur, sharded along their first axis:

  token arrays    [..., H] over (*data_axes, ep): ranks own consecutive tokens
  rank arrays     [R, ...] over (*data_axes, ep): one entry per rank; the local
                  view drops the axis
  expert arrays   [E, ...] over ep, and alike on all else: [L, ...] locally
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import itertools
import os
import sys
from typing import Any
import warnings

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ep._src import compat
from ep._src.group import EpGroup
from ep._src.meshes import has_devices, Mesh

TOKENS = "tokens"
RANK = "rank"
EXPERTS = "experts"

# The folder of this package, with a separator at the end.
_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


def is_local_view(group: EpGroup, op: str) -> bool:
  """Returns whether the EP axis is manual here.

  Raises:
    ValueError: the mesh in context does not fit the group.
    RuntimeError: the group cannot be used; see `Connection.check_open`.
  """
  group.connection.check_open(op)
  mesh = compat.context_mesh()
  if mesh is None:
    return False
  _check_mesh(group, op, mesh)
  if group.axis_name not in compat.manual_axes():
    return False
  automatic = [
    a
    for a in mesh.axis_names
    if a not in compat.manual_axes() and mesh.shape[a] > 1
  ]
  if automatic:
    raise ValueError(
      f"{op}: the mesh axes {automatic} are not manual here; an exchange works"
      " on the arrays of one device. Make all axes manual in jax.shard_map, or"
      " call the op outside of it."
    )
  return True


def _check_mesh(group: EpGroup, op: str, mesh: Mesh) -> None:
  """Raises unless the program's mesh puts each device where the group does.

  Without `jax.set_mesh` this is unknown while tracing, since the mesh of a
  `shard_map` has no devices then. If places matter to the backend, ep_prepare
  compares them when it runs.
  """
  if dict(mesh.shape) != dict(group.mesh.shape):
    raise ValueError(
      f"{op}: the mesh in context is {dict(mesh.shape)}, but the group"
      f' "{group.name}" was bootstrapped on {dict(group.mesh.shape)}; run the'
      " program on the mesh that was given to ep_bootstrap."
    )
  if devices := compat.concrete_context_mesh():
    group.connection.check_places(op, devices)


def local_lead(
  group: EpGroup, op: str, name: str, shape: Sequence[int]
) -> tuple[int, ...]:
  """Returns the leading dims of a rank's part of a token array.

  `shape` is the array's in the current view, [..., last]; the last dim is
  dropped.

  Raises:
    ValueError: the first axis cannot be split over the ranks.
  """
  lead = tuple(shape[:-1])
  if is_local_view(group, op):
    return lead
  ranks = group.num_token_ranks
  if not lead or lead[0] % ranks:
    raise ValueError(
      f"{op}: {name} has shape {tuple(shape)}, which cannot be sharded over"
      f" {ranks} ranks; outside shard_map the first axis is global and must be"
      f" a multiple of {ranks} (mesh axes {group.token_axes})."
    )
  return (lead[0] // ranks, *lead[1:])


def call(
  group: EpGroup,
  op: str,
  local_fn: Callable[..., Any],
  args: Sequence[Any],
  kinds: Sequence[Any],
  out_kind: Any,
) -> Any:
  """Runs `local_fn(*args)` in the current view.

  Each argument is a pytree of arrays. Its kind is TOKENS, RANK or EXPERTS, or a
  tree of `PartitionSpec` that is a prefix of it. `out_kind` is the kind of the
  output, or a tuple of kinds for a tuple of outputs.
  """
  if is_local_view(group, op):
    return local_fn(*args)

  def without_rank_axis(kind, tree):
    return _reshape(kind, tree, lambda x: x.reshape(x.shape[1:]))

  def with_rank_axis(kind, tree):
    return _reshape(kind, tree, lambda x: x[None])

  def body(*args):
    outs = local_fn(*map(without_rank_axis, kinds, args))
    if isinstance(out_kind, tuple):
      return tuple(map(with_rank_axis, out_kind, outs))
    return with_rank_axis(out_kind, outs)

  in_specs = tuple(_spec(group, kind) for kind in kinds)
  for arg, specs in zip(args, in_specs, strict=True):
    _warn_if_moved(group, op, arg, specs)
  return jax.shard_map(
    body,
    mesh=compat.context_mesh() or group.mesh,
    in_specs=in_specs,
    out_specs=tuple(_spec(group, kind) for kind in out_kind)
    if isinstance(out_kind, tuple)
    else _spec(group, out_kind),
  )(*args)


def _reshape(kind, tree, fn):
  return jax.tree.map(fn, tree) if kind == RANK else tree


def _spec(group: EpGroup, kind: Any) -> Any:
  if not isinstance(kind, str):
    return kind
  axes = group.axis_name if kind == EXPERTS else group.token_axes
  return PartitionSpec(axes)


def _warn_if_moved(group: EpGroup, op: str, arg: Any, specs: Any) -> None:
  """Warns of arrays that JAX moves between devices before the op.

  It looks only at arrays with values: the sharding that XLA chooses for a
  tracer on Auto axes is not known yet, and on Explicit axes JAX itself refuses
  a tracer that does not fit. A fully replicated array is not moved, but sliced.
  """
  mesh = compat.concrete_context_mesh() or group.mesh
  if not has_devices(mesh):
    return
  all_specs = jax.tree.leaves(jax.tree.broadcast(specs, arg))
  for x, spec in zip(jax.tree.leaves(arg), all_specs, strict=True):
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
      continue
    if not x.committed or x.is_fully_replicated:
      continue
    if len(x.sharding.device_set) < mesh.size:
      continue
    wanted = NamedSharding(mesh, spec)
    if not x.sharding.is_equivalent_to(wanted, x.ndim):
      warnings.warn(
        f"{op}: an array of shape {x.shape} has the sharding {x.sharding}, but"
        f" the op needs {wanted}; JAX moves it in every call. Make the array"
        " with that sharding (jax.device_put, out_shardings of jax.jit). A"
        " jitted program is searched for such moves by"
        " ep.assert_no_hidden_collectives.",
        stacklevel=_users_level(),
      )


def _users_level() -> int:
  """Returns the `stacklevel` of a warning by the caller, to name user code."""
  for level in itertools.count(1):
    if not sys._getframe(level).f_code.co_filename.startswith(_PACKAGE):
      return level
