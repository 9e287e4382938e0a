"""From a mesh to connected EP domains.

Every process cuts the mesh into domains the same way, so what they must
exchange is little: proof that they agree on the configuration and share a
host, and a secret by which their native halves know each other.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import secrets
from typing import TYPE_CHECKING

import jax
import numpy as np

from ep._src import compat, ffi

if TYPE_CHECKING:
  from ep._src.group import EpGroup

# Bootstraps so far, by the processes that took part: equal on all of them.
_serials = collections.defaultdict(itertools.count)


def domains(mesh: jax.sharding.Mesh, axis_name: str) -> np.ndarray:
  """The devices of the mesh as [num_domains, P], both in mesh order."""
  axis = mesh.axis_names.index(axis_name)
  return np.moveaxis(mesh.devices, axis, -1).reshape(-1, mesh.shape[axis_name])


def _processes(mesh: jax.sharding.Mesh) -> list[int]:
  return sorted({d.process_index for d in mesh.devices.flat})


def group_name(mesh: jax.sharding.Mesh, name: str | None) -> str:
  """The name of the group that is about to be built, equal on all processes."""
  if name is not None:
    return name
  processes = tuple(_processes(mesh))
  serial = next(_serials[processes])
  if len(processes) == jax.process_count():
    return f"ep{serial}"
  return f"ep{serial}@" + ",".join(map(str, processes))


def connect(group: EpGroup) -> None:
  """Agrees with the other processes and builds the native group."""
  processes = _processes(group.mesh)
  if jax.process_index() not in processes:
    raise ValueError(
      f"ep_bootstrap: process {jax.process_index()} has no device in the mesh;"
      " call ep_bootstrap only on the processes of the mesh."
    )
  if ffi.is_live(group.name):
    raise ValueError(
      f'ep_bootstrap: the name "{group.name}" belongs to a live group; finalize'
      " that one first, or choose another name."
    )
  answers = _exchange(group, processes)
  secret = hashlib.sha256("".join(a["secret"] for a in answers).encode())
  ffi.create_host_group(
    name=group.name,
    secret=secret.hexdigest(),
    num_experts=group.num_experts,
    ep_size=group.ep_size,
    ranks=[
      (processes.index(d.process_index), d.id)
      for d in domains(group.mesh, group.axis_name).flat
    ],
    process=processes.index(jax.process_index()),
    num_processes=len(processes),
    timeout_s=group.timeout_s,
  )


def _exchange(group: EpGroup, processes: list[int]) -> list[dict]:
  """What every process says of itself, checked to agree."""
  me = jax.process_index()
  config = {
    f.name: str(getattr(group, f.name))
    for f in dataclasses.fields(group)
    if f.compare and not f.name.startswith("_")
  }
  mine = dict(config=config, host=_host(), secret=secrets.token_hex(16))
  if len(processes) == 1:
    return [mine]
  client = compat.distributed_client()
  if client is None:
    raise RuntimeError(
      "ep_bootstrap: the mesh spans several processes, but jax.distributed is"
      " not initialized; call jax.distributed.initialize() first."
    )
  # A name may be used again after ep_finalize, a key may not.
  use = next(_serials[group.name, *processes])
  key = f"ep/{group.name}/{use}"
  client.key_value_set(f"{key}/{me}", json.dumps(mine))
  answers = []
  for p in processes:
    try:
      answer = client.blocking_key_value_get(
        f"{key}/{p}", int(group.timeout_s * 1000)
      )
    except jax.errors.JaxRuntimeError as e:
      raise RuntimeError(
        f"ep_bootstrap: process {p} did not come within timeout_s ="
        f" {group.timeout_s} s; every process of the mesh must call"
        " ep_bootstrap, with the same arguments and in the same order."
      ) from e
    answers.append(json.loads(answer))
    _check_agreement(p, answers[-1], mine)
  return answers


def _check_agreement(process: int, theirs: dict, mine: dict) -> None:
  me = jax.process_index()
  for field, value in mine["config"].items():
    other = theirs["config"].get(field)
    if other != value:
      raise ValueError(
        f"ep_bootstrap: {field} = {value} on process {me}, but {other} on"
        f" process {process}; all processes must pass the same arguments."
      )
  if theirs["host"] != mine["host"]:
    raise ValueError(
      f"ep_bootstrap: processes {me} and {process} run on different hosts or"
      ' as different users, but backend="host" shares memory; run all'
      " processes of a mesh on one host, as one user."
    )


def _host() -> str:
  """Identifies this boot of this machine, and the user."""
  boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
  return f"{boot}/{os.geteuid()}"
