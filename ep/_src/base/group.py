# SPDX-License-Identifier: Apache-2.0
"""A group of ranks: its checked fields, and its connection, which runs ops.

`EpGroup` and `Connection` refer to each other. The user holds an `EpGroup` with
a connection. The connection holds an equal description *without* a connection,
so that JAX's caches, which keep the connection of an op, keep no group open.
"""

from __future__ import annotations

from collections.abc import Iterable
import contextlib
import dataclasses
import functools
import math
import operator
import os
import threading
import time
from typing import Any, NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np

from ep._src.base import arguments, arrays
from ep._src.base.compat import LoweringContext
from ep._src.base.meshes import has_devices, Mesh, platform

OVERFLOW = ("error", "drop", "chunk")
DROP_BY = (None, "slot", "fair")
_ERRORS = (None, "raise", "flag")
_DTYPES = ("float32", "bfloat16", "float16")

# Besides the mesh's shape, compiled programs depend on these fields of a group.
# The remaining fields are attributes of each op, or do not change results.
_OF_PROGRAMS = (
  "axis_name",
  "data_axes",
  "num_experts",
  "max_tokens_per_rank",
  "hidden_dim",
  "max_token_dtype",
)

# The number of programs that a connection caches.
_CACHED = 256

_POLL_S = 0.005


class NotCopied:
  """A base class: `copy.copy` and `copy.deepcopy` return the object itself.

  A copy of a group could close the group, and would repeat its program names.
  Copies of the functions in a `MoEConfig` would not be equal.
  """

  def __copy__(self) -> Self:
    return self

  def __deepcopy__(self, memo: Any) -> Self:
    return self


def token_dtype(what: str, name: str, value: Any) -> jnp.dtype:
  """Returns `value` as a dtype that tokens can have.

  Raises, with a message that begins with `what`:
    TypeError: `value` names no dtype.
    ValueError: tokens cannot have this dtype.
  """
  dtype = arrays.dtype(what, name, value)
  arguments.check(
    dtype.name in _DTYPES,
    what,
    f"{name} = {dtype.name}, but it must be one of {_DTYPES}.",
  )
  return dtype


_POSITIVE = arguments.at_least(1, "positive")
_CHECKS: dict[str, arguments.Check] = {
  "name": arguments.label,
  "axis_name": arguments.string,
  "data_axes": arguments.strings,
  "num_experts": _POSITIVE,
  "max_tokens_per_rank": arguments.optional(_POSITIVE),
  "hidden_dim": arguments.optional(_POSITIVE),
  "top_k": arguments.optional(arguments.integer),
  "recv_capacity_per_rank": arguments.optional(arguments.integer),
  "alignment": arguments.alignment,
  "max_token_dtype": token_dtype,
  "overflow": arguments.one_of(*OVERFLOW),
  "drop_by": arguments.one_of(*DROP_BY),
  "errors": arguments.one_of(*_ERRORS),
  "max_num_sms": arguments.at_least(
    0, "0 (automatic) or a positive number of streaming multiprocessors"
  ),
  "timeout_s": arguments.seconds,
  "exit_after_s": arguments.seconds,
}


