# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for GPUs and for NCCL, for the tests of the nccl backend."""

from collections.abc import Callable, Iterator
import concurrent.futures
import contextlib
import ctypes
import os
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


def load_fake_nccl() -> None:
  """Loads the fake CUDA, NCCL and NCCL EP libraries.

  The backend then uses the loaded libraries and loads no others.
  """
  ctypes.CDLL(os.environ["FAKE_NCCL"], ctypes.RTLD_GLOBAL)


@contextlib.contextmanager
def rank_threads(
  num_ranks: int,
) -> Iterator[Callable[[Callable[[int], Any]], list[Any]]]:
  """Yields a function that calls another function on each rank's thread.

  The ranks are threads because the fake libraries simulate one process.
  """
  with concurrent.futures.ThreadPoolExecutor(num_ranks) as threads:
    yield lambda function: list(threads.map(function, range(num_ranks)))


class HostEngine(NcclConnection):
  """A host engine that is lowered like "nccl", and checks NCCL EP's limits."""

  borrows = False

  def __init__(self, group):
    super().__init__(group, self.borrows, [])

  def _lower_call(self, op, ctx, *operands, params):
    if op != "ep_prepare":
      rows = ctx.avals_in[1]
      assert rows.shape[1] % (16 if rows.dtype == jnp.uint8 else 8) == 0
      assert op != "ep_combine" or len(operands) == 2
    return super()._lower_call(op, ctx, *operands, params=params)
