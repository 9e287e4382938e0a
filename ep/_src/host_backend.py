"""backend="host": CPU devices of one host, over shared memory."""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
from typing import TYPE_CHECKING

import jax

from ep._src import ffi, native, presence, rendezvous

if TYPE_CHECKING:
  from ep._src.group import EpGroup

# See backends.py.
FUSES_WEIGHTS = True
ANY_PLACES = False
ONE_CAPACITY = False
close = functools.partial(ffi.close_group, "host")
check = functools.partial(ffi.check_group, "host")
memory = functools.partial(ffi.group_memory, "host")
mem_bytes = native.mem_bytes
lower = native.lower


def check_mesh(mesh: jax.sharding.Mesh, axis_name: str) -> None:
  del axis_name
  platform = mesh.devices.flat[0].platform
  if platform != "cpu":
    raise rendezvous.CannotServe(
      f'ep_bootstrap: backend = "host" needs a mesh of CPU devices, not of'
      f" {platform!r} devices; build the mesh from jax.devices('cpu')."
    )


def connect(group: EpGroup) -> None:
  def introduce():
    ffi.library("host")  # the others are told if it is not there
    return dict(host=_host(), secret=secrets.token_hex(16))

  answers = rendezvous.exchange(group, introduce)
  me = jax.process_index()
  for process, answer in answers.items():
    if answer["host"] != answers[me]["host"]:
      raise rendezvous.CannotServe(
        f"ep_bootstrap: processes {me} and {process} run on different hosts or"
        ' as different users, but backend="host" shares memory; run all'
        " processes of a mesh on one host, as one user."
      )
  secret = hashlib.sha256(
    "".join(a["secret"] for a in answers.values()).encode()
  )
  members = list(answers)
  ffi.create_host_group(
    name=group.name,
    config=group.config,
    secret=secret.hexdigest(),
    num_experts=group.num_experts,
    ep_size=group.ep_size,
    ranks=[
      (members.index(d.process_index), d.id)
      for d in rendezvous.domains(group.mesh, group.axis_name).flat
    ],
    process=members.index(me),
    process_ids=members,
    pids=[presence.pid(process) for process in members],
    timeout_s=group.timeout_s,
  )


def _host() -> str:
  """Identifies this boot of this machine, and the user."""
  return f"{presence.boot_id()}/{os.geteuid()}"
