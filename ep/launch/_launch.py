# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a program, and waits for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import math
import os
import pathlib
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time

from ep._src.base import arguments
from ep._src.native import gpus
from ep.launch import _supervision as supervision
from ep.launch._process import Process

_COORDINATOR = str(pathlib.Path(__file__).parent / "_coordinator.py")

# Environment of CPU ranks. XLA allocates every result with malloc, which by
# default returns large blocks to the kernel. The kernel then has to zero their
# pages again, which takes longer than an exchange (docs/performance.md).
KEEP_MEMORY = {
  "MALLOC_MMAP_MAX_": "0",
  "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
  "MALLOC_ARENA_MAX": "1",
}


def launch(
  argv: Sequence[str],
  *,
  num_processes: int,
  devices_per_process: int = 1,
  ranks_per_gpu: int = 1,
  log_dir: str | os.PathLike[str] | None = None,
  timeout_s: float | None = None,
  grace_s: float = 10.0,
  env: Mapping[str, str] | None = None,
) -> int:
  """Runs `python *argv` in `num_processes` processes, and waits for them.

  Each rank gets the variables of the module's docstring, runs on the CPU unless
  JAX_PLATFORMS says otherwise, has `devices_per_process` CPU devices, imports
  from the same folders as this process, and has an empty stdin. CPU ranks keep
  freed memory for the next step (glibc's MALLOC_* variables, unless they are
  set). JAX's preemption service is off unless JAX_ENABLE_PREEMPTION_SERVICE is
  set, because it catches SIGTERM without ending the rank.

  Rank r writes stdout and stderr to `rank_<r>.log`. The launcher copies the log
  of rank 0 to its stdout as the log grows. If a rank fails, the others have
  `grace_s` to report their errors; then the launcher makes them dump their
  stacks, and kills them. It prints the last lines of the first failed rank's
  log, and a line for each other rank that failed or was still running. A line
  before these names ranks that had ended with exit code 0, because errors of
  XLA's collectives do not name the rank that is missing. If stdout is closed
  meanwhile (`| head`), the job continues, and the report goes to stderr.

  If ranks end without a call of `initialize`, a line on stderr names them: such
  a rank sees only its own devices, as if it were the whole job. If other ranks
  wait for it in `initialize`, it has failed, whatever its exit code.

  The launcher passes SIGINT and SIGTERM on to the ranks, which then have
  `grace_s` to end.

  On Linux no rank outlives this call, even if SIGKILL ends the launcher. When a
  rank ends, the launcher kills the remaining processes of its process group; no
  one does so after SIGKILL.

  Args:
    argv: the arguments of `python`: ["train.py", "--steps=10"] or
      ["-m", "pytest", "tests"].
    num_processes: number of ranks.
    devices_per_process: CPU devices of each rank; other platforms ignore it.
    ranks_per_gpu: number of ranks that share a GPU, if JAX_PLATFORMS names GPUs
      and each rank sees one GPU of this machine. Sharing needs NCCL 2.30 or
      newer, and is for tests: it makes times meaningless.
    log_dir: folder for the logs, created if missing. By default a new folder
      under $TEST_UNDECLARED_OUTPUTS_DIR (a Bazel test keeps it), or else a
      temporary one that is removed if all ranks succeed.
    timeout_s: after this time, ranks dump their stacks and are killed; None for
      no limit.
    grace_s: seconds that ranks have to end by themselves; see above.
    env: variables to add to this process's variables.

  Returns:
    0 if every rank succeeded. Otherwise the exit code of the first failed rank,
    or 128 + n if signal n killed it; 128 + n if this process got signal n; 124
    after a timeout; 1 if only some of the ranks joined.

  Raises:
    ValueError: there are fewer GPUs than the ranks need, a number is out of
      range, or the logs cannot be written.
    TypeError: an argument has a wrong type.
  """
  if isinstance(argv, str):
    raise arguments.wrong_type("ep.launch", "argv", argv, "a list of strings")
  for name, value in (env or {}).items():
    arguments.string("ep.launch", f"env[{name!r}]", value)
  for name, count in dict(
    num_processes=num_processes,
    devices_per_process=devices_per_process,
    ranks_per_gpu=ranks_per_gpu,
  ).items():
    arguments.at_least(1)("ep.launch", name, count)
  arguments.optional(arguments.seconds)("ep.launch", "timeout_s", timeout_s)
  if grace_s:
    arguments.seconds("ep.launch", "grace_s", grace_s)
  outputs = os.environ.get("TEST_UNDECLARED_OUTPUTS_DIR")
  with contextlib.ExitStack() as stack:
    port = stack.enter_context(_reserved_port())
    coordinator = f"127.0.0.1:{port}"
    environments = _environments(
      {**os.environ, **(env or {})},
      coordinator,
      num_processes,
      devices_per_process,
      ranks_per_gpu,
    )
    try:
      logs = pathlib.Path(log_dir or tempfile.mkdtemp("", "ranks_", outputs))
      logs.mkdir(parents=True, exist_ok=True)
      folder = tempfile.TemporaryDirectory(prefix="states_", dir=logs)
    except OSError as e:
      raise ValueError(
        f"ep.launch: log_dir = {str(log_dir or outputs)!r}, but no file can be"
        f" written there ({e.strerror}); pass another folder."
      ) from e
    states = pathlib.Path(stack.enter_context(folder))
    signals = stack.enter_context(_caught_signals())
    timeout_at = time.monotonic() + (timeout_s or math.inf)

    def start(
      name: str, argv: Sequence[str], env: Mapping[str, str]
    ) -> Process:
      process = Process(name, argv, logs / f"{name}.log", env, states / name)
      stack.callback(process.kill)
      return process

    ranks = [
      start(f"rank_{rank}", argv, own) for rank, own in enumerate(environments)
    ]
    service = None
    if num_processes > 1:
      program = [_COORDINATOR, coordinator, str(num_processes)]
      service = start("coordinator", program, _with_path(os.environ))
    code = supervision.watch(ranks, service, signals, timeout_at, grace_s)
  if code == 0 and not (log_dir or outputs):
    shutil.rmtree(logs)
  return code