@dataclasses.dataclass(frozen=True)
class EpGroup(NotCopied):
  """The EP domains of a mesh and their communicators. Made by `ep_bootstrap`.

  Frozen and hashable, so programs may close over it. A `with` block ends with a
  wait of at most `timeout_s` for all programs that this process has launched,
  and with `ep_finalize`. After an exception, the group closes immediately.

  The attributes are the arguments of `ep_bootstrap`, with defaults resolved,
  and derived values.
  """

  name: str
  mesh: Mesh
  axis_name: str
  data_axes: tuple[str, ...]
  num_experts: int
  max_tokens_per_rank: int | None
  hidden_dim: int | None
  top_k: int | None
  recv_capacity_per_rank: int | None
  alignment: int
  max_token_dtype: jnp.dtype
  overflow: str
  drop_by: str | None
  backend: str
  errors: str | None
  max_num_sms: int
  timeout_s: float
  exit_after_s: float
  # None in the description that `ep_bootstrap` has not connected.
  connection: Connection = dataclasses.field(default=None, repr=False)  # type: ignore[assignment]

  def __post_init__(self) -> None:
    what = "ep_bootstrap"
    arguments.resolve(what, self, _CHECKS)
    axis, names = self.axis_name, self.mesh.axis_names
    arguments.check(
      axis in names,
      what,
      f"axis_name = {axis!r}, but the mesh has the axes {names}; name one of"
      " them.",
    )
    others = tuple(a for a in names if a != axis)
    arguments.check(
      set(self.data_axes) <= set(others)
      and len(set(self.data_axes)) == len(self.data_axes),
      what,
      f"data_axes = {self.data_axes}, but they must be distinct axes of the"
      f" mesh other than {axis!r}: {others}.",
    )
    if self.errors is None:
      is_flagged = has_devices(self.mesh) and platform(self.mesh) != "cpu"
      errors = "flag" if is_flagged else "raise"
      object.__setattr__(self, "errors", errors)

  @functools.cached_property
  def ep_size(self) -> int:
    """P: the number of ranks of an EP domain."""
    return int(self.mesh.shape[self.axis_name])

  @functools.cached_property
  def num_local_experts(self) -> int:
    """L: the number of expert slots of a rank; the last ones may be empty."""
    return -(-self.num_experts // self.ep_size)

  @functools.cached_property
  def num_expert_slots(self) -> int:
    """V = P * L: the number of expert slots of all ranks of an EP domain."""
    return self.ep_size * self.num_local_experts

  @functools.cached_property
  def token_axes(self) -> tuple[str, ...]:
    """The mesh axes that shard tokens: the data axes, then the EP axis."""
    return (*self.data_axes, self.axis_name)

  @functools.cached_property
  def num_token_ranks(self) -> int:
    """R: the number of ranks that hold distinct tokens."""
    return math.prod(self.mesh.shape[a] for a in self.token_axes)

  @functools.cached_property
  def program_text(self) -> str:
    """The fields on which the group's compiled programs depend, as text.

    An exported program contains its group's name and this text. A live group
    of the same name refuses the program if its text differs.
    """
    mesh = ", ".join(f"{a} = {n}" for a, n in self.mesh.shape.items())
    texts = self.texts()
    return ", ".join(
      [f"mesh ({mesh})", *(f"{name} = {texts[name]}" for name in _OF_PROGRAMS)]
    )

  def texts(self) -> dict[str, str]:
    """Returns each field as text; equal on all processes of the mesh."""
    fields = (field.name for field in dataclasses.fields(self))
    return {f: str(getattr(self, f)) for f in fields if f != "connection"}

  def __hash__(self) -> int:
    return hash(self.name)

  def raise_failures(self) -> None:
    """Waits for the device, and raises failures that no op has raised yet.

    On a GPU, an op only enqueues work, and the device finds a bad id or an
    overflow later. Then outputs are NaN, and one of the next `ep_prepare`
    fails. Collective, because it may close the group. No effect on other
    backends: ops raise all failures, and with `errors="flag"` `ep.check` does.

    Raises:
      ValueError, RuntimeError: the failure of an earlier op, once.
    """
    self.connection.check_open("EpGroup.raise_failures")
    self.connection.raise_failures()

  def __reduce__(self) -> NoReturn:
    raise arguments.cannot_pickle(
      f'the group "{self.name}"',
      "pickle the arguments of ep_bootstrap, and call it there",
    )

  def __enter__(self) -> EpGroup:
    return self

  def __exit__(self, exc_type: Any, *exc: Any) -> None:
    if exc_type is not None:
      # The block raised an exception: `close` must not raise another one.
      with contextlib.suppress(ValueError, RuntimeError):
        return self.connection.close()
    try:
      if self.connection.is_open:
        wait_for_programs("the end of `with group`", [self])
    finally:
      self.connection.close(check=True)


def check_group(what: str, group: EpGroup) -> None:
  cure = "get one from ep_bootstrap"
  arguments.check_type(what, "group", group, EpGroup, cure)


@dataclasses.dataclass(frozen=True)
class Sizes:
  """The static parameter of an op: its sizes and options, and its connection.

  Letters are as in docs/semantics.md. `EpLayerConfig.sizes` makes it.

  Attributes:
    connection: the connection that lowers the op.
    group: the description of the group, which does not keep the group open.
    name: the layer's name.
    T: tokens of this rank.
    K: choices of a token.
    E: experts.
    P: ranks of the EP domain.
    L: expert slots of a rank.
    V: expert slots of all ranks of the EP domain.
    C: receive rows of a rank.
    alignment: the rows to a multiple of which dispatch pads a slab.
    overflow: what `ep_prepare` does if a rank needs more than C rows.
    fair: whether an `ep_prepare` with weights drops choices by "fair".
    tail: the rows that dispatch writes past the last slab: "zero",
      "unspecified" or, in checked mode, "nan".
    wire: the fp8 transport of dispatch, or None.
    checked: whether JAX traced the op in checked mode.
    raises: whether the program raises its faults, if it can call Python.
    fingerprint: a hash of layer and group, equal on all processes.
  """

  connection: Connection = dataclasses.field(repr=False)
  group: EpGroup = dataclasses.field(repr=False, compare=False)
  name: str
  T: int
  K: int
  E: int
  P: int
  L: int
  V: int
  C: int
  alignment: int
  overflow: str
  fair: bool
  tail: str
  wire: str | None
  checked: bool
  raises: bool
  fingerprint: int

  @functools.cached_property
  def mem_bytes(self) -> int:
    """The size of `EpHandle.mem`, in bytes; see `Connection.mem_bytes`."""
    try:
      return self.connection.mem_bytes(self)
    except ValueError as e:
      raise ValueError(f'ep_prepare(layer "{self.name}"): {e}') from e

  def worst_case(self) -> int:
    """Returns the least capacity for any routing of the tokens."""
    return worst_case(self.group, self.T, self.K, self.alignment)


def worst_case(
  group: EpGroup, num_tokens: int, top_k: int, alignment: int
) -> int:
  """Returns the least capacity for any routing of T = `num_tokens` tokens."""
  L = group.num_local_experts
  rows = group.ep_size * num_tokens * min(top_k, L) + L * (alignment - 1)
  return -(-rows // alignment) * alignment


class Connection:
  """A process's connection to the ranks of a group; lowers the group's ops.

  `Backend.connect` makes a connection on each process of the mesh. The
  connection is open until `close`, or until `release`, which Python calls when
  it collects the user's `EpGroup`.

  Attributes:
    group: the description of the group, with the backend's defaults resolved.
    weighs: whether "ep_combine" multiplies rows by weights. If not, the caller
      multiplies the rows before, and the op has no weights.
    flags: whether `EpHandle.mem` ends with a fault; see errors.py.
  """

  weighs = True
  flags = False

  def __init__(self, group: EpGroup):
    self.group = group
    self.is_open = True  # whether this process can use the connection
    self._process = os.getpid()
    self._closing = threading.Lock()  # taken by the first thread that closes
    # `cached(make, *args)` returns `make(*args)`, and keeps it until `close`.
    self.cached = functools.lru_cache(_CACHED)(operator.call)
    # Another thread may have made a group of this name since the last check.
    _open.setdefault(group.name, self)
    check_free(group.name, owner=self)

  @property
  def closes_at_exit(self) -> bool:
    """Whether the connection closes at exit, since a peer may wait for it."""
    return False

  @property
  def is_forked(self) -> bool:
    """Whether this process is a forked child of the connection's process."""
    return self._process != os.getpid()

  def check_open(self, op: str) -> None:
    """Raises `RuntimeError` after `close`, and in a forked child."""
    if self.is_forked:
      raise RuntimeError(
        f'{op}: the group "{self.group.name}" belongs to the process with the'
        f" id {self._process}, of which this one is a forked child; use the"
        " group there, or start this process without a fork (the method"
        ' "spawn" of multiprocessing) and bootstrap a group in it.'
      )
    if not self.is_open:
      raise RuntimeError(
        f'{op}: the group "{self.group.name}" was finalized; bootstrap a new'
        " group, and finalize it after its last op."
      )

  def close(self, *, check: bool = False) -> None:
    """Makes later ops fail. Idempotent. Does nothing in a forked child.

    With `check`, calls `raise_failures` before.

    Raises:
      ValueError, RuntimeError: the failure of an earlier op, or a peer waits
        for an op that this process has not run. The connection is closed
        nevertheless.
    """
    if self.is_forked or not self._closing.acquire(blocking=False):
      return
    try:
      if check:
        self.raise_failures()
    finally:
      self.is_open = False
      self.cached.cache_clear()
      try:
        self._close()
      finally:
        _open.pop(self.group.name, None)

  def release(self) -> None:
    """Closes the connection once no program uses it. Does nothing in a fork."""
    if self.is_open:
      _open.pop(self.group.name, None)
      self.cached.cache_clear()
      self._release()

  def raise_failures(self) -> None:
    """Implements `EpGroup.raise_failures` of an open group."""

  def mem_bytes(self, sizes: Sizes) -> int:
    """Returns the size of `EpHandle.mem`, in bytes.

    Raises:
      ValueError: the layer or the number of tokens exceeds a limit.
    """
    raise NotImplementedError

  def lower(
    self, op: str, ctx: LoweringContext, *operands: Any, sizes: Sizes
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


# This process's open and unreleased connections, by the name of the group.
_open: dict[str, Connection] = {}


def _leave_to_parent() -> None:
  """Makes ops fail in a forked child, which has no peers and no threads."""
  for connection in _open.values():
    connection.is_open = False


os.register_at_fork(after_in_child=_leave_to_parent)


def check_free(name: str, owner: Connection | None = None) -> None:
  """Raises `ValueError` if a live group of this process has the name.

  `owner` may have it.
  """
  arguments.check(
    _open.get(name, owner) is owner,
    "ep_bootstrap",
    f'the name "{name}" belongs to a live group; finalize that one first, or'
    " choose another name.",
  )


def open_connections() -> list[Connection]:
  return list(_open.values())


def wait_for_programs(what: str, groups: Iterable[EpGroup]) -> None:
  """Waits until all programs that this process has launched have finished.

  A program may end with an error, and Python may have deleted its results. But
  a device runs the programs of a thread in order, so this function launches one
  more program, and waits for its result. For programs of other threads, the
  function waits for live results. `groups` gives the platforms and the timeout.

  Raises:
    RuntimeError: a program has not ended within the largest `timeout_s`; the
      message begins with `what`.
  """
  groups = [group for group in groups if has_devices(group.mesh)]
  results: list[jax.Array] = []
  firsts = (group.mesh.devices.flat[0] for group in groups)
  # A topology that JAX only compiles for has no local device.
  for name in {d.platform for d in firsts if d.client.local_devices()}:
    devices = np.array(jax.local_devices(backend=name))
    mesh = jax.sharding.Mesh(devices, "device")
    with jax.set_mesh(mesh):  # overrides the user's mesh
      places = jax.sharding.PartitionSpec("device")
      last = jax.jit(jnp.zeros, static_argnums=0, out_shardings=places)
      results += [last(devices.size), *jax.live_arrays(name)]
  timeout_s = max((group.timeout_s for group in groups), default=0.0)
  deadline = time.monotonic() + timeout_s
  while not all(
    x.is_deleted() or x.is_ready()  # type: ignore[attr-defined]
    for x in results
  ):
    if time.monotonic() > deadline:
      raise RuntimeError(
        f"{what}: programs that this process has launched did not end within"
        f" timeout_s = {timeout_s} s; wait for their results before, with"
        " jax.block_until_ready."
      )
    time.sleep(_POLL_S)
