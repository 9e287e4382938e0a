# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for GPUs and for NCCL, for the tests of the nccl backend."""

import types
from typing import Any

import jax.numpy as jnp

from ep._src.backends.nccl.backend import NcclConnection


def gpu(process: int = 0, cuda: int = 13000, **attributes: Any) -> Any:
  """Returns a stand-in for the GPU of a process, as JAX describes it."""
  return types.SimpleNamespace(
    process_index=process,
    local_hardware_id=0,
    client=types.SimpleNamespace(platform_version=f"PJRT\ncuda {cuda}"),
    **dict(platform="gpu", compute_capability="9.0", device_kind="H200")
    | attributes,
  )


class HostEngine(NcclConnection):
  """A host engine that is lowered like "nccl", and checks NCCL EP's limits."""

  borrows = False

  def __init__(self, group):
    super().__init__(group, self.borrows, [])

  def _call(self, op, ctx, *operands, sizes):
    if op != "ep_prepare":
      rows = ctx.avals_in[1]
      assert rows.shape[1] % (16 if rows.dtype == jnp.uint8 else 8) == 0
      assert op != "ep_combine" or len(operands) == 2
    return super()._call(op, ctx, *operands, sizes=sizes)
