# SPDX-License-Identifier: Apache-2.0
"""The connection class of the backends with a native library."""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import functools
import os
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from ep._src.base import backend, compat, meshes
from ep._src.base.backend import OpParams
from ep._src.base.compat import LoweringContext
from ep._src.base.config import GroupConfig, WIRES
from ep._src.base.meshes import Mesh
from ep._src.base.primitive import ProgramNames
from ep._src.native import ffi

_PLACE = jax.core.ShapedArray((2,), jnp.int32)

# The last released group of each backend in this process.
_released: dict[str, GroupConfig] = {}
os.register_at_fork(after_in_child=_released.clear)


class NativeConnection(backend.Connection):
  """A connection to a group in a native library; both have the same name."""

  def __init__(self, group: GroupConfig):
    super().__init__(group)
    self._programs = ProgramNames(group.name)

  @property
  def closes_at_exit(self) -> bool:
    # With one process, no peer waits, and programs complete without a close.
    has_peers = len(meshes.processes(self.group.mesh)) > 1
    return not self._is_forked and has_peers

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

  def mem_bytes(self, params: OpParams) -> int:
    layer = params.layer
    return _offsets(params)[1] + ffi.mem_bytes(
      self.group.backend,
      self.group.name,
      params.num_tokens,
      layer.top_k,
      layer.alignment,
      params.capacity,
    )

  def lower(
    self, op: str, ctx: LoweringContext, *operands: Any, params: OpParams
  ) -> Any:
    if op == "ep_prepare":
      place = compat.lower_local(lambda *_: [_place(params.layer.group)])
      operands += tuple(place(ctx, *operands))
      mem = ctx.avals_out[:1]
      call = ctx.replace(avals_in=[*ctx.avals_in, _PLACE], avals_out=mem)
      results = self._lowering(op)(call, *operands, params=params)
      read = compat.lower_local(functools.partial(_prepared, params))
      return read(ctx.replace(avals_in=mem), *results)
    return self._lowering(op)(ctx, *operands, params=params)

  def _lowering(self, op: str) -> Callable[..., Any]:
    """Returns the lowering to a call of the FFI target `op`."""
    return functools.partial(self._lower_call, op)

  def _lower_call(
    self, op: str, ctx: LoweringContext, *operands: Any, params: OpParams
  ) -> Any:
    layer = params.layer
    with compat.named_instruction(f"{op}[{layer.name}]"):
      return jax.ffi.ffi_lowering(op)(
        ctx,
        *operands,
        group=layer.group.name,
        group_config=layer.group.program_text,
        program=self._programs.name(ctx),
        position=np.int64(compat.next_position(ctx)),
        layer_name=layer.name,
        layer=dict(
          top_k=np.int64(layer.top_k),
          alignment=np.int64(layer.alignment),
          capacity=np.int64(params.capacity),
          drop=params.drop,
          tail=np.int32(ffi.TAILS[params.tail]),
          fingerprint=np.int64(layer.fingerprint),
          checked=params.checked,
          wire=np.int64(WIRES.index(layer.wire)),
        ),
        **self._borrowed_domains(ctx),
      )

  def _borrowed_domains(self, ctx: LoweringContext) -> dict[str, Any]:
    """Returns the op attributes that describe borrowed communicators."""
    del ctx
    return dict(lent_mesh=np.zeros(0, np.int64), lent_axis=np.int64(0))

  def _close(self) -> None:
    ffi.close_group(self.group.backend, self.group.name)

  def _release(self) -> None:
    ffi.release_group(self.group.backend, self.group.name)
    if self.closes_at_exit:
      _released[self.group.backend] = self.group


def released() -> list[GroupConfig]:
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


def _offsets(params: OpParams) -> tuple[int, int]:
  """Returns the byte offsets of `kept` and the routing in `EpHandle.mem`.

  `MemParts` of ep_ffi/handlers/op_call.h describes the buffer.
  """
  kept = (3 * params.layer.num_local_experts + 2) * 4
  end = kept + params.num_tokens * params.layer.top_k
  return kept, -(-end // 256) * 256


def _prepared(params: OpParams, mem: jax.Array) -> list[jax.Array]:
  """Returns the results of ep_prepare, which the native op writes to `mem`."""
  L, K = params.layer.num_local_experts, params.layer.top_k
  T = params.num_tokens
  kept, _ = _offsets(params)
  sizes = lax.bitcast_convert_type(mem[:kept].reshape(-1, 4), jnp.int32)
  group_sizes, token_counts, dropped_counts = sizes[: 3 * L].reshape(3, L)
  total, largest = sizes[3 * L :].reshape(2, 1)
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


def _place(group: GroupConfig) -> jax.Array:
  """Returns this rank's index among all domains' ranks, and along data axes.

  The native group knows each rank's device, so the group refuses a program
  whose mesh has another order of devices.
  """
  mesh = group.mesh
  domain_and_rank = meshes.index_of_rank(mesh, group.axis_name)
  return jnp.stack([domain_and_rank, meshes.index(mesh, group.data_axes)])
