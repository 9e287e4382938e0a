# SPDX-License-Identifier: Apache-2.0
"""Joins this process to the other ranks of a job."""

from __future__ import annotations

import os

from ep._src.base import arguments, processes
from ep._src.native import gpus

# Variables with the number of processes, from launchers unknown to JAX.
_COUNTS_OF_PROCESSES = (
  "JAX_NUM_PROCESSES",
  "OMPI_COMM_WORLD_SIZE",  # Open MPI 5; JAX detects only Open MPI 4
  "PMI_SIZE",  # MPICH, Intel MPI
  "WORLD_SIZE",  # torchrun
)


def inside_launcher() -> bool:
  """Returns whether a launcher set the variables of `ep.launch`."""
  return "JAX_COORDINATOR_ADDRESS" in os.environ


def initialize() -> None:
  """Joins this process to the other ranks that its launcher started.

  The launcher is `launch`, another program that sets the variables of the
  module's docstring, or a launcher that JAX detects and asks for missing
  values. Without a launcher, or for a single rank, this function does nothing.
  Call it before anything else touches JAX devices. Later calls do nothing.

  Afterwards an uncaught exception terminates this rank immediately, as under
  `python -m mpi4py`. Python's orderly exit could wait for programs on the
  devices, and, if the coordination service runs in rank 0, for all other ranks;
  these may be waiting for this rank. The code of `sys.exit` becomes the rank's
  exit code even if the rank cannot close its groups.

  Raises:
    RuntimeError: the process is one of several, but has no address of the
      others.
    ValueError: JAX_COORDINATOR_ADDRESS is not host:port.
  """
  import jax  # this import takes a second; launching processes skip it

  from ep._src.base import compat
  from ep._src.group import ending, liveness

  if jax.distributed.is_initialized():
    return
  gpus.check_plugin()
  count = _int_from_env("JAX_NUM_PROCESSES")
  if not inside_launcher():
    cluster_count = compat.cluster_process_count()
    if cluster_count is None:
      _check_alone()
    count = count or cluster_count or 1
  if count == 1:
    processes.tell("joined")
    return
  if inside_launcher():
    name = "JAX_COORDINATOR_ADDRESS"
    arguments.check_address("ep.launch.initialize", name, os.environ[name])
  processes.tell("joining")
  jax.distributed.initialize(
    num_processes=count, process_id=_int_from_env("JAX_PROCESS_ID")
  )
  compat.bind_cpu_collectives()
  liveness.announce()  # peers then also notice a death before ep_bootstrap
  ending.take_over()


def _check_alone() -> None:
  """Raises `RuntimeError` if JAX does not detect the launcher in use."""
  for name in _COUNTS_OF_PROCESSES:
    if os.environ.get(name, "1") != "1":
      raise RuntimeError(
        f"ep.launch.initialize: {name} = {os.environ[name]}, so this process is"
        " one of several, but JAX does not find the others; set"
        " JAX_COORDINATOR_ADDRESS (a free port of rank 0's host, as host:port),"
        " JAX_NUM_PROCESSES and JAX_PROCESS_ID for each process, or call"
        " jax.distributed.initialize first."
      )


def _int_from_env(name: str) -> int | None:
  value = os.environ.get(name)
  return None if value is None else int(value)
