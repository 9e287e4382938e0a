# SPDX-License-Identifier: Apache-2.0
"""Starts jobs whose ranks may end in any way, and tells how each rank ended.

The launcher starts the ranks of a `Launched` job. Nobody watches the ranks of a
`Plain` job, which know only an address, as on a cluster. Rank r has its output
in rank_<r>.log of the job's folder. At the end, a job leaves no process, file,
shared memory or socket behind.
"""

import contextlib
import pathlib
import re
import subprocess
import sys
import time

import programs

ENDING = pathlib.Path(__file__).with_name("ending.py")  # a program of ranks
_REPORT = re.compile(
  r"rank (\d+) (?:failed with exit code (\d+)|was killed by signal (\d+)"
  r"|(was still running))"
)


def wait_until(holds, seconds=60, what=lambda: "waited in vain"):
  """Waits until `holds` returns true; `what` describes the failure to wait."""
  deadline = time.monotonic() + seconds
  while not holds():
    assert time.monotonic() < deadline, what()
    time.sleep(0.02)


class ThisHost:
  """This machine, without namespaces."""

  address = "127.0.0.1"
  start = staticmethod(subprocess.Popen)


class Job:
  """The folder, the logs and the traces of a job."""

  def __init__(self, folder, ranks):
    self.folder, self.ranks = folder, range(ranks)
    self._temporary = folder / "tmp"
    self._temporary.mkdir()
    # They name the job's folder, in which its ranks meet.
    self.variables = dict(TMPDIR=str(self._temporary), PYTHONUNBUFFERED="1")

  def log(self, rank):
    return (self.folder / f"rank_{rank}.log").read_text(errors="replace")

  def processes(self):
    """Returns the living processes with the job's variables."""
    mark, found = f"TMPDIR={self._temporary}\0".encode(), []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
      with contextlib.suppress(OSError):
        if mark in (process / "environ").read_bytes():
          found.append(int(process.name))
    return found

  def check_nothing_is_left(self):
    wait_until(lambda: not self.processes(), 20)
    assert not [*self._temporary.iterdir()]


class Launched(Job):
  """A job of `python -m ep launch`, with options such as `grace=0.5`."""

  def __init__(self, folder, *argv, ranks, devices=1, env=None, **options):
    super().__init__(folder, ranks)
    options |= dict(num_processes=ranks, devices_per_process=devices)
    options |= dict(log_dir=folder)
    flags = [f"--{name}={value}" for name, value in options.items()]
    self._output = folder / "output"
    with self._output.open("wb") as output:
      self.launcher = programs.start_launcher(
        *(*flags, *argv),
        env=self.variables | (env or {}),
        stdout=output,
        stderr=subprocess.STDOUT,
      )

  def wait(self, seconds):
    """Returns the launcher's exit code; kills the job after `seconds`."""
    try:
      return self.launcher.wait(seconds)
    except subprocess.TimeoutExpired:
      self.launcher.kill()
      raise

  def output(self):
    return self._output.read_text(errors="replace")

  def codes(self):
    """Returns each rank's exit code from the launcher's report.

    The code is -n for signal n, and None if the launcher stopped the rank.
    """
    codes = dict.fromkeys(self.ranks, 0)
    for rank, code, signal, running in _REPORT.findall(self.output()):
      codes[int(rank)] = None if running else int(code or -int(signal))
    return [*codes.values()]


def of_launch(hosts):
  """Returns a function of a rank: the variables that `ep.launch` documents."""
  address = f"{hosts[0].address}:{programs.free_port()}"
  return lambda rank: dict(
    JAX_COORDINATOR_ADDRESS=address,
    JAX_NUM_PROCESSES=str(len(hosts)),
    JAX_PROCESS_ID=str(rank),
  )


class Plain(Job):
  """Ranks that start on `hosts`, one rank on each, without a launcher.

  `of_rank` returns the variables that tell a rank of the other ones.
  """

  def __init__(self, folder, *argv, hosts, of_rank=None, devices=1, env=None):
    super().__init__(folder, len(hosts))
    count = f"--xla_force_host_platform_device_count={devices}"
    env = dict(JAX_PLATFORMS="cpu", XLA_FLAGS=count) | (env or {})
    of_rank = of_rank or of_launch(hosts)
    self._ranks = []
    for rank, host in enumerate(hosts):
      variables = env | self.variables | of_rank(rank)
      with (folder / f"rank_{rank}.log").open("wb") as log:
        options = dict(env=programs.environment(**variables), stdout=log)
        words = [sys.executable, *map(str, argv)]
        self._ranks.append(host.start(words, stderr=log, **options))

  def __getitem__(self, rank):
    return self._ranks[rank]

  def codes(self, seconds, ranks=None):
    """Waits for ranks, by default for all; returns their exit codes."""
    deadline = time.monotonic() + seconds
    ranks = self.ranks if ranks is None else ranks
    return [self[r].wait(max(deadline - time.monotonic(), 0)) for r in ranks]

  def close(self):
    for process in self._ranks:
      process.kill()
      process.wait()
