# SPDX-License-Identifier: Apache-2.0
"""Runs JAX's coordination service: coordinator.py ADDRESS PROCESSES.

By default JAX runs the service in rank 0, and when rank 0 dies, JAX aborts all
other ranks before they can report what they saw. This service outlives every
rank. It differs from JAX's own in two ways, which survivors of a death need:

* It never declares a rank dead, because JAX would abort all others then.
* A rank that ends waits for no other: one that died would never come.

Otherwise barriers and keys are JAX's. JAX's option `recoverable` does the same
and more: a barrier that has failed begins again for each rank that comes late.

This program does not import JAX, which would take a second of every launch.
"""

import signal
import sys

from jaxlib import _jax

# Seconds without a sign of life, after which a rank is dead to JAX.
_NEVER_S = 10**9


def main(address: str, num_processes: str) -> None:
  service = _jax.get_distributed_runtime_service(
    address,
    int(num_processes),
    heartbeat_timeout=_NEVER_S,
    shutdown_timeout=0,
  )
  while service:  # until the launcher ends this
    signal.pause()


if __name__ == "__main__":
  main(*sys.argv[1:])
