# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a program, and waits for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import math
import os
import pathlib
import shutil
import signal
import socket
import tempfile
import threading
import time

from ep._src.base import arguments
from ep._src.native import gpus
from ep.launch import _attempts as attempts
from ep.launch import _hosts as hosts
from ep.launch import _limits as limits
from ep.launch import _restarts as restarts


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
  max_restarts: int = 0,
  max_restarts_per_hour: int | None = None,
  min_processes: int | None = None,
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

  With `max_restarts`, the job begins again after a failure, when all its ranks
  have ended: with the same program, arguments and coordinator, and with new
  ranks. If fewer ranks than at the start may remain (`min_processes`), the
  places of ranks that caused the failure stay empty, and the other ranks are
  numbered anew; so is a job on several hosts without a host that is out of
  reach. A rank causes a failure if a signal kills it, if it does not end when
  most of the others have failed, or if it is the first to fail. When
  fewer than `min_processes` would remain, all places are used again, and
  missing hosts are waited for. A launcher that is started with the number of a
  missing host joins the job at its next restart. A job does not survive host 0.
  For each restart, a line says why it was necessary, and how long it took until
  all ranks had joined. The logs of restart n are in the folder `restart_<n>`.

  The launcher passes SIGINT and SIGTERM on to the ranks, which then have
  `grace_s` to end.

  On Linux no rank outlives this call, even if SIGKILL ends the launcher. When a
  rank ends, the launcher kills the remaining processes of its process group; no
  one does so after SIGKILL.

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
    max_restarts: how often a job that failed begins again. A restart waits if
      ranks failed within 5 s of joining: 1 s, and twice as long each time, at
      most 60 s.
    max_restarts_per_hour: a further limit, or None.
    min_processes: the number of ranks, on all hosts, with which a job may begin
      again. By default all of them: new processes replace the lost ones.

  Returns:
    0 if every rank succeeded. Otherwise, of the last attempt, the exit code of
    the first failed rank, or 128 + n if signal n killed it; 128 + n if this
    process got signal n; 124 after a timeout; 1 if only some of the ranks
    joined.

  Raises:
    ValueError: there are fewer GPUs than the ranks need, a number is out of
      range or too large for this host, the logs cannot be written, or
      `coordinator` is not an address.
    RuntimeError: on every connected host, if another host has not connected in
      time, has the same index, or differs in the numbers of hosts, processes,
      devices, ranks per GPU or restarts.
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
  arguments.seconds("ep.launch", "join_timeout_s", join_timeout_s)
  if timeout_s is not None:
    arguments.seconds("ep.launch", "timeout_s", timeout_s)
  if grace_s:
    arguments.seconds("ep.launch", "grace_s", grace_s)
  if not 0 <= arguments.integer("ep.launch", "host_id", host_id) < num_hosts:
    raise ValueError(
      f"ep.launch: host_id = {host_id}, but the hosts are 0..{num_hosts - 1}."
    )
  most = num_hosts * num_processes
  min_processes = most if min_processes is None else min_processes
  counts = dict(
    max_restarts=(max_restarts, 0, math.inf),
    min_processes=(min_processes, 1, most),
  )
  if max_restarts_per_hour is not None:
    counts["max_restarts_per_hour"] = (max_restarts_per_hour, 1, math.inf)
  for name, (value, least, largest) in counts.items():
    if not least <= arguments.integer("ep.launch", name, value) <= largest:
      raise ValueError(
        f"ep.launch: {name} = {value}, but it must be at least {least}"
        + (f" and at most {largest}, the number of ranks." * (largest == most))
      )
  common |= dict(max_restarts=max_restarts, min_processes=min_processes)
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
  env_of_places: Sequence[Mapping[str, str]] = [{}] * num_processes
  if gpus.wanted(env):
    env_of_places = gpus.rank_variables(num_processes, ranks_per_gpu)
  else:
    env = attempts.KEEP_MEMORY | env
  outputs = os.environ.get("TEST_UNDECLARED_OUTPUTS_DIR")
  keep_logs = bool(log_dir or outputs)
  with contextlib.ExitStack() as stack:
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
    if num_hosts == 1:
      coordinator = f"127.0.0.1:{stack.enter_context(_reserved_port())}"
    assert coordinator
    team = hosts.Hosts(stack, host_id, coordinator, common, join_timeout_s)
    signals = stack.enter_context(_caught_signals())
    job = attempts.Job(
      argv=argv,
      env=env,
      env_of_places=env_of_places,
      devices_per_process=devices_per_process,
      coordinator=coordinator,
      logs=logs,
      states=states,
      team=team,
      signals=signals,
      timeout_at=time.monotonic() + (timeout_s or math.inf),
      grace_s=grace_s,
    )
    limits_of_restarts = restarts.Restarts(max_restarts, max_restarts_per_hour)
    code = restarts.run(job, num_processes, limits_of_restarts)
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
