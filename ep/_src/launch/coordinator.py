# SPDX-License-Identifier: Apache-2.0
"""Runs JAX's coordination service: coordinator.py ADDRESS PROCESSES.

Left to JAX, it runs in rank 0, and when that dies JAX aborts all other ranks
before they can report what they saw. In a recoverable service ranks are not
ended because another died, and do not wait for it when they end.

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
