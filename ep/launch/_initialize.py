# SPDX-License-Identifier: Apache-2.0
"""Joins this process to the other ranks of a job."""

from __future__ import annotations

import importlib.util
import os

from ep._src.base import arguments
from ep._src.native import gpus, processes

# Variables with the number of processes that MPI has started.
_MPI_COUNTS = (
  "OMPI_COMM_WORLD_SIZE",  # Open MPI 5; JAX detects Open MPI 4 without mpi4py
  "PMI_SIZE",  # MPICH, Intel MPI
)
_COUNTS = ("JAX_NUM_PROCESSES", *_MPI_COUNTS, "WORLD_SIZE")  # of torchrun


def inside_launcher() -> bool:
  """Returns whether a launcher set the variables of `ep.launch`."""
  return "JAX_COORDINATOR_ADDRESS" in os.environ


def initialize(*, exit_at_once: bool | None = None) -> None:
  """Joins this process to the other ranks that its launcher started.

  The launcher is `launch`, another program that sets the variables of the
  module's docstring, or a cluster that `jax.distributed` detects, and asks for
  all values: SLURM, Open MPI 4, a JobSet or an indexed job of Kubernetes, a
  slice of TPUs, and, with mpi4py, Open MPI 5, MPICH and Intel MPI. Without a
  launcher, or for a single rank, this function does nothing. Call it before
  anything else touches JAX devices. Later calls do nothing.

  When a rank exits, it tells the other ranks. If its uncaught exception is an
  error of XLA's CPU collectives, which names no rank, it prints which ranks are
  missing.

  Args:
    exit_at_once: whether an uncaught exception terminates this rank
      immediately, as under `python -m mpi4py`. Python's orderly exit could wait
      for programs on the devices, and for JAX's barrier of all ranks; these may
      be waiting for this rank. True replaces `sys.excepthook` and `sys.exit`:
      the code of `sys.exit` becomes the rank's exit code even if the rank
      cannot close its groups; otherwise this code is 1. None is True under
      `launch`, whose ranks belong to it, and False elsewhere.

  Raises:
    RuntimeError: the process is one of several, but JAX does not find the
      others.
    TypeError: `exit_at_once` is neither a bool nor None.
    ValueError: JAX_COORDINATOR_ADDRESS is not host:port.
  """
  import jax  # this import takes a second; launching processes skip it

  from ep._src.base import compat
  from ep._src.group import ending, liveness

  if exit_at_once is None:
    exit_at_once = processes.VARIABLE in os.environ
  exit_at_once = arguments.flag(
    "ep.launch.initialize", "exit_at_once", exit_at_once
  )
  if jax.distributed.is_initialized():
    return
  gpus.check_plugin()
  count, method = _int_from_env("JAX_NUM_PROCESSES"), None
  if inside_launcher():
    name = "JAX_COORDINATOR_ADDRESS"
    arguments.check_address("ep.launch.initialize", name, os.environ[name])
  elif detected := compat.cluster_process_count():
    count = count or detected
  else:
    count, method = _undetected()
  if count == 1:
    processes.tell("joined")
    return
  processes.tell("joining")
  jax.distributed.initialize(
    num_processes=count,
    process_id=_int_from_env("JAX_PROCESS_ID"),
    cluster_detection_method=method,
  )
  compat.bind_cpu_collectives()
  liveness.announce()  # peers then also notice a death before ep_bootstrap
  ending.announce(exit_at_once=exit_at_once)


def _undetected() -> tuple[int, str | None]:
  """Returns the number of processes, and JAX's way to find them if asked.

  JAX uses mpi4py only if asked, because programs without MPI may import it.

  Raises:
    RuntimeError: there are several processes, but no way to find them.
  """
  for name in _COUNTS:
    count = _int_from_env(name) or 1
    if count > 1 and name in _MPI_COUNTS and importlib.util.find_spec("mpi4py"):
      return count, "mpi4py"
    if count > 1:
      mpi4py = "install mpi4py, or " * (name in _MPI_COUNTS)
      raise RuntimeError(
        f"ep.launch.initialize: {name} = {count}, so this process is one of"
        f" several, but JAX does not find the others; {mpi4py}set"
        " JAX_COORDINATOR_ADDRESS (a free port of rank 0's host, as host:port),"
        " JAX_NUM_PROCESSES and JAX_PROCESS_ID for each process."
      )
  return 1, None


def _int_from_env(name: str) -> int | None:
  value = os.environ.get(name)
  return int(value) if value else None
