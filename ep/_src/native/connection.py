# SPDX-License-Identifier: Apache-2.0
"""The connection class of the backends with a native library."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
import contextlib
import functools
import itertools
import os
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from ep._src.base import compat, meshes
from ep._src.base.compat import LoweringContext
from ep._src.base.group import Connection, EpGroup, Sizes
from ep._src.base.layer import WIRES
from ep._src.base.meshes import Mesh
from ep._src.native import ffi

_PLACE = jax.core.ShapedArray((2,), jnp.int32)

# The last released group of each backend in this process.
_released: dict[str, EpGroup] = {}
os.register_at_fork(after_in_child=_released.clear)


class _ProgramNames:
  """Numbers the programs of a group in the order of their lowering.

  The native engine matches ops of different ranks by XLA's fingerprint of their
  program. Without a number in the program's text, two programs of equal
  functions would have equal fingerprints. Thread-safe.
  """

  def __init__(self, group: str):
    self._group = group
    # Threads may lower programs concurrently; `next` of a count is atomic.
    self._count: collections.defaultdict[str, itertools.count[int]]
    self._count = collections.defaultdict(itertools.count)

  def name(self, ctx: LoweringContext) -> str:
    """Returns the name of the program being lowered, like "jit_step#0"."""
    return compat.module_note(
      ctx, self._group, lambda module: f"{module}#{next(self._count[module])}"
    )


class NativeConnection(Connection):
  """A connection to a group in a native library; both have the same name."""

  def __init__(self, group: EpGroup):
    super().__init__(group)
    self._programs = _ProgramNames(group.name)

  @property
  def closes_at_exit(self) -> bool:
    # With one process, no peer waits, and programs complete without a close.
    has_peers = len(meshes.processes(self.group.mesh)) > 1
    return not self.is_forked and has_peers

  def raise_failures(self) -> None:
    ffi.check_group(self.group.backend, self.group.name)

  def check_places(self, op: str, mesh: jax.sharding.Mesh) -> None:
    there = meshes.places(mesh_of_devices(self.group.backend, self.group.mesh))
    for device, place in meshes.places(mesh).items():
      if there.get(device) != place:
        raise ValueError(
          f"{op}: the mesh in context has {device} at {dict(place)}, but the"
          f' group "{self.group.name}" was bootstrapped on a mesh that has it'
          f" at {dict(there.get(device, ()))}; run the program on the mesh that"
          " was given to ep_bootstrap."
        )

  def mem_bytes(self, sizes: Sizes) -> int:
    return _offsets(sizes)[1] + ffi.mem_bytes(
      self.group.backend,
      self.group.name,
      sizes.T,
      sizes.K,
      sizes.alignment,
      sizes.C,
    )

  def lower(
    self, op: str, ctx: LoweringContext, *operands: Any, sizes: Sizes
  ) -> Any:
    if op != "ep_prepare":
      return self._call(op, ctx, *operands, sizes=sizes)
    place = compat.lower_local(lambda *_: [_place(self.group)])
    operands += tuple(place(ctx, *operands))
    mem = ctx.avals_out[:1]
    call = ctx.replace(avals_in=[*ctx.avals_in, _PLACE], avals_out=mem)
    results = self._call(op, call, *operands, sizes=sizes)
    read = compat.lower_local(functools.partial(_prepared, sizes))
    return read(ctx.replace(avals_in=mem), *results)

  def _call(
    self,
    op: str,
    ctx: LoweringContext,
    *operands: Any,
    sizes: Sizes,
    lent_mesh: Sequence[int] = (),
    lent_axis: int = 0,
  ) -> Any:
    """Lowers `op` to a call of its FFI target.

    `lent_mesh` and `lent_axis` describe communicators that the group borrows.
    """
    with compat.named_instruction(f"{op}[{sizes.name}]"):
      return jax.ffi.ffi_lowering(op)(
        ctx,
        *operands,
        group=self.group.name,
        group_config=self.group.program_text,
        program=self._programs.name(ctx),
        position=np.int64(compat.next_position(ctx)),
        layer_name=sizes.name,
        layer=dict(
          top_k=np.int64(sizes.K),
          alignment=np.int64(sizes.alignment),
          capacity=np.int64(sizes.C),
          drop=sizes.overflow != "error",
          tail=np.int32(ffi.TAILS[sizes.tail]),
          fingerprint=np.int64(sizes.fingerprint),
          checked=sizes.checked,
          wire=np.int64(WIRES.index(sizes.wire)),
        ),
        lent_mesh=np.array(lent_mesh, np.int64),
        lent_axis=np.int64(lent_axis),
      )

  def _close(self) -> None:
    ffi.close_group(self.group.backend, self.group.name)

  def _release(self) -> None:
    ffi.release_group(self.group.backend, self.group.name)
    if self.closes_at_exit:
      _released[self.group.backend] = self.group


def released() -> list[EpGroup]:
  """Returns the last released group of each backend, if there is one."""
  return list(_released.values())


def close_released() -> None:
  """Closes all released groups, also if programs still use them."""
  with contextlib.ExitStack() as stack:
    for name in _released:
      stack.callback(ffi.close_released, name)


def mesh_of_devices(name: str, mesh: Mesh) -> jax.sharding.Mesh:
  """Returns the mesh; raises `ValueError` unless it has devices."""
  if not meshes.has_devices(mesh):
    raise ValueError(
      f"ep_bootstrap: backend = {name!r} needs a mesh of devices; on an"
      ' AbstractMesh, pass "xla" or None.'
    )
  return mesh


def _offsets(sizes: Sizes) -> tuple[int, int]:
  """Returns the byte offsets of `kept` and the routing in `EpHandle.mem`.

  `MemParts` of ep_ffi/handlers/op_call.h describes the buffer.
  """
  kept = (3 * sizes.L + 2) * 4
  end = kept + sizes.T * sizes.K
  return kept, -(-end // 256) * 256


def _prepared(sizes: Sizes, mem: jax.Array) -> list[jax.Array]:
  """Returns the results of ep_prepare, which the native op writes to `mem`."""
  L, T, K = sizes.L, sizes.T, sizes.K
  kept, _ = _offsets(sizes)
  words = lax.bitcast_convert_type(mem[:kept].reshape(-1, 4), jnp.int32)
  group_sizes, token_counts, dropped_counts = words[: 3 * L].reshape(3, L)
  total, largest = words[3 * L :].reshape(2, 1)
  choices = mem[kept : kept + T * K].reshape(T, K) != 0
  return [
    mem,
    group_sizes,
    token_counts,
    total,
    dropped_counts,
    largest,
    choices,
  ]


def _place(group: EpGroup) -> jax.Array:
  """Returns this rank's index among all domains' ranks, and along data axes.

  The native group knows each rank's device, so the group refuses a program
  whose mesh has another order of devices.
  """
  others = [a for a in group.mesh.axis_names if a != group.axis_name]
  of_axes = [*others, group.axis_name], group.data_axes
  return jnp.stack([_index(group.mesh, axes) for axes in of_axes])


def _index(mesh: Mesh, axes: Iterable[str]) -> jax.Array:
  """Returns this rank's row-major index over `axes`, inside a shard_map.

  Over the other axes and then the EP axis, it is an index in
  `meshes.domains(...).flat`.
  """
  at: jax.Array = jnp.int32(0)
  for axis in axes:
    if (size := mesh.shape[axis]) > 1:
      at = at * size + lax.axis_index(axis)
  return at
