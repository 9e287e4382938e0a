# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a program, and waits for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import os
import pathlib
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading

from ep._src.base import arguments
from ep._src.native import gpus
from ep.launch import _hosts as hosts
from ep.launch import _limits as limits
from ep.launch import _supervision as supervision

_COORDINATOR = str(pathlib.Path(__file__).parent / "_coordinator.py")

# Environment of CPU ranks. XLA allocates every result with malloc, which by
# default returns large blocks to the kernel. The kernel then has to zero their
# pages again, which takes longer than an exchange (docs/performance.md).
_KEEP_MEMORY = {
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
  num_hosts: int = 1,
  host_id: int = 0,
  coordinator: str | None = None,
  join_timeout_s: float = 300.0,
  oversubscribe: bool = False,
) -> int:
  """Runs `python *argv` in `num_processes` processes, and waits for them.

  With several hosts, call it on every host with the same arguments except
  `host_id`. Each host starts `num_processes` ranks. The hosts end together,
  with the exit code of the first failure. A host that is out of reach for 15 s
  has failed.

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
  log, and a line for each other rank that failed or was still running. If
  stdout is closed meanwhile (`| head`), the job continues, and the report goes
  to stderr.

  If ranks end without a call of `initialize`, a line on stderr names them: such
  a rank sees only its own devices, as if it were the whole job. If other ranks
  wait for it in `initialize`, it has failed, whatever its exit code.

  The launcher passes SIGINT and SIGTERM on to the ranks, which then have
  `grace_s` to end.

  On Linux no rank outlives this call, even if SIGKILL ends the launcher. When a
  rank ends, the launcher kills the remaining processes of its process group.

  Args:
    argv: the arguments of `python`: ["train.py", "--steps=10"] or
      ["-m", "pytest", "tests"].
    num_processes: number of ranks on each host.
    devices_per_process: CPU devices of each rank; other platforms ignore it.
    ranks_per_gpu: number of ranks that share a GPU, if JAX_PLATFORMS names GPUs
      and each rank sees one GPU of this host. Sharing needs NCCL 2.30 or newer,
      and is for tests: it makes times meaningless.
    log_dir: folder for the logs, created if missing. By default a new folder
      under $TEST_UNDECLARED_OUTPUTS_DIR (a Bazel test keeps it), or else a
      temporary one that is removed if all ranks succeed.
    timeout_s: after this time, ranks dump their stacks and are killed; None for
      no limit.
    grace_s: seconds that ranks have to end by themselves; see above.
    env: variables to add to this process's variables.
    num_hosts: number of hosts.
    host_id: index of this host, from 0 on.
    coordinator: an address of host 0 and a free port there, as host:port.
      Required with several hosts. The hosts connect there first; then JAX's
      coordination service uses it. XLA's collectives between CPUs use the
      network by which a host reaches this address.
    join_timeout_s: seconds that hosts wait for each other at the start.
    oversubscribe: whether to start more processes than this host can hold, by
      its memory and its processors.

  Returns:
    0 if every rank succeeded. Otherwise the exit code of the first failed rank,
    or 128 + n if signal n killed it; 128 + n if this process got signal n; 124
    after a timeout; 1 if only some of the ranks joined.

  Raises:
    ValueError: there are fewer GPUs than the ranks need, a number is out of
      range or too large for this host, the logs cannot be written, or
      `coordinator` is not an address.
    RuntimeError: on every connected host, if another host has not connected in
      time, has the same index, or differs in the numbers of hosts, processes or
      devices.
    TypeError: a number has a wrong type.
  """
  common = dict(
    num_hosts=num_hosts,
    num_processes=num_processes,
    devices_per_process=devices_per_process,
    ranks_per_gpu=ranks_per_gpu,
  )
  for name, value in common.items():
    if arguments.integer("ep.launch", name, value) < 1:
      raise ValueError(f"ep.launch: {name} = {value}, but it must be positive.")
  if timeout_s is not None:
    arguments.seconds("ep.launch", "timeout_s", timeout_s)
  arguments.seconds("ep.launch", "join_timeout_s", join_timeout_s)
  if not 0 <= arguments.integer("ep.launch", "host_id", host_id) < num_hosts:
    raise ValueError(
      f"ep.launch: host_id = {host_id}, but the hosts are 0..{num_hosts - 1}."
    )
  if num_hosts > 1 and coordinator is None:
    raise ValueError(
      f"ep.launch: num_hosts = {num_hosts}, but there is no coordinator; pass"
      " an address of host 0 with a free port, as in 10.0.0.1:1234."
    )
  if not arguments.flag("ep.launch", "oversubscribe", oversubscribe):
    limits.check(num_processes, devices_per_process)
  if coordinator is not None:
    arguments.check_address("ep.launch", "coordinator", coordinator)
  env = {"JAX_PLATFORMS": "cpu", **os.environ, **(env or {})}
  env_of_ranks: Sequence[Mapping[str, str]] = [{}] * num_processes
  if gpus.wanted(env):
    env_of_ranks = gpus.rank_variables(num_processes, ranks_per_gpu)
  else:
    env = _KEEP_MEMORY | env
  first, total = host_id * num_processes, num_hosts * num_processes
  outputs = os.environ.get("TEST_UNDECLARED_OUTPUTS_DIR")
  keep_logs = bool(log_dir or outputs)
  logs = pathlib.Path(log_dir or tempfile.mkdtemp("", "ranks_", outputs))
  with contextlib.ExitStack() as stack:
    try:
      logs.mkdir(parents=True, exist_ok=True)
      folder = tempfile.TemporaryDirectory(prefix="states_", dir=logs)
    except OSError as e:
      raise ValueError(
        f"ep.launch: log_dir = {str(logs)!r}, but no file can be written there"
        f" ({e.strerror}); pass another folder."
      ) from e
    states_of_ranks = pathlib.Path(stack.enter_context(folder))
    peers: list[hosts.Host] = []
    if num_hosts > 1:
      assert coordinator
      peers = hosts.join(stack, host_id, coordinator, common, join_timeout_s)
    else:
      port = stack.enter_context(_reserved_port())
      coordinator = f"127.0.0.1:{port}"
    signals = stack.enter_context(_caught_signals())

    def start(
      name: str, argv: Sequence[str], env: Mapping[str, str]
    ) -> supervision.Process:
      process = supervision.Process(
        name, argv, logs / f"{name}.log", env, states_of_ranks / name
      )
      stack.callback(process.kill)
      return process

    ranks = [
      start(
        f"rank_{first + index}",
        argv,
        _rank_env(
          first + index,
          total,
          devices_per_process,
          coordinator,
          {**env, **env_of_ranks[index]},
        ),
      )
      for index in range(num_processes)
    ]
    others = []
    if total > 1 and host_id == 0:
      program = [_COORDINATOR, coordinator, str(total)]
      others = [start("coordinator", program, _python_env(os.environ))]
    code = supervision.watch(ranks, others, peers, signals, timeout_s, grace_s)
    if total > 1 and not signals:
      alone = [r for r in ranks if not (r.told("joining") or r.told("joined"))]
      if alone:
        names = ", ".join(rank.name.removeprefix("rank ") for rank in alone)
        supervision.write(
          sys.stderr,
          f"ep.launch: of {num_processes} ranks, these have not joined the"
          f" others: {names}. Such a rank sees its own devices only, and takes"
          " itself for the whole job. Call ep.launch.initialize() before"
          " anything else touches JAX.\n",
        )
      code = code or int(0 < len(alone) < num_processes)
  if code == 0 and not keep_logs:
    shutil.rmtree(logs)
  return code


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


def _rank_env(
  index: int,
  num_processes: int,
  devices_per_process: int,
  coordinator: str,
  env: Mapping[str, str],
) -> dict[str, str]:
  env = {
    **_python_env(env),
    "JAX_COORDINATOR_ADDRESS": coordinator,
    "JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1:0",  # rank 0's unused service
    "JAX_NUM_PROCESSES": str(num_processes),
    "JAX_PROCESS_ID": str(index),
    "JAX_ENABLE_PREEMPTION_SERVICE": env.get(
      "JAX_ENABLE_PREEMPTION_SERVICE", "0"
    ),
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",  # SIGABRT dumps the stacks of a stuck rank
  }
  flag = "--xla_force_host_platform_device_count"
  others = re.sub(rf"{flag}=\S*", "", env.get("XLA_FLAGS", ""))
  env["XLA_FLAGS"] = f"{others} {flag}={devices_per_process}".strip()
  return env


def _python_env(env: Mapping[str, str]) -> dict[str, str]:
  # A Bazel launcher may have changed sys.path, but not PYTHONPATH.
  return {**env, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
