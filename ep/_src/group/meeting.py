# SPDX-License-Identifier: Apache-2.0
"""A meeting, in which processes check that they agree, and exchange data.

A meeting uses a folder of JAX's key-value store, which the first process
deletes at the next meeting:

    terms/<process>                    the values on which all must agree
    introduction/<domain>/<process>    the data for processes of its domain
    digest/<process>                   a hash of the terms, or an error
    verdict                            {} or the error, by the first process

A process publishes its digest last. The first process reads all digests in one
request. If one differs, the first process reads the terms of that process, and
its verdict names the difference. So the number of requests of a process does
not depend on the number of processes, and a process reads only data of its
domain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import hashlib
import json
import math
import time
from typing import Any

import jax

from ep._src.group import liveness

# The first process polls for digests at intervals from _SOON_S to _LOOK_AFTER_S
# seconds, and for dead processes every _LOOK_AFTER_S seconds.
_SOON_S, _LOOK_AFTER_S = 0.01, 0.5
# The other processes poll for the death of the first process at intervals from
# _PATIENT_S to _RARELY_S seconds.
_PATIENT_S, _RARELY_S = 2.0, 8.0


def digest(value: object) -> str:
  """Returns a hash of a value, as 16 hexadecimal digits."""
  return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Meeting:
  """One process's side of a meeting with all processes of a mesh."""

  what: str  # the function that the user called
  client: Any  # JAX's client of the key-value store
  folder: str  # equal on all processes
  members: Sequence[int]  # the processes, in ascending order
  me: int  # this process
  timeout_s: float  # seconds that a process waits for the others

  def fail(self, error: Exception) -> None:
    """Publishes that this process failed before it published its terms."""
    self._set(f"digest/{self.me}", dict(error=str(error)))
    if self._is_first:
      text = f"process {self.me} failed: {error}"
      self._set("verdict", dict(error="RuntimeError", text=text))

  def hold(
    self,
    terms: Mapping[str, str],
    introduction: Mapping[str, Any],
    domain: int,
  ) -> dict[int, dict[str, Any]]:
    """Runs the meeting; returns the domain's introductions, or {} if none.

    Raises:
      ValueError: on all processes, if their terms differ.
      RuntimeError: on all processes, if one failed, died or did not arrive.
    """
    self.publish(terms, introduction, domain)
    self.settle(terms)
    return self.introductions(domain) if introduction else {}

  def publish(
    self,
    terms: Mapping[str, str],
    introduction: Mapping[str, Any],
    domain: int,
  ) -> None:
    self._set(f"terms/{self.me}", terms)
    if introduction:
      self._set(f"introduction/{domain}/{self.me}", introduction)
    self._set(f"digest/{self.me}", dict(terms=digest([*terms.items()])))

  def settle(self, terms: Mapping[str, str]) -> None:
    """Waits until all processes have published terms; raises as `hold` does."""
    if self._is_first:
      verdict = self._judge(terms)
      self._set("verdict", verdict)
    else:
      verdict = self._wait_for_verdict()
    if verdict:
      error = ValueError if verdict["error"] == "ValueError" else RuntimeError
      raise error(f"{self.what}: {verdict['text']}")

  def introductions(self, domain: int) -> dict[int, dict[str, Any]]:
    """Returns the introductions of a domain. Call it after `settle`."""
    return dict(sorted(self._get(f"introduction/{domain}").items()))

  def delete(self, folders: Sequence[str]) -> None:
    """Deletes folders of earlier meetings, if this process is the first.

    No process still reads them: each process has published in this meeting.
    """
    if self._is_first:
      for folder in folders:
        self.client.key_value_delete(f"{folder}/")

  @property
  def _is_first(self) -> bool:
    return self.me == self.members[0]

  def _judge(self, terms: Mapping[str, str]) -> dict[str, str]:
    """Returns the verdict: {} if all agree, or the error."""
    mine = digest([*terms.items()])
    deadline = time.monotonic() + self.timeout_s
    look_at = time.monotonic() + _LOOK_AFTER_S
    pause_s = _SOON_S
    while True:
      found = self._get("digest")
      for process, answer in found.items():
        if "error" in answer:
          text = f"process {process} failed: {answer['error']}"
          return dict(error="RuntimeError", text=text)
        if answer["terms"] != mine:
          text = self._difference(terms, process)
          return dict(error="ValueError", text=text)
      missing = [p for p in self.members if p not in found]
      if not missing:
        return {}
      now = time.monotonic()
      if now >= look_at:
        look_at = now + _LOOK_AFTER_S
        if dead := liveness.dead(self.client, missing):
          return dict(error="RuntimeError", text=_died(dead[0]))
      if now >= deadline:
        return dict(error="RuntimeError", text=self._late(missing))
      time.sleep(min(pause_s, max(deadline - now, 0)))
      pause_s = min(1.5 * pause_s, _LOOK_AFTER_S)

  def _difference(self, terms: Mapping[str, str], process: int) -> str:
    """Returns a sentence about the first term that differs on `process`."""
    key = f"{self.folder}/terms/{process}"
    theirs = json.loads(self.client.key_value_try_get(key))
    field = next(f for f in [*terms, *theirs] if terms.get(f) != theirs.get(f))
    return (
      f"{field} = {terms.get(field)} on process {self.me}, but"
      f" {theirs.get(field)} on process {process}; all processes must pass the"
      " same arguments, run the same versions, have the same settings, and"
      " compile with the same options."
    )

  def _wait_for_verdict(self) -> dict[str, str]:
    first = self.members[0]
    deadline = time.monotonic() + self.timeout_s
    wait_s = _PATIENT_S
    while True:
      left_s = max(deadline - time.monotonic(), 0.001)
      try:
        text = self.client.blocking_key_value_get(
          f"{self.folder}/verdict", math.ceil(min(wait_s, left_s) * 1000)
        )
        verdict: dict[str, str] = json.loads(text)
        return verdict
      except jax.errors.JaxRuntimeError:
        if liveness.dead(self.client, [first]):
          return dict(error="RuntimeError", text=_died(first))
        if time.monotonic() >= deadline:
          found = self._get("digest")
          missing = [p for p in self.members if p not in found] or [first]
          return dict(error="RuntimeError", text=self._late(missing))
      wait_s = min(2 * wait_s, _RARELY_S)

  def _late(self, missing: Sequence[int]) -> str:
    named = ", ".join(map(str, missing[:8]))
    more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
    return (
      f"process {named}{more} did not come within timeout_s = {self.timeout_s}"
      f" s; every process of the mesh must call {self.what}, with the same"
      " arguments and in the same order."
    )

  def _set(self, name: str, value: object) -> None:
    self.client.key_value_set(f"{self.folder}/{name}", json.dumps(value))

  def _get(self, name: str) -> dict[int, Any]:
    """Returns the values in the subfolder `name`, by process."""
    found = self.client.key_value_dir_get(f"{self.folder}/{name}/")
    return {int(key.rpartition("/")[2]): json.loads(v) for key, v in found}


def _died(process: int) -> str:
  return f"process {process} died; restart the job."
