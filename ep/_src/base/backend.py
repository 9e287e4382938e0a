# SPDX-License-Identifier: Apache-2.0
"""The interface between the ops and the backends that run them.

A `Backend` checks whether it can serve a mesh, and connects the processes of
the mesh. The resulting `Connection` lowers the group's ops until `close`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
import dataclasses
import functools
import os
import threading
from typing import Any, Protocol

import jax

from ep._src.base import arguments
from ep._src.base.compat import LoweringContext
from ep._src.base.config import GroupConfig, LayerConfig
from ep._src.base.meshes import Mesh

OPS = (
  "ep_prepare",
  "ep_dispatch",
  "ep_combine",
  "ep_dispatch_bwd",
  "ep_combine_bwd",
)


# The size of the LRU cache of `Connection.cached`.
_CACHED = 256


class CannotServe(ValueError):
  """The error if a backend cannot serve a mesh, but another backend might."""


@dataclasses.dataclass(frozen=True)
class OpParams:
  """The static parameters of every op.

  Attributes:
    connection: the connection that lowers the op.
    layer: the layer's configuration.
    num_tokens: T, tokens of this rank.
    tail: the rows that dispatch writes past the last slab: "zero",
      "unspecified" or, in checked mode, "nan".
    checked: whether JAX traced the op in checked mode.
  """

  connection: Connection = dataclasses.field(repr=False)
  layer: LayerConfig
  num_tokens: int
  tail: str
  checked: bool

  @property
  def drop(self) -> bool:
    """Whether `ep_prepare` drops rows past the capacity instead of failing."""
    return self.layer.overflow != "error"

  @property
  def raises(self) -> bool:
    """Whether a program that can call Python raises its faults."""
    return self.checked or self.layer.group.errors == "raise"

  @property
  def capacity(self) -> int:
    """C: the number of receive rows of a rank."""
    return self.layer.capacity_for(self.num_tokens)


class Connection:
  """A process's connection to the ranks of a group; lowers the group's ops.

  `Backend.connect` makes a connection on each process of the mesh. The
  connection is open until `close`, or until `release`, which Python calls when
  it collects the user's `EpGroup`. JAX's caches may keep the connection longer,
  because it is a parameter of ops.

  A forked child can neither use nor close the connections of its parent.

  Attributes:
    group: the group's configuration, with the backend's defaults resolved.
    weighs: whether "ep_combine" multiplies rows by weights. If not, the caller
      multiplies the rows before, and the op has no weights.
    flags: whether `EpHandle.mem` ends with a fault; see errors.py.
  """

  weighs = True
  flags = False

  def __init__(self, group: GroupConfig):
    self.group = group
    self._process = os.getpid()
    self._is_open = True
    self._closing = threading.Lock()  # taken by the first thread that closes
    self._cached = functools.lru_cache(_CACHED)(lambda make, *args: make(*args))
    # Another thread may have made a group of this name after `check_free`.
    owner = _open.setdefault(group.name, self)
    _check_name(group.name, is_free=owner is self)

  @property
  def is_open(self) -> bool:
    """Whether this process can use the connection."""
    return self._is_open and not self._is_forked

  @property
  def closes_at_exit(self) -> bool:
    """Whether the connection closes at exit, since a peer may wait for it."""
    return False

  @property
  def _is_forked(self) -> bool:
    return self._process != os.getpid()

  def cached(self, make: Callable[..., Any], *args: Hashable) -> Any:
    """Returns `make(*args)`, and caches the result until `close`."""
    return self._cached(make, *args)

  def check_open(self, op: str) -> None:
    """Raises `RuntimeError` after `close`, and in a forked child."""
    if self._is_forked:
      raise RuntimeError(
        f'{op}: the group "{self.group.name}" belongs to the process with the'
        f" id {self._process}, of which this one is a forked child; use the"
        " group there, or start this process without a fork (the method"
        ' "spawn" of multiprocessing) and bootstrap a group in it.'
      )
    if not self._is_open:
      raise RuntimeError(
        f'{op}: the group "{self.group.name}" was finalized; bootstrap a new'
        " group, and finalize it after its last op."
      )

  def close(self) -> None:
    """Makes later ops fail. Idempotent. Does nothing in a forked child.

    Raises:
      ValueError, RuntimeError: a peer waits for an op that this process has not
        run. The connection is closed nevertheless.
    """
    if self._begins_closing():
      self._finish_closing()

  def _begins_closing(self) -> bool:
    """Returns True once: in the thread that must close the connection."""
    return not self._is_forked and self._closing.acquire(blocking=False)

  def _finish_closing(self) -> None:
    self._is_open = False
    self._cached.cache_clear()
    try:
      self._close()
    finally:
      _open.pop(self.group.name, None)

  def finalize(self) -> None:
    """Calls `raise_failures`, and then `close`, even if the former raises."""
    if self._begins_closing():
      try:
        self.raise_failures()
      finally:
        self._finish_closing()

  def release(self) -> None:
    """Closes the connection once no program uses it. Does nothing in a fork."""
    if self.is_open:
      _open.pop(self.group.name, None)
      self._cached.cache_clear()
      self._release()

  def raise_failures(self) -> None:
    """Waits for the device, and raises a failure that no op has raised yet.

    Collective with backends that may close the group here.

    Raises:
      ValueError, RuntimeError: the failure of an earlier op, once.
    """

  def saw(self, carrier: jax.Array) -> None:
    """Keeps an array with a fault for `raise_failures`, if it has a value."""

  def check_places(self, op: str, mesh: jax.sharding.Mesh) -> None:
    """Raises `ValueError` if `op` cannot run on `mesh`.

    `mesh` has the axes of the group's mesh, perhaps in another device order.
    """

  def mem_bytes(self, params: OpParams) -> int:
    """Returns the size of `EpHandle.mem`, in bytes.

    Raises:
      ValueError: the layer or the number of tokens exceeds a limit.
    """
    raise NotImplementedError

  def lower(
    self, op: str, ctx: LoweringContext, *operands: Any, params: OpParams
  ) -> Any:
    """Lowers `op`, one of `OPS`, in the module of `ctx`; returns the results.

    Operands and results have the shapes of one rank. "ep_combine" has a third
    operand, the weights, if the user passed them and the connection `weighs`.
    """
    raise NotImplementedError

  def _close(self) -> None:
    """Disconnects this process. Called at most once."""

  def _release(self) -> None:
    """Disconnects this process once no program uses the connection."""


class Join(Protocol):
  """A function that returns the results of `introduce` on a domain's processes.

  Collective over the processes of the mesh; see group/agreement.py.
  """

  def __call__(
    self,
    group: GroupConfig,
    introduce: Callable[[], dict[str, Any]],
    domain: int = 0,
    settings: Mapping[str, str] | None = None,
  ) -> dict[int, dict[str, Any]]: ...


class Backend:
  """The base class of backends, which have no state."""

  def check_mesh(self, mesh: Mesh, axis_name: str) -> None:
    """Raises `CannotServe` for an unsupported mesh. Not collective."""

  def check_sizes(self, group: GroupConfig) -> None:
    """Raises `ValueError` if the group lacks a size that the backend needs."""

  def probe(self) -> str:
    """Returns a line about the backend's native software, or "" for none.

    Raises:
      RuntimeError, ValueError, OSError: needed software is missing. The message
        says how to get it.
    """
    return ""

  def connect(self, group: GroupConfig, join: Join) -> Connection:
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


# This process's open and unreleased connections, by the name of the group.
_open: dict[str, Connection] = {}


def check_free(name: str) -> None:
  """Raises `ValueError` if a live group of this process has the name."""
  _check_name(name, is_free=name not in _open)


def _check_name(name: str, is_free: bool) -> None:
  arguments.check(
    is_free,
    "ep_bootstrap",
    f'the name "{name}" belongs to a live group; finalize that one first, or'
    " choose another name.",
  )


def open_connections() -> list[Connection]:
  return list(_open.values())
