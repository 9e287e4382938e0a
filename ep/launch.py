# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a program on each host, and joins them from inside.

    python -m ep.launch --num_processes=4 train.py --steps=10
    python -m ep.launch --num_processes=4 -m pytest tests

`launch` is the same as a function, and `initialize`, which the program calls
before anything else touches JAX, makes each process one rank. `launch` and
`initialize` share only a few environment variables, so a cluster's own launcher
can replace `launch`:

    JAX_COORDINATOR_ADDRESS   host:port of JAX's coordination service
    JAX_NUM_PROCESSES         how many ranks there are
    JAX_PROCESS_ID            which of them this process is

The service is a process of the launcher's, so that it survives the death of any
rank. JAX makes rank 0 start one too; nothing connects to it.

Under another launcher that JAX knows (SLURM, Open MPI, an indexed Kubernetes
job, Cloud TPU) `initialize` needs no variables.

If there is a variable EP_LAUNCH_STATE, ranks tell this launcher how far they
have come: joining, joined or ending. So it can name ranks that ran alone, ranks
for which others wait in vain, and the rank that failed first.

Only `initialize` touches JAX's devices: a process that launches must not hold
the devices of its ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
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
from ep._src.launch import hosts, room, states, supervision
from ep._src.native import gpus

_COORDINATOR = str(pathlib.Path(__file__).parent / "_src/launch/coordinator.py")
# Variables in which launchers that JAX does not detect say how many processes
# there are.
_COUNTS_OF_PROCESSES = (
  "JAX_NUM_PROCESSES",
  "OMPI_COMM_WORLD_SIZE",  # Open MPI 5; JAX detects 4
  "PMI_SIZE",  # MPICH, Intel MPI
  "WORLD_SIZE",  # torchrun
)

