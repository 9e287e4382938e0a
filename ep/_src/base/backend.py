# SPDX-License-Identifier: Apache-2.0
"""The interface between the ops and the backends that run them.

A `Backend` says which meshes it can serve and connects the processes of one.
The `Connection` that it returns lowers the group's ops until it is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
import dataclasses
import functools
import json
import os
import pathlib
from typing import Any, NamedTuple, Protocol

import jax

from ep._src.base import meshes
from ep._src.base.compat import LoweringContext
from ep._src.base.config import GroupConfig, LayerConfig
from ep._src.base.meshes import Mesh

# The five ops that a connection lowers.
OPS = (
  "ep_prepare",
  "ep_dispatch",
  "ep_combine",
  "ep_dispatch_bwd",
  "ep_combine_bwd",
)


# `Connection.cached` keeps this many results, the most recently used ones.
_CACHED = 256


class CannotServe(ValueError):
  """A backend cannot serve these devices or processes; another may."""


class GroupMemory(NamedTuple):
  """The host memory of a group, in bytes.

  Attributes:
    reserved: address space.
    resident: pages of it that were ever touched.
  """

  reserved: int
  resident: int


@dataclasses.dataclass(frozen=True)
class OpParams:
  """The static parameters of every op.

  Attributes:
    connection: lowers the op.
    layer: the layer's configuration.
    num_tokens: T, tokens of this rank.
    tail: the rows that dispatch writes past the last slab: "zero",
      "unspecified" or, in checked mode, "nan".
    checked: whether the op was traced in checked mode.
    in_trace: whether the op was traced for a trace.
  """

  connection: Connection = dataclasses.field(repr=False)
  layer: LayerConfig
  num_tokens: int
  tail: str
  checked: bool
  in_trace: bool

  @property
  def drop(self) -> bool:
    """Whether `ep_prepare` drops rows past the capacity, or fails."""
    return self.layer.overflow != "error"

  @property
  def capacity(self) -> int:
    """C: receive rows of a rank."""
    return self.layer.capacity_for(self.num_tokens)


class Connection:
  """Connects the ranks of a group, and lowers the group's ops.

  `Backend.connect` makes a connection on each process of the mesh. The
  connection is open until `close`, or until `release`, which Python calls when
  it collects the user's `EpGroup`. The parameters of ops also refer to the
  connection.

  A forked child can neither use nor close the connections of its parent.

  Attributes:
    group: the group as it was connected.
    weighs: whether "ep_combine" multiplies rows by weights. Otherwise the op is
      lowered without weights, for rows that were multiplied before.
    has_trace: whether the connection can be traced.
  """

  weighs = True
  has_trace = False

  def __init__(self, group: GroupConfig):
    self.group = group
    self._process = os.getpid()
    self._is_open = True
    self._is_traced = False
    self._cached = functools.lru_cache(_CACHED)(lambda make, *args: make(*args))
    _open[group.name] = self

  @property
  def is_open(self) -> bool:
    """Whether this process can use the connection."""
    return self._is_open and not self._is_forked

  @property
  def closes_at_exit(self) -> bool:
    """Whether the connection closes when Python exits.

    True if a peer may wait for this process, or a trace is on.
    """
    return self._is_traced and not self._is_forked

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
    """Makes later ops fail. Idempotent; no effect in a forked child.

    Raises:
      ValueError, RuntimeError: a peer waits for an op that this process has not
        run. The connection is closed nevertheless.
    """
    if not self.is_open:
      return
    self._is_open = False
    self._cached.cache_clear()
    try:
      self._close()
    finally:
      _open.pop(self.group.name, None)

  def start_trace(self, path: str) -> None:
    """Traces its ops, for this process's part of a file; see `ep.trace`.

    `stop_trace` and `close` write the part.

    Raises:
      ValueError, OSError: it cannot be written.
      RuntimeError: a trace is on.
    """
    if self._is_traced:
      raise RuntimeError(
        f'ep.trace: the group "{self.group.name}" is traced already; end that'
        " trace first."
      )
    mesh = self.group.mesh
    assert meshes.has_devices(mesh)
    processes = meshes.processes(mesh)
    head = dict(
      process=processes.index(jax.process_index()),
      ep_size=self.group.ep_size,
      processes=[
        processes.index(d.process_index)
        for d in meshes.domains(mesh, self.group.axis_name).flat
      ],
    )
    part = pathlib.Path(f"{path}.part{head['process']}")
    part.write_text(json.dumps(head) + "\n")
    self._start_trace(str(part))
    self._is_traced = True

  def stop_trace(self) -> None:
    """Ends the trace, if it is on, and writes this process's file."""
    if self._is_open and self._is_traced:
      self._is_traced = False
      self._stop_trace()

  def _start_trace(self, part: str) -> None:
    """Traces to a file whose first line describes this process."""
    raise NotImplementedError

  def _stop_trace(self) -> None:
    raise NotImplementedError

  def finalize(self) -> None:
    """Calls `check`, then `close` in any case; raises what they raise."""
    if not self.is_open:
      return
    try:
      self.check()
    finally:
      self.close()

  def release(self) -> None:
    """Closes the connection once no program uses it. No effect in a child."""
    if self.is_open:
      _open.pop(self.group.name, None)
      self._cached.cache_clear()
      self._release()

  def check(self) -> None:
    """Waits for the device, and raises a failure that no op has reported.

    Collective where the failure may end the group.

    Raises:
      ValueError, RuntimeError: the failure of an earlier op, once.
    """

  def memory(self) -> GroupMemory:
    """Returns the host memory that this process keeps between ops."""
    return GroupMemory(reserved=0, resident=0)

  def waited(self) -> float:
    """Returns for how many seconds a rank has waited; see `EpGroup.waited`."""
    return 0.0

  def check_places(self, op: str, mesh: jax.sharding.Mesh) -> None:
    """Raises `ValueError` if `op` cannot run on `mesh`.

    `mesh` has the axes of the group's mesh, but perhaps another order of
    devices.
    """

  def mem_bytes(self, params: OpParams) -> int:
    """Returns the bytes of `EpHandle.mem`.

    Raises:
      ValueError: the layer or the number of tokens exceeds a limit.
    """
    raise NotImplementedError

  def lower(
    self, op: str, ctx: LoweringContext, *operands: Any, params: OpParams
  ) -> Any:
    """Lowers one of `OPS` to values of the module in `ctx`.

    Operands and results have the shapes of one rank. "ep_combine" has a third
    operand, the weights, if the user passed them and the connection `weighs`.
    """
    raise NotImplementedError

  def _close(self) -> None:
    """Disconnects this process. Called at most once."""

  def _release(self) -> None:
    """Disconnects this process once no program uses the connection."""


