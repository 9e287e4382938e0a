# SPDX-License-Identifier: Apache-2.0
"""Lets the processes of a mesh agree on a group before they connect.

Through JAX's key-value store, processes exchange the configuration, which must
be equal, and the introductions with which native groups find each other. Each
process computes the EP domains from the mesh (meshes.py).
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
import functools
import hashlib
import itertools
import pathlib
from typing import Any

import jax
import jaxlib.version

from ep._src.base import compat, meshes
from ep._src.base.group import check_free, EpGroup
from ep._src.group import liveness
from ep._src.group.meeting import digest, Meeting
from ep._src.native import ffi

# Prefixes of the XLA flags that do not change the compiled program.
_HARMLESS_FLAGS = ("--xla_force_host_platform_device_count", "--xla_dump_")

# Counters of bootstraps and meetings. Each key identifies a
# set of processes, and all processes of the set have the same count.
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
  return f"ep{next(_serials[digest(members)])}{_ending(members)}"


def _ending(members: Sequence[int]) -> str:
  """Returns a name suffix that identifies `members`; "" for all processes."""
  if len(members) == jax.process_count():
    return ""
  return f"@{digest(members)}"


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

  Collective over the processes of `group`.

  Raises:
    ValueError, RuntimeError, or an error of `propose`: on all processes, like
      `join`, with a message that begins with `what`.
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
  who = digest(members)
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
  answers = meeting.hold(terms, introduction, domain)
  meeting.delete(_folders[who][:-1])
  del _folders[who][:-1]
  return proposal, answers


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
  return {"XLA_FLAGS": _xla_flags(), **compat.compiler_options()}


def _xla_flags() -> str:
  flags = compat.xla_flags()
  names = [n for n in sorted(flags) if not n.startswith(_HARMLESS_FLAGS)]
  return " ".join(flags[name] for name in names) or "(none)"


def _file_digest(files: Iterable[pathlib.Path]) -> str:
  digest = hashlib.sha256()
  for file in files:
    digest.update(file.read_bytes())
  return digest.hexdigest()[:16]
