# SPDX-License-Identifier: Apache-2.0
"""Ends what this process runs: in order, or at once."""

from __future__ import annotations

from collections.abc import Iterable
import os
import sys
import time
from typing import NoReturn

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
import numpy as np

from ep._src.base import meshes
from ep._src.base.config import GroupConfig

_POLL_S = 0.005


def wait_for_programs(what: str, groups: Iterable[GroupConfig]) -> None:
  """Waits until all programs that this process has launched have ended.

  A program may end with an error. A launch returns before its program has run,
  and the results may have been dropped since. But a device runs the programs of
  a thread in order, so one more program ends after all of them. For programs of
  other threads, this waits for the results that still exist.

  Args:
    what: the operation that waits, for the message.
    groups: the groups that the programs may use; the limit is their largest
      `timeout_s`.

  Raises:
    RuntimeError: they have not ended after `timeout_s`.
  """
  groups = [group for group in groups if meshes.has_devices(group.mesh)]
  results: list[jax.Array] = []
  for platform in {g.mesh.devices.flat[0].platform for g in groups}:
    devices = np.array(jax.local_devices(backend=platform))
    with jax.set_mesh(Mesh(devices, "device")):  # instead of the user's
      places = PartitionSpec("device")
      last = jax.jit(jnp.zeros, static_argnums=0, out_shardings=places)
      results += [last(devices.size), *jax.live_arrays(platform)]
  timeout_s = max((group.timeout_s for group in groups), default=0.0)
  deadline = time.monotonic() + timeout_s
  while not all(
    x.is_deleted() or x.is_ready()  # type: ignore[attr-defined]
    for x in results
  ):
    if time.monotonic() > deadline:
      raise RuntimeError(
        f"{what}: programs that this process has launched did not end within"
        f" timeout_s = {timeout_s} s; wait for their results before, with"
        " jax.block_until_ready."
      )
    time.sleep(_POLL_S)


def exit_now() -> NoReturn:
  """Ends this process with the code 1, and runs no further exit handler."""
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(1)