def _environments(
  env: Mapping[str, str],
  coordinator: str,
  num_processes: int,
  devices_per_process: int,
  ranks_per_gpu: int,
) -> list[Mapping[str, str]]:
  """Returns the variables of each rank; `env` are the variables of the user."""
  env = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_PREEMPTION_SERVICE": "0",
    **env,
    "JAX_COORDINATOR_ADDRESS": coordinator,
    "JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1:0",  # rank 0's unused service
    "JAX_NUM_PROCESSES": str(num_processes),
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",  # SIGABRT dumps the stacks of a stuck rank
  }
  flag = "--xla_force_host_platform_device_count"
  others = re.sub(rf"{flag}=\S*", "", env.get("XLA_FLAGS", ""))
  env["XLA_FLAGS"] = f"{others} {flag}={devices_per_process}".strip()
  own: Sequence[Mapping[str, str]] = [{}] * num_processes
  if gpus.wanted(env):
    own = gpus.rank_variables(num_processes, ranks_per_gpu)
  else:
    env = KEEP_MEMORY | env
  return [
    {**_with_path(env), **each, "JAX_PROCESS_ID": str(rank)}
    for rank, each in enumerate(own)
  ]


def _with_path(env: Mapping[str, str]) -> dict[str, str]:
  # A Bazel launcher may have changed sys.path, but not PYTHONPATH.
  return {**env, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
  """Reserves a port of the loopback interface, and yields it.

  The socket stays bound: otherwise another program could take the port before
  the service binds it. With SO_REUSEPORT, the kernel gives the port to no other
  socket, but a server of the same user with this option (gRPC sets it) can bind
  the port.
  """
  with socket.socket() as holder:
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind(("127.0.0.1", 0))
    yield holder.getsockname()[1]


@contextlib.contextmanager
def _caught_signals() -> Iterator[list[int]]:
  """Catches SIGINT and SIGTERM; yields the list of caught signals."""
  caught: list[int] = []
  if threading.current_thread() is not threading.main_thread():
    yield caught  # only the main thread may set handlers
    return
  before = {
    signum: signal.signal(signum, lambda s, _: caught.append(s))
    for signum in (signal.SIGINT, signal.SIGTERM)
  }
  try:
    yield caught
  finally:
    for signum, handler in before.items():
      signal.signal(signum, handler)