class Join(Protocol):
  """Returns what `introduce` returned on each process of the same domain.

  Collective over the processes of the mesh; see group/agreement.py.
  """

  def __call__(
    self,
    group: GroupConfig,
    introduce: Callable[[], dict[str, Any]],
    domain: int = 0,
  ) -> dict[int, dict[str, Any]]: ...


class Backend:
  """A way to run the ops, without state."""

  def check_mesh(self, mesh: Mesh, axis_name: str) -> None:
    """Raises `CannotServe` if it cannot serve the mesh. Not collective."""

  def check_sizes(self, group: GroupConfig) -> None:
    """Raises `ValueError` if it needs a size that the group leaves open."""

  def probe(self) -> str:
    """Returns the native software that it would use in this process, or "".

    Raises:
      RuntimeError, ValueError, OSError: something that it needs is missing. The
        message says how to get it.
    """
    return ""

  def connect(self, group: GroupConfig, join: Join) -> Connection:
    """Connects the ranks of a group, which `check_mesh` has accepted.

    Collective over the processes of the mesh. The caller closes the result,
    whose `group` may have resolved defaults that `group` leaves open. The
    backend calls `join` once: it checks that all processes agree on the group,
    and exchanges their introductions.

    Raises:
      CannotServe: on every process, if it cannot serve the processes.
      ValueError: the processes disagree, or the group's name is taken.
      RuntimeError: the processes cannot be connected.
    """
    raise NotImplementedError


# The open connections of this process that are not released, by group name.
_open: dict[str, Connection] = {}


def is_open(name: str) -> bool:
  """Returns whether this process has an open group of this name."""
  return name in _open


def open_connections() -> list[Connection]:
  """Returns the connections that are neither closed nor released."""
  return list(_open.values())
