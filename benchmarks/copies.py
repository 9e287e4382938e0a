# SPDX-License-Identifier: Apache-2.0
"""Plain copies of the payload, which are the limit of all contenders."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np

from benchmarks.workload import SPEC, Workload


def make(
  workload: Workload, mesh: jax.sharding.Mesh, directions: int
) -> Callable[[], None]:
  """Returns a function that copies the payload once for each direction.

  On CPU one thread of one process copies the payload of all ranks, between
  buffers that were touched before. On GPUs, each rank's device copies an equal
  share.
  """
  size = workload.payload_bytes
  if mesh.devices.flat[0].platform != "cpu":
    share = -(-size // mesh.size)
    data = jax.make_array_from_callback(
      (mesh.size, share),
      NamedSharding(mesh, SPEC),
      lambda _: np.zeros((1, share), np.uint8),
    )
    copy = jax.jit(jnp.copy)

    def copy_on_devices():
      for _ in range(directions):
        copy(data).block_until_ready()

    return copy_on_devices
  if jax.process_index() != 0:
    return lambda: None
  source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)

  def copy_in_one_thread():
    for _ in range(directions):
      np.copyto(target, source)

  return copy_in_one_thread
