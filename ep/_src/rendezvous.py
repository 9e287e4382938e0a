# SPDX-License-Identifier: Apache-2.0
"""From a mesh to EP domains, and what their processes must know of each other.

Every process cuts the mesh into domains the same way, so what they exchange is
little: proof that they agree on the configuration, and what a backend's native
halves need to find each other.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
import dataclasses
import itertools
import json
import math
import time
from typing import Any, TYPE_CHECKING
import weakref

import jax
import numpy as np

from ep._src import compat, presence
from ep._src.versions import compiler_settings, versions

if TYPE_CHECKING:
  from ep._src.group import EpGroup


class CannotServe(ValueError):
  """A backend cannot serve these devices or processes; another may."""


Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh

# Of this process's groups, from the end of ep_bootstrap to ep_finalize: what
# ends them, by name.
live = weakref.WeakValueDictionary()

# Bootstraps and exchanges so far, by the processes that took part: equal on all
# of them.
_serials = collections.defaultdict(itertools.count)

# Where this process told what it said last, by the processes that took part.
_last_keys: dict[tuple[int, ...], str] = {}

_LOOK_AFTER_S = 0.5  # how often those who are still to come are looked after


def domains(mesh: jax.sharding.Mesh, axis_name: str) -> np.ndarray:
  """The devices of the mesh as [num_domains, P], both in mesh order."""
  axis = mesh.axis_names.index(axis_name)
  return np.moveaxis(mesh.devices, axis, -1).reshape(-1, mesh.shape[axis_name])


def has_devices(mesh: Mesh) -> bool:
  """Whether the mesh is more than shapes."""
  return not isinstance(mesh, jax.sharding.AbstractMesh)


def processes(mesh: Mesh) -> list[int]:
  """The processes that have devices in the mesh, in ascending order.

  A mesh without devices is this process's own.
  """
  if not has_devices(mesh):
    return [jax.process_index()]
  return sorted({d.process_index for d in mesh.devices.flat})


def group_name(mesh: Mesh, name: str | None) -> str:
  """The name of the group that is about to be built, equal on all processes."""
  if name is not None:
    return name
  members = tuple(processes(mesh))
  serial = next(_serials[members])
  if len(members) == jax.process_count():
    return f"ep{serial}"
  return f"ep{serial}@" + ",".join(map(str, members))


def exchange(
  group: EpGroup, introduce: Callable[[], dict[str, Any]]
) -> dict[int, dict[str, Any]]:
  """What `introduce` returned on each process of the mesh.

  Raises, on all of them, if one does, if they disagree on the group or on the
  versions of what they run, if its name is taken, or if one has died.
  """
  me = jax.process_index()
  members = processes(group.mesh)
  if me not in members:
    raise ValueError(
      f"ep_bootstrap: process {me} has no device in the mesh; call ep_bootstrap"
      " only on the processes of the mesh."
    )
  client = compat.distributed_client()
  if client is None and len(members) > 1:
    raise RuntimeError(
      "ep_bootstrap: the mesh spans several processes, but jax.distributed is"
      " not initialized; call jax.distributed.initialize() first."
    )
  presence.announce()
  try:
    if group.name in live:
      raise ValueError(
        f'ep_bootstrap: the name "{group.name}" belongs to a live group;'
        " finalize that one first, or choose another name."
      )
    says = introduce()
    if len(members) == 1:
      return {me: says}
    config = _config(group) | versions(group.backend) | compiler_settings()
    mine = dict(config=config, says=says)
  except Exception as e:
    if len(members) > 1:
      _tell(client, members, dict(error=str(e)))
    raise
  key = _tell(client, members, mine)
  answers = {p: _hear(client, group, key, p, mine["config"]) for p in members}
  _forget_last(client, members, key)
  return {p: answer["says"] for p, answer in answers.items()}


def _config(group: EpGroup) -> dict[str, str]:
  config = {
    f.name: str(getattr(group, f.name))
    for f in dataclasses.fields(group)
    if f.compare and not f.name.startswith("_")
  }
  if has_devices(group.mesh):
    ids = [device.id for device in group.mesh.devices.flat]
    config["mesh"] += f" of the devices {ids}"
  return config


def _tell(client, members: list[int], what: dict[str, Any]) -> str:
  """Publishes what this process says, and returns where all of them do."""
  serial = next(_serials["exchanges", *members])
  key = f"ep/exchange/{','.join(map(str, members))}/{serial}"
  client.key_value_set(f"{key}/{jax.process_index()}", json.dumps(what))
  return key


def _forget_last(client, members: list[int], key: str) -> None:
  """Deletes what this process said in its last exchange with these.

  Who has said something in this one has heard all of that one.
  """
  if last := _last_keys.get((*members,)):
    client.key_value_delete(f"{last}/{jax.process_index()}")
  _last_keys[*members,] = key


def _hear(
  client, group: EpGroup, key: str, process: int, config: dict[str, str]
) -> dict[str, Any]:
  """What `process` says, which must agree with this one on `config`."""
  answer = None
  deadline = time.monotonic() + group.timeout_s
  while answer is None:
    wait_s = min(_LOOK_AFTER_S, max(deadline - time.monotonic(), 0.001))
    try:
      answer = client.blocking_key_value_get(
        f"{key}/{process}", math.ceil(wait_s * 1000)
      )
    except jax.errors.JaxRuntimeError as e:
      if presence.died(process):
        raise RuntimeError(
          f"ep_bootstrap: process {process} died; restart the job."
        ) from e
      if time.monotonic() >= deadline:
        raise RuntimeError(
          f"ep_bootstrap: process {process} did not come within timeout_s ="
          f" {group.timeout_s} s; every process of the mesh must call"
          " ep_bootstrap, with the same arguments and in the same order."
        ) from e
  theirs = json.loads(answer)
  if "error" in theirs:
    raise RuntimeError(
      f"ep_bootstrap: process {process} failed: {theirs['error']}"
    )
  for field, value in config.items():
    other = theirs["config"].get(field)
    if other != value:
      raise ValueError(
        f"ep_bootstrap: {field} = {value} on process {jax.process_index()},"
        f" but {other} on process {process}; all processes must pass the same"
        " arguments, run the same versions, and compile with the same options."
      )
  return theirs
