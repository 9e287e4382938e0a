# SPDX-License-Identifier: Apache-2.0
"""A meeting: processes find out whether they agree, and introduce themselves.

It goes through JAX's key-value store, in a folder that the first process
deletes at the next meeting:

    terms/<process>                    the values on which all must agree
    introduction/<domain>/<process>    what its domain must know of it
    digest/<process>                   of the terms, or why it failed; the last
    verdict                            of the first process

The first process alone reads all digests, with one request however many there
are. If they differ it reads the terms of one that differs, and its verdict says
what is different. So a process makes the same number of requests in any world,
and what it reads grows with its own domain only.
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

# The first process looks for digests after these, and for dead processes.
_SOON_S, _LOOK_AFTER_S = 0.01, 0.5
# The others look this often whether the first process has died: at first, and
# in a long wait.
_PATIENT_S, _RARELY_S = 2.0, 8.0


def digest(value: object) -> str:
  """Returns 16 hexadecimal digits that differ for other values."""
  return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


@dataclasses.dataclass(frozen=True)
class Meeting:
  """One meeting, seen from one process.

  Attributes:
    what: the function that the user called, for messages.
    client: of the key-value store.
    folder: of the meeting, the same on all processes.
    members: the processes, in ascending order.
    me: this one.
    timeout_s: how long a process waits for the others.
  """

  what: str
  client: Any
  folder: str
  members: Sequence[int]
  me: int
  timeout_s: float

  def fail(self, error: Exception) -> None:
    """Tells the others that this process has failed before the meeting."""
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
    """Returns the introductions of this domain's processes; none if empty.

    Raises:
      ValueError: on all processes, if their terms differ.
      RuntimeError: on all processes, if one failed, died or did not come.
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
    """Tells the others what `hold` was given."""
    self._set(f"terms/{self.me}", terms)
    if introduction:
      self._set(f"introduction/{domain}/{self.me}", introduction)
    self._set(f"digest/{self.me}", dict(terms=digest([*terms.items()])))

  def settle(self, terms: Mapping[str, str]) -> None:
    """Waits until all have published; raises what `hold` raises."""
    if self._is_first:
      verdict = self._judge(terms)
      self._set("verdict", verdict)
    else:
      verdict = self._wait_for_verdict()
    if verdict:
      error = ValueError if verdict["error"] == "ValueError" else RuntimeError
      raise error(f"{self.what}: {verdict['text']}")

  def introductions(self, domain: int) -> dict[int, dict[str, Any]]:
    """Returns the introductions of a domain's processes, which have settled."""
    return dict(sorted(self._get(f"introduction/{domain}").items()))

  def delete(self, folders: Sequence[str]) -> None:
    """Deletes folders of earlier meetings, if this process is the first.

    Every process came to this meeting after it had read those.
    """
    if self._is_first:
      for folder in folders:
        self.client.key_value_delete(f"{folder}/")

  @property
  def _is_first(self) -> bool:
    return self.me == self.members[0]

  def _judge(self, terms: Mapping[str, str]) -> dict[str, str]:
    """Returns the verdict: empty if all agree, or the error of all."""
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
      " same arguments, run the same versions, and compile with the same"
      " options."
    )

  def _wait_for_verdict(self) -> dict[str, str]:
    first = self.members[0]
    # The first process may have come later, and it waits for `timeout_s`, too.
    deadline = time.monotonic() + self.timeout_s
    wait_s = _PATIENT_S
    while True:
      left_s = max(deadline - time.monotonic(), 0.001)
      try:
        verdict = self.client.blocking_key_value_get(
          f"{self.folder}/verdict", math.ceil(min(wait_s, left_s) * 1000)
        )
        return json.loads(verdict)
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
    """Returns the values of a folder by process."""
    found = self.client.key_value_dir_get(f"{self.folder}/{name}/")
    return {int(key.rpartition("/")[2]): json.loads(v) for key, v in found}


def _died(process: int) -> str:
  return f"process {process} died; restart the job."
