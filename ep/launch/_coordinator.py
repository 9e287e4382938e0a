# SPDX-License-Identifier: Apache-2.0
"""Runs JAX's coordination service: _coordinator.py ADDRESS PROCESSES.

By default JAX runs the service in rank 0. When rank 0 dies, JAX aborts all
other ranks before they can report an error. This service outlives every rank,
and differs from the default in two ways:

* It never declares a rank dead, because JAX would then abort all other ranks.
* A rank that ends does not wait for the others, which may have died.

JAX's option `recoverable` is no alternative, because it also restarts a failed
barrier for each late rank.

This program does not import JAX, which would add a second to every launch.
"""

from __future__ import annotations

import signal
import sys

from jaxlib import _jax

_NEVER_S = 10**9  # the timeout after which JAX declares a rank dead


def main(address: str, num_processes: str) -> None:
  service = _jax.get_distributed_runtime_service(
    address,
    int(num_processes),
    heartbeat_timeout=_NEVER_S,
    shutdown_timeout=0,
  )
  while service:  # until the launcher kills this process
    signal.pause()


if __name__ == "__main__":
  main(*sys.argv[1:])
