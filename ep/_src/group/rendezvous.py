# SPDX-License-Identifier: Apache-2.0
"""Lets the processes of a mesh agree on a group before they connect.

The processes meet in JAX's key-value store. They exchange the values that must
be equal on all of them, and the introductions with which native groups find
each other. Each process computes the EP domains from the mesh (meshes.py). A
meeting uses a folder of the store, which the first process deletes at the next
meeting:

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

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import pathlib
import time
from typing import Any

import jax
import jaxlib.version

from ep._src.base import compat, meshes
from ep._src.base.group import check_free, EpGroup
from ep._src.group import liveness
from ep._src.native import ffi

# The first process polls for digests at intervals from _SOON_S to _LOOK_AFTER_S
# seconds, and for dead processes every _LOOK_AFTER_S seconds.
_SOON_S, _LOOK_AFTER_S = 0.01, 0.5
# The other processes poll for the death of the first process at intervals from
# _PATIENT_S to _RARELY_S seconds.
_PATIENT_S, _RARELY_S = 2.0, 8.0

# Prefixes of the XLA flags that do not change the compiled program.
_HARMLESS_FLAGS = ("--xla_force_host_platform_device_count", "--xla_dump_")

# Counters of bootstraps and meetings. Each key identifies a set of processes,
# and all processes of the set have the same count.
_serials: collections.defaultdict[str, itertools.count[int]]
_serials = collections.defaultdict(itertools.count)

# Folders of past meetings in the key-value store, by the set of processes.
_folders: collections.defaultdict[str, list[str]]
_folders = collections.defaultdict(list)


def group_name(mesh: meshes.Mesh, name: str | None) -> str:
  """Returns `name`, or a new name if it is None; equal on all processes."""
  if name is not None:
    return name
  members = meshes.processes(mesh)
  who = _digest(members)
  suffix = "" if len(members) == jax.process_count() else f"@{who}"
  return f"ep{next(_serials[who])}{suffix}"


def join(
  group: EpGroup,
  introduce: Callable[[], dict[str, Any]],
  domain: int = 0,
  settings: Mapping[str, str] | None = None,
) -> dict[int, dict[str, Any]]:
  """Returns the results of `introduce` on all processes of the same domain.

  Collective over the processes of the mesh.

  Raises:
    ValueError, RuntimeError, or an error of `introduce`: on all processes, if
      `introduce` raises on one, if they disagree on the group, on versions or
      on `settings`, if the name is taken, or if a process has died or is late.
  """

  def propose() -> tuple[EpGroup, dict[str, Any]]:
    check_free(group.name)
    return group, introduce()

  return _meet("ep_bootstrap", group, propose, domain, settings or {})[1]


def agree(what: str, group: EpGroup, propose: Callable[[], EpGroup]) -> EpGroup:
  """Returns `propose()`, after all processes of `group` agreed on the result.

  Collective over the processes of `group`. Raises errors like `join`.
  """
  return _meet(what, group, lambda: (propose(), {}), domain=0, settings={})[0]


def _meet(
  what: str,
  group: EpGroup,
  propose: Callable[[], tuple[EpGroup, dict[str, Any]]],
  domain: int,
  settings: Mapping[str, str],
) -> tuple[EpGroup, dict[int, dict[str, Any]]]:
  """Returns the group that all processes propose, and `join`'s result.

  Collective over the processes of the mesh of `group`, with its `timeout_s`.
  """
  me = jax.process_index()
  members = meshes.processes(group.mesh)
  if me not in members:
    raise ValueError(
      f"{what}: process {me} has no device in the mesh; call {what} only on the"
      " processes of the mesh."
    )
  client = compat.distributed_client()
  if client is None and len(members) > 1:
    raise RuntimeError(
      f"{what}: the mesh spans several processes, but jax.distributed is"
      " not initialized; call jax.distributed.initialize() first."
    )
  liveness.announce()
  if len(members) == 1:
    proposal, introduction = propose()
    return proposal, {me: introduction}
  who = _digest(members)
  folder = f"ep/join/{who}/{next(_serials[f'joins of {who}'])}"
  meeting = Meeting(what, client, folder, members, me, group.timeout_s)
  try:
    proposal, introduction = propose()
    terms = proposal.texts() | versions(group.backend) | _compiler_settings()
    terms.update(settings)
    if meshes.has_devices(proposal.mesh):
      ids = [device.id for device in proposal.mesh.devices.flat]
      terms["mesh"] += f" of the devices {ids}"
  except Exception as e:
    meeting.fail(e)
    raise
  finally:
    _folders[who].append(folder)
  meeting.publish(terms, introduction, domain)
  meeting.settle(terms)
  answers = meeting.introductions(domain) if introduction else {}
  meeting.delete(_folders[who][:-1])
  del _folders[who][:-1]
  return proposal, answers


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

  def publish(
    self,
    terms: Mapping[str, str],
    introduction: Mapping[str, Any],
    domain: int,
  ) -> None:
    self._set(f"terms/{self.me}", terms)
    if introduction:
      self._set(f"introduction/{domain}/{self.me}", introduction)
    self._set(f"digest/{self.me}", dict(terms=_digest([*terms.items()])))

  def settle(self, terms: Mapping[str, str]) -> None:
    """Waits until all processes have published terms.

    Raises:
      ValueError: on all processes, if their terms differ.
      RuntimeError: on all processes, if one failed, died or did not arrive.
    """
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
    mine = _digest([*terms.items()])
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
        return dict(json.loads(text))
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


def _digest(value: object) -> str:
  """Returns a hash of a value, as 16 hexadecimal digits."""
  return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


@functools.cache
def versions(backend: str) -> dict[str, str]:
  """Returns the versions of the software of a backend, by name.

  The versions of ep's files are digests.
  """
  package = sorted(pathlib.Path(__file__).parents[2].rglob("*.py"))
  found = {
    "the version of jax": jax.__version__,
    "the version of jaxlib": jaxlib.version.__version__,
    "the digest of the ep package": _file_digest(package),
  }
  if backend in ffi.PLATFORMS:
    library = ffi.find_library(backend)
    found[f"the digest of {library.name}"] = _file_digest([library])
  return found


def _compiler_settings() -> dict[str, str]:
  """Returns the options with which XLA compiles all programs, by name.

  XLA may copy an op (if a jitted function is called twice) and chooses the
  order of the copies. The native engine matches ranks' copies by this order.
  """
  flags = compat.xla_flags()
  names = [n for n in sorted(flags) if not n.startswith(_HARMLESS_FLAGS)]
  text = " ".join(flags[name] for name in names) or "(none)"
  return {"XLA_FLAGS": text, **compat.compiler_options()}


def _file_digest(files: Iterable[pathlib.Path]) -> str:
  digest = hashlib.sha256()
  for file in files:
    digest.update(file.read_bytes())
  return digest.hexdigest()[:16]
