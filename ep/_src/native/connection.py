# SPDX-License-Identifier: Apache-2.0
"""The connection class of the backends with a native library."""

from __future__ import annotations

import collections
from collections.abc import Sequence
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


class NativeConnection(Connection):
  """A connection to a group in a native library; both have the same name."""

  def __init__(self, group: EpGroup):
    super().__init__(group)
    # The number of lowered programs of each name. The native engine matches ops
    # of different ranks by XLA's fingerprint of their program. Without a number
    # in the program's text, two programs of equal functions would have equal
    # fingerprints. Threads may lower programs concurrently; `next` is atomic.
    self._programs: collections.defaultdict[str, itertools.count[int]]
    self._programs = collections.defaultdict(itertools.count)

  @property
  def closes_at_exit(self) -> bool:
    # With one process, no peer waits, and programs complete without a close.
    has_peers = len(meshes.processes(self.group.mesh)) > 1
    return not self.is_forked and has_peers

  def raise_failures(self) -> None:
    ffi.check_group(self.group.backend, self.group.name)

  def mem_bytes(self, sizes: Sizes) -> int:
    group, shape = self.group, (sizes.T, sizes.K, sizes.alignment, sizes.C)
    return _offsets(sizes)[1] + ffi.mem_bytes(group.backend, group.name, *shape)

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
    program = compat.module_note(
      ctx, self.group.name, lambda name: f"{name}#{next(self._programs[name])}"
    )
    with compat.named_instruction(f"{op}[{sizes.name}]"):
      return jax.ffi.ffi_lowering(op)(
        ctx,
        *operands,
        group=self.group.name,
        group_config=self.group.program_text,
        program=program,
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
    name = self.group.name.encode()
    ffi.call(self.group.backend, "ep_group_release", name)
    if self.closes_at_exit:
      _released[self.group.backend] = self.group


def released() -> list[EpGroup]:
  """Returns the last released group of each backend, if there is one."""
  return list(_released.values())


def close_released() -> None:
  """Closes all released groups, also if programs still use them."""
  with contextlib.ExitStack() as stack:
    for name in _released:
      stack.callback(ffi.call, name, "ep_group_close_released")


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
  mesh = group.mesh
  others = [a for a in mesh.axis_names if a != group.axis_name]
  of_axes = [*others, group.axis_name], group.data_axes
  # Axes of size 1 need not be manual in the program.
  large = [tuple(a for a in axes if mesh.shape[a] > 1) for axes in of_axes]
  return jnp.stack([lax.axis_index(a) for a in large], dtype=jnp.int32)
