# SPDX-License-Identifier: Apache-2.0
"""backend="host": CPU devices of one host, over shared memory."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import socket
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
release = functools.partial(ffi.release_group, "host")
close_released = functools.partial(ffi.close_released, "host")
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
  with contextlib.ExitStack() as stack:

    def introduce():  # what fails here is told to the others
      ffi.library("host")
      nonlocal listener
      listener = stack.enter_context(_listen())
      return dict(host=_host(), address=listener.getsockname()[1:].decode())

    listener = None
    answers = rendezvous.exchange(group, introduce)
    me = jax.process_index()
    for process, answer in answers.items():
      if answer["host"] != answers[me]["host"]:
        raise rendezvous.CannotServe(
          f"ep_bootstrap: processes {me} and {process} run on different hosts"
          ' or as different users, but backend="host" shares memory; run all'
          " processes of a mesh on one host, as one user."
        )
    members = list(answers)
    ffi.create_host_group(
      name=group.name,
      config=group.config,
      listener=listener.fileno(),
      num_experts=group.num_experts,
      ep_size=group.ep_size,
      ranks=[
        (members.index(d.process_index), d.id)
        for d in rendezvous.domains(group.mesh, group.axis_name).flat
      ],
      process=members.index(me),
      processes=[
        (answer["address"], process, presence.pid(process))
        for process, answer in answers.items()
      ],
      timeout_s=group.timeout_s,
    )


def _listen() -> socket.socket:
  """Listens at an abstract address with a random name; see handshake.h."""
  try:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    while True:
      try:
        listener.bind(f"\0ep_ffi-{secrets.token_hex(16)}")
        break
      except OSError as e:
        if e.errno != errno.EADDRINUSE:
          raise
    listener.listen(socket.SOMAXCONN)
    return listener
  except OSError as e:
    raise RuntimeError(
      f"ep_bootstrap: cannot listen for other processes: {e.strerror}; if there"
      " are too many open files, raise the limit (ulimit -n)."
    ) from e


def _host() -> str:
  """Identifies this boot of this machine, and the user."""
  return f"{presence.boot_id()}/{os.geteuid()}"
