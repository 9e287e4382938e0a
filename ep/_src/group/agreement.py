# SPDX-License-Identifier: Apache-2.0
"""Lets the processes of a mesh agree on a group before they connect.

Each process computes the EP domains from the mesh by itself (meshes.py), so
processes exchange little, through JAX's key-value store: the configuration, in
which they must agree, and what native groups need to find each other.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
import itertools
from typing import Any
import urllib.parse

import jax

from ep._src.base import backend, compat, meshes
from ep._src.base.config import GroupConfig
from ep._src.group import liveness
from ep._src.group.meeting import digest, Meeting
from ep._src.group.versions import compiler_settings, versions

# For each set of processes these count the bootstraps, the meetings, or the
# files of one name so far. The numbers are equal on all processes of the set.
_serials: collections.defaultdict[str, itertools.count[int]]
_serials = collections.defaultdict(itertools.count)

# The folders of meetings that are over, by the set of processes.
_folders: collections.defaultdict[str, list[str]]
_folders = collections.defaultdict(list)


def group_name(mesh: meshes.Mesh, name: str | None) -> str:
  """Returns the name of the next group, equal on all processes.

  It is `name` unless that is None.
  """
  if name is not None:
    return name
  members = meshes.processes(mesh)
  return f"ep{next(_serials[digest(members)])}{_ending(members)}"


def file_name(group: GroupConfig) -> str:
  """Returns the name, without an ending, of a file about a new group.

  It is equal on all processes. No other group of the job gets it: neither a
  later one with the same name, as `ep_resize` makes it, nor one of other
  processes.
  """
  ending = _ending(meshes.processes(group.mesh))
  name = group.name.removesuffix(ending) + ending
  earlier = next(_serials[f"files of {name}"])
  file = urllib.parse.quote(name, safe="")  # has no "@"
  return f"{file}@{1 + earlier}" if earlier else file


def _ending(members: Sequence[int]) -> str:
  """Returns the end of names of groups that not all processes have."""
  if len(members) == jax.process_count():
    return ""
  return f"@{digest(members)}"


def join(
  group: GroupConfig, introduce: Callable[[], dict[str, Any]], domain: int = 0
) -> dict[int, dict[str, Any]]:
  """Returns what `introduce` returned on each process of the same domain.

  Collective over the processes of the mesh.

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

  return _meet("ep_bootstrap", group, propose, domain)[1]


def agree(
  what: str, group: GroupConfig, propose: Callable[[], GroupConfig]
) -> GroupConfig:
  """Returns what `propose` returned, the same on all processes of `group`.

  Collective over those processes, and changes nothing on any.

  Raises:
    ValueError, RuntimeError, or what `propose` raises: on all processes, like
      `join`, with a message that begins with `what`.
  """
  return _meet(what, group, lambda: (propose(), {}), domain=0)[0]


def _meet(
  what: str,
  group: GroupConfig,
  propose: Callable[[], tuple[GroupConfig, dict[str, Any]]],
  domain: int,
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
  if len(members) == 1:
    proposal, introduction = propose()
    return proposal, {me: introduction}
  who = digest(members)
  folder = f"ep/join/{who}/{next(_serials[f'joins of {who}'])}"
  meeting = Meeting(what, client, folder, members, me, group.timeout_s)
  try:
    proposal, introduction = propose()
    terms = _terms(proposal) | versions(group.backend) | compiler_settings()
  except Exception as e:
    meeting.fail(e)
    raise
  finally:
    _folders[who].append(folder)
  answers = meeting.hold(terms, introduction, domain)
  meeting.delete(_folders[who][:-1])
  del _folders[who][:-1]
  return proposal, answers


def _terms(group: GroupConfig) -> dict[str, str]:
  """Returns the group's values, in which all processes must agree."""
  terms = group.texts()
  if meshes.has_devices(group.mesh):
    ids = [device.id for device in group.mesh.devices.flat]
    terms["mesh"] += f" of the devices {ids}"
  return terms
