# SPDX-License-Identifier: Apache-2.0
"""Runs JAX's coordination service: coordinator.py ADDRESS PROCESSES.

By default JAX runs the service in rank 0, and when rank 0 dies, JAX aborts all
other ranks before they can report what they saw. With a recoverable service,
the death of a rank ends no other rank, and no rank waits for a dead one when it
ends.

This program does not import JAX, which would take a second of every launch.
"""

import signal
import sys

from jaxlib import _jax


def main(address: str, num_processes: str) -> None:
  service = _jax.get_distributed_runtime_service(
    address, int(num_processes), recoverable=True
  )
  while service:  # until the launcher ends this
    signal.pause()


if __name__ == "__main__":
  main(*sys.argv[1:])
