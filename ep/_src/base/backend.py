# SPDX-License-Identifier: Apache-2.0
"""The interface between the ops and the backends that run them.

A `Backend` checks whether it can serve a mesh, and connects the processes of
the mesh. The resulting `Connection` lowers the group's ops until `close`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ep._src.base.group import Connection, EpGroup
from ep._src.base.meshes import Mesh

OPS = (
  "ep_prepare",
  "ep_dispatch",
  "ep_combine",
  "ep_dispatch_bwd",
  "ep_combine_bwd",
)


class CannotServe(ValueError):
  """The error if a backend cannot serve a mesh, but another backend might."""


# The type of `join` of group/rendezvous.py.
Join = Callable[..., dict[int, dict[str, Any]]]


class Backend:
  """The base class of backends, which have no state."""

  def check_mesh(self, mesh: Mesh, axis_name: str) -> None:
    """Raises `CannotServe` for an unsupported mesh. Not collective."""

  def check_sizes(self, group: EpGroup) -> None:
    """Raises `ValueError` if the group lacks a size that the backend needs."""

  def probe(self) -> str:
    """Returns a line about the backend's native software, or "" for none.

    Raises:
      RuntimeError, ValueError, OSError: needed software is missing. The message
        says how to get it.
    """
    return ""

  def connect(self, group: EpGroup, join: Join) -> Connection:
    """Connects the ranks of a group whose mesh `check_mesh` has accepted.

    Collective over the processes of the mesh. The caller closes the connection,
    whose `group` may resolve more defaults. The backend calls `join`, which
    checks that all processes agree on the group, and exchanges their
    introductions. A second call tells whether a later step has failed on one.

    Raises:
      CannotServe: on every process, if the backend cannot serve the processes.
      ValueError: the processes disagree, or the group's name is taken.
      RuntimeError: the processes cannot be connected.
    """
    raise NotImplementedError
