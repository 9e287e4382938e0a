# SPDX-License-Identifier: Apache-2.0
"""What the backends that call a native library have in common."""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any, TYPE_CHECKING

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from ep._src import checked, compat, ffi

if TYPE_CHECKING:
  from ep._src.group import EpGroup, EpLayerConfig
  from ep._src.primitive import OpParams


# `Tail` of ep_ffi/core/backend.h.
_TAILS = {"unspecified": 0, "zero": 1, "nan": 2}


# The aval of what `_place` returns.
_PLACE = jax.core.ShapedArray((2,), jnp.int32)


def _place(group: EpGroup) -> jax.Array:
  """Returns where this rank is in the mesh of the program, for `PrepareArgs`.

  The native group knows a rank by its device, so it can tell a program whose
  mesh has the devices in another order.
  """

  def index(axes):
    at = jnp.int32(0)
    for axis in axes:
      if (size := group.mesh.shape[axis]) > 1:
        at = at * size + lax.axis_index(axis)
    return at

  others = [a for a in group.mesh.axis_names if a != group.axis_name]
  return jnp.stack([index([*others, group.axis_name]), index(group.data_axes)])


def mem_bytes(layer: EpLayerConfig, num_tokens: int) -> int:
  """See backends.py."""
  return ffi.mem_bytes(
    layer.group.backend,
    layer.group.name,
    num_tokens,
    layer.top_k,
    layer.alignment,
    layer.capacity,
  )


def lower(
  op: str,
  ctx: compat.mlir.LoweringRuleContext,
  *operands,
  params: OpParams,
  around: Callable[..., Any] = lambda lower_call: lower_call,
):
  """A call of the FFI target `op` of ep_ffi/handlers.

  `around` makes of the lowering to that call, and to nothing else, another.
  """
  if op == "ep_prepare":
    place = compat.lower_local(lambda *_: [_place(params.layer.group)])
    operands += tuple(place(ctx, *operands))
    ctx = ctx.replace(avals_in=[*ctx.avals_in, _PLACE])
  lower_call = around(functools.partial(_lower_call, op))
  return lower_call(ctx, *operands, params=params)


def _lower_call(
  op: str, ctx: compat.mlir.LoweringRuleContext, *operands, params: OpParams
):
  layer = params.layer
  with compat.named_instruction(f"{op}[{layer.name}]"):
    return jax.ffi.ffi_lowering(op)(
      ctx,
      *operands,
      group=layer.group.name,
      group_config=layer.group.config,
      program=layer.group.programs.name(ctx),
      position=np.int64(compat.next_position(ctx)),
      layer_name=layer.name,
      layer=dict(
        top_k=np.int64(layer.top_k),
        alignment=np.int64(layer.alignment),
        capacity=np.int64(layer.capacity),
        drop=layer.overflow == "drop",
        tail=np.int32(_TAILS[checked.tail(params)]),
        config=np.int64(layer.fingerprint),
        checked=params.checked,
      ),
    )
