# SPDX-License-Identifier: Apache-2.0
"""The interface between the ops and the backends that run them.

A `Backend` says which meshes it can serve and connects the processes of one.
The `Connection` that it returns lowers the group's ops until it is closed.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable
import dataclasses
import functools
import json
import os
import pathlib
from typing import Any, NamedTuple, Protocol

import jax

from ep._src.base import compat, meshes
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


# A connection keeps this many programs, the ones that were used last.
_CACHED = 256


class CannotServe(ValueError):
  """A backend cannot serve these devices or processes; another may."""


class GroupMemory(NamedTuple):
  """Memory of the host, in bytes.

  Attributes:
    reserved: address space.
    resident: the part of it that was ever touched.
  """

  reserved: int
  resident: int


@dataclasses.dataclass(frozen=True)
class OpParams:
  """The static parameters of every op.

  Attributes:
    connection: lowers the op.
    layer: the layer's values.
    num_tokens: T, tokens of this rank.
    drop: whether `ep_prepare` drops the rows past the capacity; if not, it
      fails. The ops on a handle do not depend on it.
    tail: what dispatch writes past the last slab: "zero", "unspecified" or, in
      checked mode, "nan".
    checked: whether the op was traced in checked mode.
    in_trace: whether the op was traced for a trace.
  """

  connection: Connection = dataclasses.field(repr=False)
  layer: LayerConfig
  num_tokens: int
  drop: bool
  tail: str
  checked: bool
  in_trace: bool

  @property
  def capacity(self) -> int:
    """C: rows that a rank can receive."""
    return self.layer.capacity_for(self.num_tokens)


class Connection(abc.ABC):
  """Connects the ranks of a group, and lowers the group's ops.

  `Backend.connect` makes it on each process of the mesh. It is open from then
  on, until `close` or, if the user loses the group, `release`. The group of the
  user and the parameters of ops refer to it, and neither closes it by itself.

  A forked child inherits connections that are its parent's: it can neither use
  nor close them.

  Attributes:
    group: the group as it was connected.
    weighs: whether its "ep_combine" multiplies by weights. Otherwise the op is
      lowered without weights, for rows that were multiplied before.
    has_trace: whether it can be traced.
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
    """Whether it can be used: it is not closed, and not a forked child's."""
    return self._is_open and not self._is_forked

  @property
  def closes_at_exit(self) -> bool:
    """Whether it closes when Python exits.

    A peer may wait for it then, or its trace must be written.
    """
    return self._is_traced and not self._is_forked

  @property
  def _is_forked(self) -> bool:
    return self._process != os.getpid()

  def cached(self, make: Callable[..., Any], *args: Hashable) -> Any:
    """Returns `make(*args)`, and keeps the result until it is closed."""
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
    """Closes it: ops fail from now on. Idempotent; no effect in a forked child.

    Raises:
      ValueError, RuntimeError: a peer is left waiting for an op. It is closed
        all the same.
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
    """Ends the trace, if it is on, and writes the part."""
    if self._is_open and self._is_traced:
      self._is_traced = False
      self._stop_trace()

  def _start_trace(self, part: str) -> None:
    """Traces to a file that has a line about this process already."""
    raise NotImplementedError

  def _stop_trace(self) -> None:
    raise NotImplementedError

  def finalize(self) -> None:
    """Checks it, then closes it in any case. Idempotent, like `close`.

    Raises:
      ValueError, RuntimeError: as `check` and `close` do.
    """
    if not self.is_open:
      return
    try:
      self.check()
    finally:
      self.close()

  def release(self) -> None:
    """Closes it once no program uses it. No effect in a forked child."""
    if self.is_open:
      _open.pop(self.group.name, None)
      self._cached.cache_clear()
      self._release()

  @abc.abstractmethod
  def check(self) -> None:
    """Waits for the device and raises what no op has reported.

    Collective where the failure may end the group.

    Raises:
      ValueError, RuntimeError: the failure of an earlier op, once.
    """

  @abc.abstractmethod
  def memory(self) -> GroupMemory:
    """Returns the host memory that this process keeps between ops."""

  def waited(self) -> float:
    """Returns for how many seconds a rank has waited; see `EpGroup.waited`."""
    return 0.0

  @abc.abstractmethod
  def check_places(self, op: str, mesh: jax.sharding.Mesh) -> None:
    """Raises `ValueError` if `op` cannot run on a mesh of these places.

    The mesh has the axes of the group's mesh, but may have the devices in
    another order.
    """

  @abc.abstractmethod
  def mem_bytes(self, params: OpParams) -> int:
    """Returns the bytes of `EpHandle.mem`.

    Raises:
      ValueError: the layer or the number of tokens is beyond a limit.
    """

  @abc.abstractmethod
  def lower(
    self,
    op: str,
    ctx: compat.mlir.LoweringRuleContext,
    *operands: Any,
    params: OpParams,
  ) -> Any:
    """Lowers one of `OPS` to values of the module in `ctx`.

    Operands and results are those of the op's primitive, in a rank's shapes.
    "ep_combine" has a third operand, the weights, where the user passed them
    and the connection `weighs`.
    """

  @abc.abstractmethod
  def _close(self) -> None:
    """Ends what `Backend.connect` began. Called at most once."""

  @abc.abstractmethod
  def _release(self) -> None:
    """Ends the connection when no program that uses it is left."""


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


class Backend(abc.ABC):
  """A way to run the ops. It has no state."""

  @abc.abstractmethod
  def check_mesh(self, mesh: Mesh, axis_name: str) -> None:
    """Raises `CannotServe` if it cannot serve the mesh. Not collective."""

  @abc.abstractmethod
  def check_sizes(self, group: GroupConfig) -> None:
    """Raises `ValueError` if it needs a size that the group leaves open."""

  @abc.abstractmethod
  def probe(self) -> str:
    """Returns the native software that it would use in this process, or "".

    Raises:
      RuntimeError, ValueError, OSError: what it needs is not there. The message
        says how to get it.
    """

  @abc.abstractmethod
  def connect(self, group: GroupConfig, join: Join) -> Connection:
    """Connects the ranks of a group, which `check_mesh` has accepted.

    Collective over the processes of the mesh. The caller closes the result,
    whose `group` may have defaults resolved that `group` leaves open. `join`
    must be called once: it checks that all processes agree on the group, and
    lets them introduce themselves to each other.

    Raises:
      CannotServe: on every process, if it cannot serve the processes.
      ValueError: the processes disagree, or the group's name is taken.
      RuntimeError: the processes cannot be connected.
    """


# The connections of this process that are open and not released, by their
# groups' names.
_open: dict[str, Connection] = {}


def is_open(name: str) -> bool:
  """Returns whether this process has an open group of this name."""
  return name in _open


def open_connections() -> list[Connection]:
  """Returns the connections that are neither closed nor released."""
  return list(_open.values())
