# SPDX-License-Identifier: Apache-2.0
"""The two views of an op: local, and global, a `shard_map` of the local view.

In the local view, inside `jax.shard_map` with a manual EP axis, an op works on
the arrays of its rank. In the global view, outside, it works on global arrays.
Only this file converts views. Arrays have four kinds, by the sharding of their
first axis:

  token arrays    [..., H] over (*data_axes, ep): ranks own consecutive tokens
  rank arrays     [R, ...] over (*data_axes, ep): one entry per rank; the local
                  view drops the axis
  expert arrays   [E, ...] over ep, replicated over other axes: [L, ...] locally
  replicated      equal on all ranks

Any other sharding is given as a `PartitionSpec`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ep._src.base import arguments, compat
from ep._src.base.group import Connection, EpGroup, Sizes
from ep._src.base.meshes import Mesh
from ep._src.ops.handle import check_handle, EpHandle, Routing

TOKENS = "tokens"
RANK = "rank"
EXPERTS = "experts"
REPLICATED = "replicated"

# The kinds of the arrays of a handle.
ROUTING_KINDS: Any = Routing._make([RANK] * 6 + [TOKENS])


@dataclasses.dataclass(frozen=True)
class View:
  """The view, local or global, in which an op is called.

  Attributes:
    group: the group whose ranks run the op.
    op: the name of the op and its layer, for messages.
    mesh: the mesh of the global view; None in the local view.
    ranks: the leading dims of rank arrays: (R,), or () in the local view.
  """

  group: EpGroup
  op: str
  mesh: Mesh | None
  ranks: tuple[int, ...]

  @classmethod
  def of(cls, group: EpGroup, op: str) -> View:
    """Returns the local view if the EP axis is manual, else the global view."""
    if not group.connection.is_open:
      group.connection.check_open(op)
    mesh = compat.context_mesh()
    if mesh is None:
      return cls(group, op, group.mesh, (group.num_token_ranks,))
    _check_mesh(group, op, mesh)
    if group.axis_name not in mesh.manual_axes:
      return cls(group, op, mesh, (group.num_token_ranks,))
    automatic = [
      a
      for a in mesh.axis_names
      if a not in mesh.manual_axes and mesh.shape[a] > 1
    ]
    if automatic:
      raise ValueError(
        f"{op}: the mesh axes {automatic} are not manual here; an exchange"
        " works on the arrays of one device. Make all axes manual in"
        " jax.shard_map, or call the op outside of it."
      )
    return cls(group, op, None, ())

  @property
  def is_local(self) -> bool:
    """Whether the op works on the arrays of one rank."""
    return self.mesh is None

  def lead(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the leading dims (all but the last) of one rank's tokens.

    `shape` is the shape of the array in this view.
    """
    lead = tuple(shape[:-1])
    if not self.ranks:
      return lead
    (ranks,) = self.ranks
    if not lead or lead[0] % ranks:
      raise ValueError(
        f"{self.op}: {name} has shape {tuple(shape)}, whose first axis cannot"
        f" be split over {ranks} ranks; outside shard_map that axis is global,"
        f" and must be a multiple of {ranks} (mesh axes"
        f" {self.group.token_axes}). Pass pad=True to moe_layer or"
        " ep.MoE; to an op, add tokens whose ids are -1. Under jax.vmap"
        " the first axis is the axis of examples."
      )
    return (lead[0] // ranks, *lead[1:])


def opened(name: str, handle: EpHandle) -> tuple[View, Sizes]:
  """Returns the view in which the op `name` is called, and the op's sizes."""
  if not isinstance(handle, EpHandle):
    check_handle(name, handle)
  layer = handle.layer
  view = View.of(layer.group, f'{name}(layer "{layer.name}")')
  sizes = layer.sizes(math.prod(handle.token_shape))
  for field, x, size, dtype in (
    ("mem", handle.mem, sizes.mem_bytes, "uint8"),
    ("group_sizes", handle.group_sizes, sizes.L, "int32"),
  ):
    if x.shape != (*view.ranks, size) or x.dtype != dtype:
      raise ValueError(
        f"{view.op}: handle.{field} is {x.dtype} {list(x.shape)}, but {dtype}"
        f" {[*view.ranks, size]} is expected"
        f" {'inside' if view.is_local else 'outside'} jax.shard_map; pass the"
        " handle that ep_prepare returned there for this layer and these"
        " tokens."
      )
  return view, sizes


@dataclasses.dataclass(frozen=True, eq=False)
class RankFunction:
  """A function of one rank's arrays, which `in_view` maps over the ranks.

  Attributes:
    of_rank: the function, which a program of one rank calls directly. Its first
      arguments are static.
    inputs: a function of the static arguments. For each other argument it
      returns TOKENS, RANK, EXPERTS, REPLICATED or a `PartitionSpec`, or a
      pytree of these that is a prefix of the argument.
    outputs: the same for the result.
    is_layer: whether the caller gives the result the sharding of the tokens.
      Then JAX may reshard tokens along Explicit axes by a collective that
      `ep.assert_no_hidden_collectives` allows.
  """

  of_rank: Callable[..., Any]
  inputs: Callable[..., Sequence[Any]]
  outputs: Callable[..., Any]
  is_layer: bool

  def in_view(
    self, view: View, static: Sequence[Hashable], *args: Any, keep: bool = True
  ) -> Any:
    """Runs the function in a view and returns its result.

    The calls that differ only in `args` share a jitted program, which the
    group's connection caches. Outside of `jax.jit`, the first of them compiles.
    Inside, the first of them is traced, and JAX inlines the program in each, so
    that each op gets a unique position.

    Args:
      view: the view. Its `op` names the program.
      static: the static arguments. They refer to no `EpGroup`, because a
        program would keep it open.
      *args: the other arguments, which are pytrees of arrays.
      keep: whether to cache the program. It must be False if `static` refers
        to traced values.
    """
    names = self.of_rank.__code__.co_varnames[len(static) :]
    check = _check_places if view.ranks else _check_copies
    check(view, names, args, self.inputs(*static))
    name, connection = view.op.partition("(")[0], view.group.connection
    make: Callable[..., Any] = _program
    if keep:
      make = functools.partial(connection.cached, _program)
    key = self, name, connection, view.mesh, compat.in_a_program()
    return make(*key, *static)(*args)


def mapped(
  inputs: Any, outputs: Any, is_layer: bool = False
) -> Callable[[Callable[..., Any]], RankFunction]:
  """Decorates a function of one rank's arrays; see `RankFunction`.

  `inputs` and `outputs` may also be values, for any static arguments.
  """

  def of_static(kinds: Any) -> Callable[..., Any]:
    return kinds if callable(kinds) else lambda *_: kinds

  kinds = of_static(inputs), of_static(outputs)
  return lambda of_rank: RankFunction(of_rank, *kinds, is_layer)


def _program(
  fn: RankFunction,
  name: str,
  connection: Connection,
  mesh: Mesh | None,
  inline: bool,
  *static: Any,
) -> Callable[..., Any]:
  """Returns the program of `in_view`; `mesh` is None in a local view."""
  if mesh is None:
    local = functools.partial(fn.of_rank, *static)
    local.__name__ = name  # type: ignore[attr-defined]
    return jax.jit(local, inline=inline)
  inputs, outputs = tuple(fn.inputs(*static)), fn.outputs(*static)
  specs = _specs(connection.group, inputs)

  def of_rank(*args: Any) -> Any:
    args = _map_rank_arrays(lambda x: x.squeeze(0), inputs, args)
    outs = fn.of_rank(*static, *args)
    return _map_rank_arrays(lambda x: x[None], outputs, outs)

  of_rank.__name__ = name
  of_arrays = jax.shard_map(
    of_rank,
    mesh=mesh,
    in_specs=specs,
    out_specs=_specs(connection.group, outputs),
  )
  if AxisType.Explicit not in mesh.axis_types:
    return jax.jit(of_arrays, inline=inline)

  def place(kind: Any, spec: PartitionSpec, arrays: Any) -> Any:
    # ep.assert_no_hidden_collectives knows the collective by its name.
    allowed = fn.is_layer and kind == TOKENS
    with jax.named_scope("ep_reshard") if allowed else nullcontext():
      return resharded(mesh, spec, arrays)

  def of_any_arrays(*args: Any) -> Any:
    return of_arrays(*jax.tree.map(place, inputs, specs, args))

  of_any_arrays.__name__ = name
  return jax.jit(of_any_arrays, inline=inline)


def _map_rank_arrays(
  fn: Callable[[jax.Array], jax.Array], kinds: Any, arrays: Any
) -> Any:
  """Applies `fn` to the arrays of the kind RANK in a pytree."""
  return jax.tree.map(
    lambda kind, x: jax.tree.map(fn, x) if kind == RANK else x, kinds, arrays
  )


def _check_mesh(group: EpGroup, op: str, mesh: Mesh) -> None:
  """Raises unless the program's mesh has the shape of the group's mesh.

  If the backend needs the order of devices, ep_prepare compares it at run time.
  """
  if dict(mesh.shape) != dict(group.mesh.shape):
    raise ValueError(
      f"{op}: the mesh in context is {dict(mesh.shape)}, but the group"
      f' "{group.name}" was bootstrapped on {dict(group.mesh.shape)}; run the'
      " program on the mesh that was given to ep_bootstrap."
    )


def resharded(mesh: Mesh, spec: PartitionSpec, arrays: Any) -> Any:
  """Returns arrays with the sharding of `spec` along Explicit mesh axes.

  XLA chooses the sharding along Auto axes. JAX does not copy an array that
  already has the sharding of `spec`. Gradients get the sharding of the input.
  """
  types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
  if AxisType.Explicit not in types.values():
    return arrays

  def explicit(entry: Any) -> tuple[str, ...]:
    return tuple(a for a in _axes(entry) if types[a] == AxisType.Explicit)

  sharding = NamedSharding(mesh, PartitionSpec(*map(explicit, spec)))

  def moved(x: Any) -> Any:
    if jax.typeof(x).sharding == sharding:
      return x
    # From JAX 0.12 on, XLA gives a collective the name of its operand: the
    # first barrier, or in the transposed program the second, which are in the
    # caller's scope.
    x = jax.sharding.reshard(jax.lax.optimization_barrier(x), sharding)
    return jax.lax.optimization_barrier(x)

  return jax.tree.map(moved, arrays)


def _axes(entry: Any) -> tuple[str, ...]:
  """Returns the mesh axes of an entry of a `PartitionSpec`."""
  return (entry,) if isinstance(entry, str) else entry or ()


def _specs(group: EpGroup, kinds: Any) -> Any:
  """Returns the `PartitionSpec`s of a pytree of kinds."""
  specs: dict[Any, PartitionSpec] = {
    TOKENS: PartitionSpec(group.token_axes),
    RANK: PartitionSpec(group.token_axes),
    EXPERTS: PartitionSpec(group.axis_name),
    REPLICATED: PartitionSpec(),
  }
  return jax.tree.map(lambda kind: specs.get(kind, kind), kinds)


def _check_copies(
  view: View, names: Sequence[str], args: Sequence[Any], kinds: Sequence[Any]
) -> None:
  """Warns if tokens are equal along a mesh axis that shards tokens.

  Accepts constants, which vary over no axis. With `check_vma=False`, arrays
  look like constants.
  """
  group = view.group
  for name, x, kind in zip(names, args, kinds, strict=False):
    if kind != TOKENS or not isinstance(x, jax.Array):
      continue
    varying = jax.typeof(x).mat.varying
    equal = [
      a
      for a in group.token_axes
      if a not in varying and group.mesh.shape[a] > 1
    ]
    if equal and group.axis_name in varying:
      return arguments.warn(
        f"{view.op}: {name} is equal along the mesh axes {equal}, but these"
        " axes shard tokens, so sums over all tokens count each copy. If tokens"
        " are replicated along them, leave the axes out of data_axes of"
        " ep_bootstrap."
      )


def _check_places(
  view: View, names: Sequence[str], args: Sequence[Any], kinds: Sequence[Any]
) -> None:
  """Refuses arrays on devices outside the mesh; warns if JAX reshards arrays.

  JAX knows the sharding of a tracer along Explicit axes. For a tracer, the
  function warns only if an axis splits a dimension that it should not split.
  Accepts fully replicated arrays, which JAX slices without communication.
  """
  mesh = compat.concrete_context_mesh() or view.group.mesh
  if isinstance(mesh, jax.sharding.AbstractMesh):
    return
  specs = jax.tree.broadcast(_specs(view.group, tuple(kinds)), tuple(args))
  leaves = jax.tree.leaves_with_path(tuple(args))
  for (path, x), spec in zip(leaves, jax.tree.leaves(specs), strict=True):
    if not isinstance(x, jax.Array):
      continue
    first, *below = path
    name = names[first.idx]
    if below:
      name = jax.tree_util.keystr((below[-1],), simple=True)
    what = f"{view.op}: {name} of shape {x.shape}"
    if isinstance(x, jax.core.Tracer):
      has = jax.typeof(x).sharding.spec
      pairs = itertools.zip_longest(has, spec)
      is_moved = any({*_axes(h)} - {*_axes(w)} for h, w in pairs)
    else:
      has = getattr(x.sharding, "spec", x.sharding)
      wanted = NamedSharding(mesh, spec)
      is_other = not x.sharding.is_equivalent_to(wanted, x.ndim)
      is_moved = x.committed and is_other and not x.is_fully_replicated
      if x.committed and x.sharding.device_set != wanted.device_set:
        raise ValueError(
          f"{what} has the sharding {x.sharding}, whose devices differ from the"
          f" group's mesh; the op needs {wanted}. Put the array there with"
          " jax.device_put."
        )
    if is_moved:
      arguments.warn(
        f"{what} is sharded as {has}, but the op needs {spec}, so JAX moves it"
        " in every call. Make the array with that sharding (jax.device_put,"
        " out_shardings of jax.jit). If a mesh axis is for tensor parallelism"
        " or FSDP, name it as MoEConfig.tp_axis or fsdp_axis; if tokens are"
        " replicated along it, leave it out of data_axes of ep_bootstrap."
        " ep.assert_no_hidden_collectives finds such moves in a compiled"
        " program."
      )
