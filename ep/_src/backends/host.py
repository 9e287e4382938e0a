# SPDX-License-Identifier: Apache-2.0
"""The backend "host": CPU devices of one host, over shared memory."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

import jax

from ep._src.base import meshes
from ep._src.base.backend import Backend, CannotServe, Join
from ep._src.base.group import Connection, EpGroup
from ep._src.base.meshes import Mesh
from ep._src.native import ffi, processes, sockets
from ep._src.native.connection import mesh_of_devices, NativeConnection


class HostBackend(Backend):
  """A backend for CPU devices of processes that share memory."""

  def check_mesh(self, mesh: Mesh, axis_name: str) -> None:
    platform = meshes.platform(mesh_of_devices("host", mesh))
    if platform != "cpu":
      raise CannotServe(
        f'ep_bootstrap: backend = "host" needs a mesh of CPU devices, not of'
        f" {platform!r} devices; build the mesh from jax.devices('cpu')."
      )

  def probe(self) -> str:
    jax.local_devices(backend="cpu")
    return ffi.path_and_interface("host")

  def connect(self, group: EpGroup, join: Join) -> Connection:
    mesh = mesh_of_devices("host", group.mesh)
    listener: sockets.Listener
    with contextlib.ExitStack() as stack:
      # `join` calls `introduce`, and fails on all processes if it raises.
      def introduce() -> dict[str, Any]:
        ffi.library("host")
        nonlocal listener
        listener = stack.enter_context(sockets.Listener())
        return dict(
          host=[
            processes.boot_id(),
            processes.namespace("net"),  # the scope of abstract addresses
            processes.namespace("user"),
            os.geteuid(),
          ],
          address=listener.address,
          pid=os.getpid(),
          namespace=processes.namespace(),
        )

      answers = join(group, introduce)
      me = jax.process_index()
      _check_one_host(answers, me)
      members = list(answers)
      mine = members.index(me)
      pids = [  # 0 in another pid namespace
        answer["pid"] if answer["namespace"] == processes.namespace() else 0
        for answer in answers.values()
      ]
      peers: dict[int, socket.socket] = {}

      def connect() -> dict[str, Any]:
        for i, process in enumerate(members[:mine]):
          peer = sockets.connect(
            answers[process]["address"],
            pids[i],
            mine,
            name=f"process {process}",
            timeout_s=group.timeout_s,
          )
          peers[i] = stack.enter_context(peer)
        return {}

      join(group, connect)
      later = range(mine + 1, len(members))
      peers |= listener.accept({i: pids[i] for i in later})
      ffi.create_host_group(
        group,
        ranks=[
          (members.index(d.process_index), d.id)
          for d in meshes.domains(mesh, group.axis_name).flat
        ],
        process=mine,
        processes=[
          (process, pids[i], peers[i].detach() if i in peers else -1)
          for i, process in enumerate(members)
        ],
      )
    return NativeConnection(group)


def _check_one_host(answers: dict[int, dict[str, Any]], me: int) -> None:
  """Raises unless all processes share memory with this one."""
  for process, answer in answers.items():
    if answer["host"] != answers[me]["host"]:
      raise CannotServe(
        f"ep_bootstrap: processes {me} and {process} run on different"
        " hosts, in different containers or as different users, but"
        ' backend="host" shares memory; run all processes of a mesh on one'
        ' host, as one user, or use backend="xla".'
      )
