"""What the backends that call a native library have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import numpy as np

from ep._src import checked, compat, ffi

if TYPE_CHECKING:
  from ep._src.group import EpLayerConfig
  from ep._src.primitive import OpParams


# `Tail` of ep_ffi/core/backend.h.
_TAILS = {"unspecified": 0, "zero": 1, "nan": 2}


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
  op: str, ctx: compat.mlir.LoweringRuleContext, *operands, params: OpParams
):
  """A call of the FFI target `op` of ep_ffi/handlers."""
  layer = params.layer
  with compat.named_instruction(f"{op}[{layer.name}]"):
    return jax.ffi.ffi_lowering(op)(
      ctx,
      *operands,
      group=layer.group.name,
      program=layer.group.programs.name(ctx),
      layer=layer.name,
      position=np.int64(compat.next_position(ctx)),
      top_k=np.int64(layer.top_k),
      alignment=np.int64(layer.alignment),
      capacity=np.int64(layer.capacity),
      drop=layer.overflow == "drop",
      tail=np.int64(_TAILS[checked.tail(params)]),
      config=np.int64(layer.fingerprint),
      checked=params.checked,
    )
