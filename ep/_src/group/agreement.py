# SPDX-License-Identifier: Apache-2.0
"""Lets the processes of a mesh agree on a group before they connect.

Each process computes the EP domains from the mesh by itself (meshes.py), so
processes exchange little, through JAX's key-value store: the configuration, in
which they must agree, and what native groups need to find each other.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
import itertools
import json
import math
import time
from typing import Any

import jax

from ep._src.base import backend, compat, meshes
from ep._src.base.config import GroupConfig
from ep._src.group import liveness
from ep._src.group.versions import compiler_settings, versions

# For each set of processes these count the bootstraps, or the joins, so far.
# The numbers are equal on all processes of the set.
_serials: collections.defaultdict[tuple[str | int, ...], itertools.count[int]]
_serials = collections.defaultdict(itertools.count)

# These are the keys of the last join, by the processes that took part.
_last_keys: dict[tuple[int, ...], str] = {}

_LOOK_AFTER_S = 0.5  # between two looks at whether a missing process has died


def group_name(mesh: meshes.Mesh, name: str | None) -> str:
  """Returns the name of the next group, equal on all processes.

  It is `name` unless that is None.
  """
  if name is not None:
    return name
  members = tuple(meshes.processes(mesh))
  serial = next(_serials[members])
  if len(members) == jax.process_count():
    return f"ep{serial}"
  return f"ep{serial}@" + ",".join(map(str, members))


def join(
  group: GroupConfig, introduce: Callable[[], dict[str, Any]]
) -> dict[int, dict[str, Any]]:
  """Returns what `introduce` returned on each process of the mesh.

  Collective over those processes.

  Raises:
    ValueError, RuntimeError, or what `introduce` raises: on all processes, if
      it raises on one, if they disagree on the group or on the versions of what
      they run, if the name is taken, or if a process has died or is late.
  """

  def propose():
    if backend.is_open(group.name):
      raise ValueError(
        f'ep_bootstrap: the name "{group.name}" belongs to a live group;'
        " finalize that one first, or choose another name."
      )
    return group, introduce()

  return _meet("ep_bootstrap", group, propose)[1]


def agree(
  what: str, group: GroupConfig, propose: Callable[[], GroupConfig]
) -> GroupConfig:
  """Returns what `propose` returned, the same on all processes of `group`.

  Collective over those processes, and changes nothing on any.

  Raises:
    ValueError, RuntimeError, or what `propose` raises: on all processes, like
      `join`, with a message that begins with `what`.
  """
  return _meet(what, group, lambda: (propose(), {}))[0]


def _meet(
  what: str,
  group: GroupConfig,
  propose: Callable[[], tuple[GroupConfig, dict[str, Any]]],
) -> tuple[GroupConfig, dict[int, dict[str, Any]]]:
  """Returns the group that all processes propose, and their introductions.

  The processes of the mesh of `group` take part, and wait up to its
  `timeout_s`.
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
  try:
    proposal, introduction = propose()
    if len(members) == 1:
      return proposal, {me: introduction}
    terms = _terms(proposal) | versions(group.backend) | compiler_settings()
    mine = dict(terms=terms, introduction=introduction)
  except Exception as e:
    if len(members) > 1:
      _publish(client, members, dict(error=str(e)))
    raise
  key = _publish(client, members, mine)
  answers = {p: _receive(what, client, group, key, p, terms) for p in members}
  _delete_last(client, members, key)
  return proposal, {p: a["introduction"] for p, a in answers.items()}


def _terms(group: GroupConfig) -> dict[str, str]:
  """Returns the group's values, in which all processes must agree."""
  terms = group.texts()
  if meshes.has_devices(group.mesh):
    ids = [device.id for device in group.mesh.devices.flat]
    terms["mesh"] += f" of the devices {ids}"
  return terms


def _publish(client, members: list[int], message: dict[str, Any]) -> str:
  """Publishes this process's message, and returns the key of all of them."""
  serial = next(_serials["joins", *members])
  key = f"ep/join/{','.join(map(str, members))}/{serial}"
  client.key_value_set(f"{key}/{jax.process_index()}", json.dumps(message))
  return key


def _delete_last(client, members: list[int], key: str) -> None:
  """Deletes what this process published when these members last joined.

  All have read it: a member publishes for this join after it has read all of
  the last one, and this process has just read what all have published.
  """
  if last := _last_keys.get((*members,)):
    client.key_value_delete(f"{last}/{jax.process_index()}")
  _last_keys[*members,] = key


def _receive(
  what: str,
  client,
  group: GroupConfig,
  key: str,
  process: int,
  terms: dict[str, str],
) -> dict[str, Any]:
  """Returns the message of `process`, which must agree on `terms`."""
  answer = None
  deadline = time.monotonic() + group.timeout_s
  while answer is None:
    wait_s = min(_LOOK_AFTER_S, max(deadline - time.monotonic(), 0.001))
    try:
      answer = client.blocking_key_value_get(
        f"{key}/{process}", math.ceil(wait_s * 1000)
      )
    except jax.errors.JaxRuntimeError as e:
      if liveness.died(process):
        raise RuntimeError(
          f"{what}: process {process} died; restart the job."
        ) from e
      if time.monotonic() >= deadline:
        raise RuntimeError(
          f"{what}: process {process} did not come within timeout_s ="
          f" {group.timeout_s} s; every process of the mesh must call"
          f" {what}, with the same arguments and in the same order."
        ) from e
  theirs = json.loads(answer)
  if "error" in theirs:
    raise RuntimeError(f"{what}: process {process} failed: {theirs['error']}")
  for field, value in terms.items():
    other = theirs["terms"].get(field)
    if other != value:
      raise ValueError(
        f"{what}: {field} = {value} on process {jax.process_index()},"
        f" but {other} on process {process}; all processes must pass the same"
        " arguments, run the same versions, and compile with the same options."
      )
  return theirs
