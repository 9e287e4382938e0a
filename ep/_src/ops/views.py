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
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ep._src.base import arguments, compat, contexts
from ep._src.base.backend import Connection
from ep._src.base.config import GroupConfig, LayerConfig
from ep._src.base.meshes import has_devices, Mesh
from ep._src.group.group import EpGroup, EpLayerConfig

TOKENS = "tokens"
RANK = "rank"
EXPERTS = "experts"
REPLICATED = "replicated"


@dataclasses.dataclass(frozen=True)
class View:
  """The view, local or global, in which an op is called.

  Attributes:
    group: the group whose ranks run the op.
    op: the name of the op, for messages.
    mesh: the mesh of the global view; None in the local view.
  """

  group: EpGroup
  op: str
  mesh: Mesh | None

  @classmethod
  def of(cls, group: EpGroup, op: str) -> View:
    """Returns the local view if the EP axis is manual, else the global view.

    Raises:
      ValueError: the mesh in context does not fit the group.
      RuntimeError: the group cannot be used; see `Connection.check_open`.
    """
    group.connection.check_open(op)
    mesh = compat.context_mesh()
    if mesh is not None:
      _check_mesh(group, op, mesh)
    manual = compat.manual_axes()
    if mesh is None or group.axis_name not in manual:
      return cls(group, op, mesh or group.mesh)
    automatic = [
      a for a in mesh.axis_names if a not in manual and mesh.shape[a] > 1
    ]
    if automatic:
      raise ValueError(
        f"{op}: the mesh axes {automatic} are not manual here; an exchange"
        " works on the arrays of one device. Make all axes manual in"
        " jax.shard_map, or call the op outside of it."
      )
    return cls(group, op, None)

  @property
  def is_local(self) -> bool:
    """Whether the op works on the arrays of one rank."""
    return self.mesh is None

  @property
  def ranks(self) -> tuple[int, ...]:
    """The leading dims of rank arrays in this view: () or (R,)."""
    return () if self.is_local else (self.group.num_token_ranks,)

  def lead(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the leading dims (all but the last) of one rank's tokens.

    `shape` is the shape of the array in this view.

    Raises:
      ValueError: the first axis cannot be split over the ranks.
    """
    lead = tuple(shape[:-1])
    if self.is_local:
      return lead
    ranks = self.group.num_token_ranks
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

  def call(
    self,
    local_fn: Callable[..., Any],
    static: Sequence[Hashable],
    args: Sequence[Any],
    in_kinds: Sequence[Any],
    out_kinds: Any,
    *,
    keep: bool = True,
    is_layer: bool = False,
  ) -> Any:
    """Runs `local_fn(*static, *args)` in this view and returns its result.

    Calls that differ only in `args` share a jitted program: outside of
    `jax.jit`, only the first call compiles. Inside `jax.jit`, JAX inlines the
    program, so each op gets a unique position. The group's connection caches
    the program. A program that refers to a layer would keep the group open, so
    it refers to the `LayerConfig` of the layer.

    Args:
      local_fn: a module-level function of a rank's arrays; a closure would be a
        new function, and compile, in each call. Messages name its parameters.
      static: the first arguments of `local_fn`.
      args: the other arguments of `local_fn`, which are pytrees of arrays.
      in_kinds: for each of `args` TOKENS, RANK, EXPERTS, REPLICATED or a
        `PartitionSpec`, or a pytree of these that is a prefix of the argument.
      out_kinds: the same for the result.
      keep: whether to cache the program. It must be False if `static` refers
        to traced values.
      is_layer: whether the caller gives the result the sharding of the tokens.
        Then JAX may reshard tokens along Explicit axes by a collective that
        `ep.assert_no_hidden_collectives` allows.
    """
    group, op = self.group, self.op
    names = local_fn.__code__.co_varnames[len(static) :]
    check = _check_copies if self.is_local else _check_places
    check(group, op, names, args, in_kinds)
    kinds, tree = jax.tree.flatten((tuple(in_kinds), out_kinds))
    cached = functools.partial(group.connection.cached, _program)
    make = cached if keep else _program
    program = make(
      op.partition("(")[0],
      is_layer,
      local_fn,
      tuple(x.config if isinstance(x, EpLayerConfig) else x for x in static),
      group.connection,
      self.mesh,
      tuple(kinds),
      tree,
      compat.in_a_program(),
      contexts.tail("unspecified"),
    )
    return program(*args)


def _check_mesh(group: EpGroup, op: str, mesh: Mesh) -> None:
  """Raises unless the program's mesh has the group's devices in the same order.

  Without `jax.set_mesh` the mesh of a `shard_map` has no devices while tracing.
  If the backend needs the order of devices, ep_prepare compares it at run time.
  """
  if dict(mesh.shape) != dict(group.mesh.shape):
    raise ValueError(
      f"{op}: the mesh in context is {dict(mesh.shape)}, but the group"
      f' "{group.name}" was bootstrapped on {dict(group.mesh.shape)}; run the'
      " program on the mesh that was given to ep_bootstrap."
    )
  if devices := compat.concrete_context_mesh():
    group.connection.check_places(op, devices)


def _program(
  name: str,
  is_layer: bool,
  local_fn: Callable[..., Any],
  static: tuple[Hashable, ...],
  connection: Connection,
  mesh: Mesh | None,
  kinds: tuple[Any, ...],
  tree: Any,
  inline: bool,
  tail: str,
) -> Callable[..., Any]:
  """Returns the jitted program of `View.call`; `mesh` is None in a local view.

  `tail` is unused, but must be part of the key of the program cache.
  """
  del tail
  group = connection.group

  def fn(*args: Any) -> Any:
    made = (
      EpLayerConfig.of(connection, x) if isinstance(x, LayerConfig) else x
      for x in static
    )
    return local_fn(*made, *args)

  if mesh is not None:
    of_rank = fn
    in_kinds, out_kinds = jax.tree.unflatten(tree, kinds)

    def of_ranks(*args: Any) -> Any:
      args = _on_rank_arrays(lambda x: x.reshape(x.shape[1:]), in_kinds, args)
      return _on_rank_arrays(lambda x: x[None], out_kinds, of_rank(*args))

    in_specs = _specs(group, in_kinds)
    mapped = jax.shard_map(
      of_ranks,
      mesh=mesh,
      in_specs=in_specs,
      out_specs=_specs(group, out_kinds),
    )

    def place(kind: Any, spec: PartitionSpec, arrays: Any) -> Any:
      # ep.assert_no_hidden_collectives knows the collective by its name.
      allowed = is_layer and kind == TOKENS
      with jax.named_scope("ep_reshard") if allowed else nullcontext():
        return resharded(mesh, spec, arrays)

    def of_arrays(*args: Any) -> Any:
      return mapped(*jax.tree.map(place, in_kinds, in_specs, args))

    fn = of_arrays
  fn.__name__ = name
  return jax.jit(fn, inline=inline)


def _on_rank_arrays(change: Callable[..., Any], kinds: Any, arrays: Any) -> Any:
  def of_kind(kind: Any, xs: Any) -> Any:
    return jax.tree.map(change, xs) if kind == RANK else xs

  return jax.tree.map(of_kind, kinds, arrays)


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

  spec = PartitionSpec(*map(explicit, spec))
  return jax.sharding.reshard(arrays, NamedSharding(mesh, spec))


def _axes(entry: Any) -> tuple[str, ...]:
  """Returns the mesh axes of an entry of a `PartitionSpec`."""
  return (entry,) if isinstance(entry, str) else entry or ()


def _specs(group: GroupConfig, kinds: Any) -> Any:
  """Returns the `PartitionSpec`s of a pytree of kinds."""
  specs: dict[Any, PartitionSpec] = {
    TOKENS: PartitionSpec(group.token_axes),
    RANK: PartitionSpec(group.token_axes),
    EXPERTS: PartitionSpec(group.axis_name),
    REPLICATED: PartitionSpec(),
  }
  return jax.tree.map(lambda kind: specs.get(kind, kind), kinds)


def _check_copies(
  group: EpGroup,
  op: str,
  names: Sequence[str],
  args: Sequence[Any],
  kinds: Sequence[Any],
) -> None:
  """Warns if tokens are equal along a mesh axis that shards tokens.

  Accepts constants, which vary over no axis. With `check_vma=False`, arrays
  look like constants.
  """
  for name, x, kind in zip(names, args, kinds, strict=False):
    if kind != TOKENS or not isinstance(x, jax.Array):
      continue
    varying = compat.varying_axes(x)
    equal = [
      a
      for a in group.token_axes
      if a not in varying and group.mesh.shape[a] > 1
    ]
    if equal and group.axis_name in varying:
      return arguments.warn(
        f"{op}: {name} is equal along the mesh axes {equal}, but these axes"
        " shard tokens, so sums over all tokens count each copy. If tokens are"
        " replicated along them, leave the axes out of data_axes of"
        " ep_bootstrap."
      )


def _check_places(
  group: EpGroup,
  op: str,
  names: Sequence[str],
  args: Sequence[Any],
  kinds: Sequence[Any],
) -> None:
  """Refuses arrays on devices outside the mesh; warns if JAX reshards arrays.

  JAX knows the sharding of a tracer along Explicit axes. For a tracer, the
  function warns only if an axis splits a dimension that it should not split.
  Accepts fully replicated arrays, which JAX slices without communication.
  """
  mesh = compat.concrete_context_mesh() or group.mesh
  if not has_devices(mesh):
    return
  specs = jax.tree.broadcast(_specs(group.config, tuple(kinds)), tuple(args))
  leaves = jax.tree.leaves_with_path(tuple(args))
  for (path, x), spec in zip(leaves, jax.tree.leaves(specs), strict=True):
    if not isinstance(x, jax.Array):
      continue
    first, *below = path
    name = names[first.idx]
    if below:
      name = jax.tree_util.keystr((below[-1],), simple=True)
    what = f"{op}: {name} of shape {x.shape}"
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
