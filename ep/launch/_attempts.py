# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a job on this host, as often as the job begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import contextlib
import dataclasses
import os
import pathlib
import re
import sys

from ep._src.base import processes
from ep.launch import _hosts as hosts
from ep.launch import _supervision as supervision

_COORDINATOR = str(pathlib.Path(__file__).parent / "_coordinator.py")

# Environment of CPU ranks. XLA allocates every result with malloc, which by
# default returns large blocks to the kernel. The kernel then has to zero their
# pages again, which takes longer than an exchange (docs/performance.md).
KEEP_MEMORY = {
  "MALLOC_MMAP_MAX_": "0",
  "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
  "MALLOC_ARENA_MAX": "1",
}


@dataclasses.dataclass(frozen=True)
class Job:
  """The arguments of `launch` that hold for every attempt."""

  argv: Sequence[str]
  env: Mapping[str, str]
  env_of_places: Sequence[Mapping[str, str]]
  devices_per_process: int
  coordinator: str
  logs: pathlib.Path
  states: pathlib.Path  # the folder of what ranks tell their launcher
  team: hosts.Hosts
  signals: Sequence[int]
  timeout_at: float
  grace_s: float

  def attempt(
    self,
    share: hosts.Share,
    places: Sequence[int],
    joined: Callable[[], None],
  ) -> supervision.Outcome:
    """Runs ranks until they end.

    Args:
      share: the ranks of this host.
      places: the place of each rank, such as the index of a GPU.
      joined: called when the ranks have joined.
    """
    restart = f"restart_{share.restart}" if share.restart else ""
    logs, states = self.logs / restart, self.states / restart
    for folder in (logs, states):
      folder.mkdir(exist_ok=True)
    with contextlib.ExitStack() as stack:

      def start(
        name: str, argv: Sequence[str], env: Mapping[str, str]
      ) -> supervision.Process:
        process = supervision.Process(
          name, argv, logs / f"{name}.log", env, states / name
        )
        stack.callback(process.kill)
        return process

      ranks = [
        start(f"rank_{rank}", self.argv, self._env_of_rank(rank, place, share))
        for rank, place in enumerate(places, share.first)
      ]
      others = []
      if share.total > 1 and share.first == 0:
        program = [_COORDINATOR, self.coordinator, str(share.total)]
        others = [start("coordinator", program, _env_of_python(os.environ))]
      outcome = supervision.watch(
        ranks,
        others,
        self.team.peers,
        self.signals,
        self.timeout_at,
        self.grace_s,
        joined,
      )
    if share.total > 1 and not self.signals:
      alone = [r for r in ranks if not (r.told("joining") or r.told("joined"))]
      if alone:
        names = ", ".join(rank.name.removeprefix("rank ") for rank in alone)
        supervision.write(
          sys.stderr,
          f"ep.launch: of {len(ranks)} ranks, these have not joined the"
          f" others: {names}. Such a rank sees its own devices only, and takes"
          " itself for the whole job. Call ep.launch.initialize() before"
          " anything else touches JAX.\n",
        )
      is_split = 0 < len(alone) < len(ranks)
      outcome = outcome._replace(code=outcome.code or int(is_split))
    return outcome

  def _env_of_rank(
    self, rank: int, place: int, share: hosts.Share
  ) -> dict[str, str]:
    preemption = "JAX_ENABLE_PREEMPTION_SERVICE"
    env = {
      **_env_of_python({**self.env, **self.env_of_places[place]}),
      "JAX_COORDINATOR_ADDRESS": self.coordinator,
      "JAX_COORDINATOR_BIND_ADDRESS": "127.0.0.1:0",  # rank 0's unused service
      "JAX_NUM_PROCESSES": str(share.total),
      "JAX_PROCESS_ID": str(rank),
      preemption: self.env.get(preemption, "0"),
      processes.RESTART: str(share.restart),
      "PYTHONUNBUFFERED": "1",
      "PYTHONFAULTHANDLER": "1",  # SIGABRT dumps the stacks of a stuck rank
    }
    flag = "--xla_force_host_platform_device_count"
    others = re.sub(rf"{flag}=\S*", "", env.get("XLA_FLAGS", ""))
    env["XLA_FLAGS"] = f"{others} {flag}={self.devices_per_process}".strip()
    return env


def _env_of_python(env: Mapping[str, str]) -> dict[str, str]:
  # A Bazel launcher may have changed sys.path, but not PYTHONPATH.
  return {**env, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