# Ranks on the CPU get these variables. XLA takes memory for every result from
# malloc, which by default returns large pieces to the kernel and gets them back
# as pages of zeros: that takes longer than an exchange (docs/performance.md).
_KEEP_MEMORY = {
  "MALLOC_MMAP_MAX_": "0",
  "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
  "MALLOC_ARENA_MAX": "1",
}


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
  states.tell("joining")
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
  """Runs `python *argv` in `num_processes` processes and waits for them all.

  With `num_hosts` it is called on every host, with the same arguments but for
  `host_id`, and each starts `num_processes` ranks. The hosts end together, with
  the code of the first failure. One that no packet reaches for 15 s has failed.

  Each rank finds the variables of the module's docstring, runs on the CPU
  unless JAX_PLATFORMS says otherwise, sees `devices_per_process` CPU devices,
  and imports from the same folders as this process. Ranks read nothing from
  stdin. On the CPU they keep freed memory for the next step (glibc's MALLOC_*
  variables, unless they are set already). JAX's preemption service is off
  unless JAX_ENABLE_PREEMPTION_SERVICE is set: it catches SIGTERM for
  `multihost_utils.reached_preemption_sync_point`, and the rank goes on.

  Rank r writes stdout and stderr to `rank_<r>.log`; the log of rank 0 is also
  copied to this process's stdout as it grows. If a rank fails, the others get
  `grace_s` to report what they saw, then are made to dump their stacks and end.
  The first failure decides the result; the last lines of its log are printed,
  then a line for each other rank that failed or was still running. If stdout is
  closed meanwhile (`| head`), the job goes on, and what is left to say goes to
  stderr.

  If ranks end that have not called `initialize`, a line on stderr says so: each
  of them sees its own devices only, and takes itself for the whole job. It is a
  failure, whatever the exit code, if other ranks wait for it in `initialize`.

  SIGINT and SIGTERM are passed on to the ranks, which get `grace_s` to end.

  On Linux no rank outlives this call, even if the launcher dies by SIGKILL.
  When a rank ends, so does every process that it started and that has not left
  its process group.

  Args:
    argv: what follows `python` on a command line: ["train.py", "--steps=10"] or
      ["-m", "pytest", "tests"].
    num_processes: how many ranks each host starts.
    devices_per_process: CPU devices of each rank; other platforms ignore it.
    ranks_per_gpu: how many ranks share a GPU, where JAX_PLATFORMS names GPUs
      and each rank sees one GPU of this host (NCCL 2.30 and newer allow
      sharing). It is for tests: times mean nothing then.
    log_dir: folder for the logs, created if missing. By default a new folder
      under $TEST_UNDECLARED_OUTPUTS_DIR (a Bazel test keeps it), or else a
      temporary one that is removed if all ranks succeed.
    timeout_s: after this time, ranks dump their stacks and end; None never ends
      them.
    grace_s: seconds that ranks get to end by themselves; see above.
    env: variables that are added to this process's own.
    num_hosts: how many hosts there are.
    host_id: the number of this one, from 0 on.
    coordinator: an address of host 0 and a free port there, as host:port, where
      the hosts meet; JAX's coordination service has it afterwards. Needed with
      several hosts. Collectives of XLA between CPUs take the network by which a
      host reaches this address.
    join_timeout_s: seconds that hosts wait for each other at the start.
    oversubscribe: whether to start more processes than this host can hold, by
      its memory and its processors.

  Returns:
    0 if every rank succeeded. Otherwise the exit code of the first that did
    not, 128 + n if it died of signal n; 128 + n if this process was asked to
    end by signal n; 124 on timeout; 1 if only some of the ranks joined.

  Raises:
    ValueError: there are fewer GPUs than the ranks need, a number is out of
      range or too large for this host, no log can be written, or `coordinator`
      is no address.
    RuntimeError: on every host that has come: some host has not come in time,
      has another's number, or other numbers of hosts, processes or devices.
    TypeError: a number is of a wrong type.
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
    room.check(num_processes, devices_per_process)
  if coordinator is not None:
    arguments.check_address("ep.launch", "coordinator", coordinator)
  env = {"JAX_PLATFORMS": "cpu", **os.environ, **(env or {})}
  own: Sequence[Mapping[str, str]] = [{}] * num_processes
  if gpus.wanted(env):
    own = gpus.rank_variables(num_processes, ranks_per_gpu)
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

    def start(name: str, argv: Sequence[str], env: Mapping[str, str]):
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
          {**env, **own[index]},
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
      _report_alone(alone, num_processes)
      code = code or int(0 < len(alone) < num_processes)
  if code == 0 and not keep_logs:
    shutil.rmtree(logs)
  return code


def _report_alone(
  ranks: Sequence[supervision.Process], num_processes: int
) -> None:
  """Says on stderr which ranks have not joined, if there are any."""
  if ranks:
    names = ", ".join(rank.name.removeprefix("rank ") for rank in ranks)
    supervision.write(
      sys.stderr,
      f"ep.launch: of {num_processes} ranks, these have not joined the others:"
      f" {names}. Such a rank sees its own devices only, and takes itself for"
      " the whole job. Call ep.launch.initialize() before anything else touches"
      " JAX.\n",
    )


@contextlib.contextmanager
def _reserved_port():
  """Yields a port of the loopback interface that is reserved meanwhile.

  To find a free port and close it before the service binds it would be a race.
  A port that is bound with SO_REUSEPORT, and never listened on, is given to no
  other socket, but a server of the same user that sets the option too (gRPC
  does) can bind it.
  """
  with socket.socket() as holder:
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind(("127.0.0.1", 0))
    yield holder.getsockname()[1]


@contextlib.contextmanager
def _caught_signals():
  """Yields a list; SIGINT and SIGTERM are appended to it, and do no more."""
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
    "JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1:0",  # for rank 0's own service
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
  # A Bazel launcher may have put its packages on sys.path alone.
  return {**env, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _int_from_env(name: str) -> int | None:
  value = os.environ.get(name)
  return None if value is None else int(value)


def main() -> int:
  """Launches what the arguments of the command line name."""
  parser = argparse.ArgumentParser(
    prog="python -m ep.launch",
    description="Starts the ranks of a Python program on this host.",
  )
  parser.add_argument(
    "--num_processes", type=int, required=True, help="on each host"
  )
  parser.add_argument("--devices_per_process", type=int, default=1)
  parser.add_argument("--ranks_per_gpu", type=int, default=1)
  parser.add_argument("--log_dir")
  parser.add_argument("--timeout", dest="timeout_s", type=float, help="seconds")
  parser.add_argument("--num_hosts", type=int, default=1)
  parser.add_argument("--host_id", type=int, default=0, help="of this host")
  parser.add_argument("--coordinator", help="host:port, a free port of host 0")
  parser.add_argument(
    "--join_timeout",
    dest="join_timeout_s",
    type=float,
    default=300.0,
    help="seconds for all hosts",
  )
  parser.add_argument(
    "--oversubscribe",
    action="store_true",
    help="start more processes than this host can hold",
  )
  rest = argparse.REMAINDER
  parser.add_argument("-m", dest="module", nargs=rest, help="module args...")
  parser.add_argument("script", nargs=rest, help="script.py args...")
  options = vars(parser.parse_args())
  module, script = options.pop("module"), options.pop("script")
  argv = ["-m", *module] if module else script
  if not argv:
    parser.error("name a program to run: a file, or -m and a module")
  try:
    return launch(argv, **options)
  except ValueError as e:
    parser.error(str(e))
  except RuntimeError as e:
    parser.exit(1, f"{e}\n")


if __name__ == "__main__":
  _code = main()
  with contextlib.suppress(AttributeError, OSError):
    sys.stdout.close()  # Python's own flush could change the exit code
  sys.exit(_code)
