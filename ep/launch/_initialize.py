# SPDX-License-Identifier: Apache-2.0
"""Joins the ranks of a job, from inside one of them."""

from __future__ import annotations

import os

from ep._src.base import arguments, processes
from ep._src.native import gpus

# Variables in which launchers that JAX does not detect say how many processes
# there are.
_COUNTS_OF_PROCESSES = (
  "JAX_NUM_PROCESSES",
  "OMPI_COMM_WORLD_SIZE",  # Open MPI 5; JAX detects 4
  "PMI_SIZE",  # MPICH, Intel MPI
  "WORLD_SIZE",  # torchrun
)


def inside_launcher() -> bool:
  """Returns whether a launcher set the variables for this process."""
  return "JAX_COORDINATOR_ADDRESS" in os.environ


def initialize() -> None:
  """Joins the other ranks of the launcher that started this process.

  The launcher is `launch`, another program that sets the variables of the
  module's docstring, or a launcher that JAX knows: JAX asks it for values that
  are not in the variables. Does nothing without a launcher, or as its only
  rank. Call it before anything else touches JAX devices; calling it again is
  harmless.

  From here on an uncaught exception ends this rank at once, as it does under
  `python -m mpi4py`. Python's orderly exit may first wait for programs on the
  devices and, where a cluster's launcher leaves the coordination service to
  rank 0, for all the other ranks; and those may be waiting for this one. The
  code of `sys.exit` is the rank's even if its groups cannot be closed.

  Raises:
    RuntimeError: the process is one of several, but does not know where the
      others are.
    ValueError: JAX_COORDINATOR_ADDRESS is not host:port.
  """
  import jax  # takes a second, and who launches does not need it

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
    return
  if inside_launcher():
    name = "JAX_COORDINATOR_ADDRESS"
    arguments.check_address("ep.launch.initialize", name, os.environ[name])
  processes.tell("joining")
  jax.distributed.initialize(
    num_processes=count, process_id=_int_from_env("JAX_PROCESS_ID")
  )
  compat.bind_cpu_collectives()
  liveness.announce()  # a death before ep_bootstrap is noticed, too
  ending.take_over()


def _check_alone() -> None:
  """Raises `RuntimeError` if a launcher that JAX does not know started this."""
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
