# SPDX-License-Identifier: Apache-2.0
"""Runs a job, and begins again after a failure."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
import math
import time

from ep.launch import _attempts as attempts
from ep.launch import _hosts as hosts
from ep.launch import _supervision as supervision

_HOUR_S = 3600.0
_HEALTHY_S = 5.0  # an attempt is healthy if its ranks worked for this time
_LONGEST_WAIT_S = 60.0
_POLL_S = 0.05


@dataclasses.dataclass
class Restarts:
  """The restarts of a job so far, and their limits.

  A restart begins immediately after a healthy attempt. After n attempts in a
  row that were not, it begins after 2^(n - 1) seconds, at most a minute.
  """

  limit: int
  limit_per_hour: int | None
  _begun_at: list[float] = dataclasses.field(default_factory=list)
  _joined_at: float = math.inf
  _failure: str = ""
  _failed_at: float = math.nan
  _wait_s: float = 0.0  # of the last restart

  @property
  def refusal(self) -> str:
    """The limit that forbids another restart, or ""."""
    if len(self._begun_at) >= self.limit:
      return f"max_restarts = {self.limit}"
    recent = [at for at in self._begun_at if time.monotonic() - at < _HOUR_S]
    if self.limit_per_hour is not None and len(recent) >= self.limit_per_hour:
      return f"max_restarts_per_hour = {self.limit_per_hour}"
    return ""

  def joined(self, share: hosts.Share) -> None:
    """Notes that all ranks have joined; reports a restart."""
    self._joined_at = time.monotonic()
    if share.restart:
      supervision.say(
        f"ep.launch: restart {share.restart} of {self.limit}, because"
        f" {self._failure}: {share.total} ranks joined"
        f" {self._joined_at - self._failed_at:.1f} s later\n"
      )

  def begin(self, outcome: supervision.Outcome, signals: Sequence[int]) -> None:
    """Waits until the next attempt may begin, or a signal has come."""
    self._failure, self._failed_at = outcome.failure, outcome.failed_at
    is_healthy = self._failed_at - self._joined_at > _HEALTHY_S
    self._wait_s = 0.0 if is_healthy else self._wait_s * 2 or 1.0
    self._wait_s = min(self._wait_s, _LONGEST_WAIT_S)
    end = time.monotonic() + self._wait_s
    while not signals and (left := end - time.monotonic()) > 0:
      time.sleep(min(left, _POLL_S))
    self._begun_at.append(time.monotonic())
    self._joined_at = math.inf


def run(job: attempts.Job, num_processes: int, restarts: Restarts) -> int:
  """Runs the ranks of this host until the job ends; returns the exit code.

  Raises:
    RuntimeError: host 0 has no ranks for this host.
  """
  places = [*range(num_processes)]
  share = job.team.divide(0, hosts.Losses(num_processes), job.signals)
  while True:
    outcome = job.attempt(
      share, places, functools.partial(restarts.joined, share)
    )
    if not outcome.failure or not restarts.limit:
      return outcome.code
    if refusal := restarts.refusal:
      supervision.say(f"ep.launch: no restart is left ({refusal})\n")
      return outcome.code
    restarts.begin(outcome, job.signals)
    left = [p for i, p in enumerate(places) if i not in outcome.lost] or places
    lost = len(places) - len(left)
    losses = hosts.Losses(len(places), lost, outcome.is_sure)
    try:
      share = job.team.divide(share.restart + 1, losses, job.signals)
    except RuntimeError as e:
      if job.signals:
        return supervision.end_by(job.signals).code
      supervision.say(f"{e}\n")
      return outcome.code
    choices = left, places, [*range(num_processes)]
    places = next(each for each in choices if len(each) == share.ranks)
