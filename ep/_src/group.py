# SPDX-License-Identifier: Apache-2.0
"""EpGroup and EpLayerConfig: what is fixed before a program is traced."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import hashlib
import logging
import math
import os
from typing import Any, NamedTuple
import weakref

import jax.numpy as jnp

from ep._src import arguments, rendezvous, te_names
from ep._src.backends import BACKENDS, NATIVE
from ep._src.program import ProgramNames

_OVERFLOW = ("error", "drop")
_TAILS = ("zero", "unspecified")
_DTYPES = ("float32", "bfloat16", "float16")

_logger = logging.getLogger("ep")


def _check(condition: bool, what: str, message: str) -> None:
  if not condition:
    raise ValueError(f"{what}: {message}")


class _Lifetime:
  """Knows whether a group is open; the group and its shadow share one."""

  def __init__(self, group: EpGroup):
    self.alive = True
    self.process = os.getpid()
    self._backend = group.backend
    self._name = group.name
    rendezvous.live[group.name] = self

  @property
  def is_forked(self) -> bool:
    """Whether this process is a forked child of the one with the group."""
    return self.process != os.getpid()

  def end(self) -> None:
    """Closes the group, but not of the parent of a forked child."""
    if not self.alive or self.is_forked:
      return
    self.alive = False
    try:
      BACKENDS[self._backend].close(self._name)
    finally:
      rendezvous.live.pop(self._name, None)

  def release(self) -> None:
    """Closes the group once no program uses it: its user has lost it."""
    if self.alive and not self.is_forked:
      rendezvous.live.pop(self._name, None)
      BACKENDS[self._backend].release(self._name)
      _released_by.add(self._backend)


# The backends of which this process has released groups.
_released_by: set[str] = set()
os.register_at_fork(after_in_child=_released_by.clear)


# This runs before JAX's own handlers, since JAX is imported above: those may
# wait for peers that wait for this process.
@atexit.register
def _end_all() -> None:
  with contextlib.ExitStack() as stack:
    for lifetime in list(rendezvous.live.values()):
      stack.callback(lifetime.end)
    for backend in _released_by:
      stack.callback(BACKENDS[backend].close_released)


class GroupMemory(NamedTuple):
  """Bytes of the host's memory.

  Attributes:
    reserved: address space.
    resident: of that, what was ever touched.
  """

  reserved: int
  resident: int


@dataclasses.dataclass(frozen=True)
class EpGroup:
  """The EP domains of a mesh and their communicators. Made by `ep_bootstrap`.

  Frozen and hashable, so programs may close over it. A context manager that
  calls `ep_finalize` on exit.

  The attributes are the arguments of `ep_bootstrap`, with defaults resolved.
  """

  name: str
  mesh: rendezvous.Mesh
  axis_name: str
  data_axes: tuple[str, ...]
  num_experts: int
  max_tokens_per_rank: int
  hidden_dim: int
  top_k: int
  recv_capacity_per_rank: int | None
  alignment: int
  max_token_dtype: jnp.dtype
  overflow: str
  backend: str
  max_num_sms: int
  timeout_s: float
  programs: ProgramNames | None = dataclasses.field(
    default=None, compare=False, repr=False
  )
  _lifetime: _Lifetime | None = dataclasses.field(default=None, repr=False)
  _shadow: EpGroup | None = dataclasses.field(
    default=None, compare=False, repr=False
  )

  @property
  def ep_size(self) -> int:
    """P: ranks of an EP domain."""
    return self.mesh.shape[self.axis_name]

  @property
  def num_local_experts(self) -> int:
    """L: experts of a rank."""
    return self.num_experts // self.ep_size

  @property
  def token_axes(self) -> tuple[str, ...]:
    """The mesh axes that shard tokens: the data axes, then the EP axis."""
    return (*self.data_axes, self.axis_name)

  @property
  def num_token_ranks(self) -> int:
    """R: ranks that hold distinct tokens."""
    return math.prod(self.mesh.shape[a] for a in self.token_axes)

  @property
  def config(self) -> str:
    """Describes what programs of the group rely on, for messages.

    A program that was exported names its group, and is refused by a live group
    of that name for which this differs.
    """
    mesh = ", ".join(f"{a} = {n}" for a, n in self.mesh.shape.items())
    return (
      f"mesh ({mesh}), axis_name = {self.axis_name}, data_axes ="
      f" {self.data_axes}, num_experts = {self.num_experts},"
      f" max_tokens_per_rank = {self.max_tokens_per_rank}, hidden_dim ="
      f" {self.hidden_dim}, max_token_dtype = {self.max_token_dtype}"
    )

  @property
  def shadow(self) -> EpGroup:
    """An equal group that does not keep this one open.

    JAX's caches keep the parameters of ops, after their functions have died.
    """
    # Not that of the group that this one was made from by `replace`.
    return self._shadow if self._shadow == self else self

  def check_alive(self, op: str) -> None:
    """Raises `RuntimeError` after `ep_finalize`, and in a forked child."""
    if self._lifetime is not None and self._lifetime.is_forked:
      raise RuntimeError(
        f'{op}: the group "{self.name}" belongs to the process with the id'
        f" {self._lifetime.process}, of which this one is a forked child; use"
        " the group there, or start this process without a fork (the method"
        ' "spawn" of multiprocessing) and bootstrap a group in it.'
      )
    if self._lifetime is None or not self._lifetime.alive:
      raise RuntimeError(
        f'{op}: the group "{self.name}" was finalized; bootstrap a new group,'
        " and finalize it after its last op."
      )

  def check(self) -> None:
    """Raises what the device has found wrong and no op has reported.

    On a GPU an op is enqueued and done, and a bad id or an overflow is found
    later: outputs are NaN then, and one of the next `ep_prepare` fails. This
    waits for the device and tells now. Collective, since it may end the group;
    where ops report their own failures it does nothing.

    Raises:
      ValueError, RuntimeError: the failure of an earlier op, once.
    """
    self.check_alive("EpGroup.check")
    BACKENDS[self.backend].check(self.name)

  def memory(self) -> GroupMemory:
    """The host memory that this process keeps for the group between ops.

    With "host", shared memory in which a rank stages what ranks in other
    processes read; with one process there is none. An exchange stages b bytes,
    of T tokens or C slots and their weights:

        dispatch, backward of combine:   T * (H * itemsize + 4 * K) + 64
        combine, backward of dispatch:   C * (H * itemsize + 4) + 64

    in a segment of at least 64 KiB whose size is the next power of two, and of
    it only the slots that arrived are touched. Segments are used again, by what
    needs no less than a quarter of one. So with at most n exchanges of the
    process's ranks under way at once, none larger than b,

        reserved < 4 * n * max(b, 64 KiB)

    With "nccl" and "xla" it is 0: NCCL EP and XLA keep memory of their own.
    """
    self.check_alive("EpGroup.memory")
    return GroupMemory(*BACKENDS[self.backend].memory(self.name))

  def __copy__(self) -> EpGroup:
    """Returns this very group, which is closed when this object is lost."""
    return self

  def __deepcopy__(self, memo: Any) -> EpGroup:
    """Returns this very group, so that no two programs get the same name."""
    return self

  def __enter__(self) -> EpGroup:
    return self

  def __exit__(self, exc_type: Any, *exc: Any) -> None:
    if exc_type is None:
      return ep_finalize(self)
    # What went wrong inside is told already.
    with contextlib.suppress(ValueError, RuntimeError):
      self._lifetime.end()


@te_names.explain
@dataclasses.dataclass(frozen=True)
class EpLayerConfig:
  """The static configuration of one MoE layer. Frozen and hashable.

  Args:
    group: the group whose ranks exchange tokens.
    top_k: K, choices of a token; None inherits from the group, and so for the
      others that may be None.
    alignment: rows to a multiple of which each expert's slab is padded.
    recv_capacity_per_rank: C, rows that a rank can receive, a multiple of the
      alignment. If None here and in the group: enough for any routing, i.e.
      `P * T * min(K, L)` rows for `T = group.max_tokens_per_rank`, plus
      `L * (alignment - 1)`, rounded up to the alignment.
    overflow: what to do when a rank would receive more: "error" fails on every
      rank, "drop" drops the slots past the capacity.
    tail: what dispatch writes past the last slab: "zero", or nothing
      ("unspecified": never read those rows).
    name: for messages and traces; default "moe".

  Raises:
    ValueError: a value is out of range or conflicts with the group.
    TypeError: a size is no integer.
  """

  group: EpGroup
  top_k: int | None = None
  alignment: int | None = None
  recv_capacity_per_rank: int | None = None
  overflow: str | None = None
  tail: str = "zero"
  name: str | None = None

  def __post_init__(self):
    group = self.group
    if not isinstance(group, EpGroup):
      raise TypeError(
        f"EpLayerConfig: group is a {type(group).__name__}, but an EpGroup is"
        " expected; get one from ep_bootstrap."
      )

    def inherit(field: str, default: Any) -> None:
      if getattr(self, field) is None:
        object.__setattr__(self, field, default)

    inherit("top_k", group.top_k)
    inherit("alignment", group.alignment)
    inherit("overflow", group.overflow)
    inherit("name", "moe")
    inherit("recv_capacity_per_rank", group.recv_capacity_per_rank)
    what = f'EpLayerConfig(name="{self.name}")'
    for field in ("top_k", "alignment", "recv_capacity_per_rank"):
      if (value := getattr(self, field)) is not None:
        value = arguments.integer(what, field, value)
        object.__setattr__(self, field, value)
    _check(
      1 <= self.top_k <= group.num_experts,
      what,
      f"top_k = {self.top_k}, but it must be in 1..num_experts ="
      f" {group.num_experts}.",
    )
    _check(
      self.alignment >= 1,
      what,
      f"alignment = {self.alignment}, but it must be a positive number of"
      " rows.",
    )
    _check(
      self.overflow in _OVERFLOW,
      what,
      f"overflow = {self.overflow!r}, but it must be one of {_OVERFLOW}.",
    )
    _check(
      self.tail in _TAILS,
      what,
      f"tail = {self.tail!r}, but it must be one of {_TAILS}.",
    )
    # See ValidateDims in ep_ffi/core/plan.cc.
    rows = (
      self.ep_size * group.max_tokens_per_rank * self.top_k
      + self.num_local_experts * self.alignment
    )
    _check(
      rows <= arguments.INT32_MAX,
      what,
      f"an exchange may have {rows} rows (ep_size = {self.ep_size} times"
      f" max_tokens_per_rank = {group.max_tokens_per_rank} times top_k ="
      f" {self.top_k}, and an alignment = {self.alignment} for each of the"
      f" {self.num_local_experts} local experts), but they are counted in 32"
      " bits; lower one of these, and split the tokens into several ops.",
    )
    inherit("recv_capacity_per_rank", self._worst_case())
    # A slab for each local expert, or whatever can come at all.
    least = min(group.num_local_experts * self.alignment, self._worst_case())
    _check(
      self.capacity >= least and self.capacity % self.alignment == 0,
      what,
      f"recv_capacity_per_rank = {self.capacity}, but it must be a multiple of"
      f" alignment = {self.alignment} and at least {least}, an aligned slab for"
      f" each of the {group.num_local_experts} local experts; raise it, or pass"
      " None for the worst case.",
    )

  @property
  def capacity(self) -> int:
    """C: rows that a rank can receive."""
    return self.recv_capacity_per_rank

  @property
  def ep_size(self) -> int:
    """P: ranks of an EP domain."""
    return self.group.ep_size

  @property
  def num_local_experts(self) -> int:
    """L: experts of a rank."""
    return self.group.num_local_experts

  @property
  def fingerprint(self) -> int:
    """A hash, of 63 bits, of this and the group: equal on all processes."""
    parts = {
      f.name: str(getattr(owner, f.name))
      for owner in (self.group, self)
      for f in dataclasses.fields(owner)
      if f.compare and f.name != "group" and not f.name.startswith("_")
    }
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1

  def _worst_case(self) -> int:
    local = self.num_local_experts
    tokens = self.ep_size * self.group.max_tokens_per_rank
    rows = tokens * min(self.top_k, local) + local * (self.alignment - 1)
    return -(-rows // self.alignment) * self.alignment


def _connect(group: EpGroup) -> EpGroup:
  """Connects a group by its backend, or if that is None by the platform's."""
  if group.backend is None:
    return _connect_by_platform(group)
  backend = BACKENDS[group.backend]
  _check(
    rendezvous.has_devices(group.mesh) or group.backend == "xla",
    "ep_bootstrap",
    f"backend = {group.backend!r} needs a mesh of devices; on an AbstractMesh,"
    ' pass "xla" or None.',
  )
  backend.check_mesh(group.mesh, group.axis_name)
  try:
    layer = EpLayerConfig(group)
  except ValueError as e:
    raise ValueError(
      f"ep_bootstrap: a layer of only defaults fails: {e}"
    ) from e
  if backend.ONE_CAPACITY:
    group = dataclasses.replace(group, recv_capacity_per_rank=layer.capacity)
  backend.connect(group)
  shadow = dataclasses.replace(
    group, programs=ProgramNames(group.name), _lifetime=_Lifetime(group)
  )
  group = dataclasses.replace(shadow, _shadow=shadow)
  weakref.finalize(group, shadow._lifetime.release).atexit = False
  return group


def _connect_by_platform(group: EpGroup) -> EpGroup:
  if not rendezvous.has_devices(group.mesh):
    return _connect(dataclasses.replace(group, backend="xla"))
  platform = group.mesh.devices.flat[0].platform
  try:
    if platform not in NATIVE:
      raise rendezvous.CannotServe(
        f"there is no native backend for platform {platform!r}."
      )
    return _connect(dataclasses.replace(group, backend=NATIVE[platform]))
  except rendezvous.CannotServe as why:
    _logger.warning('group "%s" uses backend = "xla": %s', group.name, why)
  return _connect(dataclasses.replace(group, backend="xla"))


@te_names.explain
def ep_bootstrap(
  mesh: rendezvous.Mesh,
  *,
  axis_name: str = "ep",
  data_axes: tuple[str, ...] | None = None,
  num_experts: int,
  max_tokens_per_rank: int,
  hidden_dim: int,
  top_k: int,
  recv_capacity_per_rank: int | None = None,
  alignment: int = 1,
  max_token_dtype: Any = jnp.bfloat16,
  overflow: str = "error",
  backend: str | None = None,
  max_num_sms: int = 0,
  timeout_s: float = 300.0,
  name: str | None = None,
) -> EpGroup:
  """Builds the EP domains of a mesh and connects their ranks.

  Collective: every process that has devices in the mesh calls it, with the
  same arguments and in the same order among other bootstraps. A domain is the
  set of ranks that differ only in their coordinate along `axis_name`.

  Args:
    mesh: a mesh of devices, with the axis `axis_name`. With an `AbstractMesh`
      the group connects nothing and is for what needs no devices:
      `jax.eval_shape`, lowering and `jax.export` for any platform; its backend
      is "xla". Several processes need not agree on it.
    axis_name: the EP axis; its size is P.
    data_axes: the other axes that shard tokens; default: all of them. Along
      the remaining ones (tensor parallelism, say) tokens are replicated, and
      each coordinate exchanges its copy in a domain of its own.
    num_experts: E, a multiple of P; expert `e` lives on EP rank `e // (E / P)`.
    max_tokens_per_rank: the most tokens T of a rank in one op.
    hidden_dim: the largest hidden size H.
    top_k: the default K of a layer.
    recv_capacity_per_rank: the default capacity C of a layer, in rows; None is
      the worst case, so that nothing overflows. With "nccl" all layers of a
      group have the same: this one, or the worst case of `top_k` and
      `alignment`.
    alignment: the default alignment of a layer's slabs, in rows.
    max_token_dtype: the widest dtype of tokens: float32, bfloat16 or float16.
    overflow: the default policy of a layer: "error" or "drop".
    backend: "host" (CPU devices of one host), "nccl" (NVIDIA GPUs from Hopper
      on, one process for each, P > 1) or "xla" (whatever XLA runs on, without
      native code). None picks "host" or "nccl" by platform; where that cannot
      serve the mesh it picks "xla", and logs why to the logger "ep".
    max_num_sms: streaming multiprocessors that "nccl" may use, at most 16; 0
      lets it choose. No effect on CPU.
    timeout_s: seconds until a rank that waits for its peers gives up, here and
      in every op; `math.inf` for never.
    name: of the group, unique among the live groups of the process and equal
      on all processes; it is part of the compiled program. Default: a serial
      number.

  Returns:
    The group. Close it with `ep_finalize`, or use it as a context manager.

  Raises:
    ValueError: an argument is out of range, differs between processes, or the
      name is taken.
    TypeError: a size is no integer, or `timeout_s` no number.
    RuntimeError: the processes cannot be connected.
    FileNotFoundError: the native library is missing.
  """
  what = "ep_bootstrap"
  sizes = dict(
    num_experts=num_experts,
    max_tokens_per_rank=max_tokens_per_rank,
    hidden_dim=hidden_dim,
    top_k=top_k,
    recv_capacity_per_rank=recv_capacity_per_rank,
    alignment=alignment,
    max_num_sms=max_num_sms,
  )
  for field, value in sizes.items():
    if value is not None or field != "recv_capacity_per_rank":
      sizes[field] = arguments.integer(what, field, value)
  timeout_s = arguments.seconds(what, "timeout_s", timeout_s)
  _check(
    axis_name in mesh.axis_names,
    what,
    f"axis_name = {axis_name!r}, but the mesh has the axes {mesh.axis_names};"
    " name one of them.",
  )
  others = tuple(a for a in mesh.axis_names if a != axis_name)
  data_axes = others if data_axes is None else tuple(data_axes)
  _check(
    set(data_axes) <= set(others) and len(set(data_axes)) == len(data_axes),
    what,
    f"data_axes = {data_axes}, but they must be distinct axes of the mesh"
    f" other than {axis_name!r}: {others}.",
  )
  ep_size = mesh.shape[axis_name]
  _check(
    sizes["num_experts"] >= 1 and sizes["num_experts"] % ep_size == 0,
    what,
    f"num_experts = {num_experts}, but it must be a positive multiple of the"
    f" EP size {ep_size} (mesh axis {axis_name!r}).",
  )
  for field in ("max_tokens_per_rank", "hidden_dim"):
    _check(
      sizes[field] > 0,
      what,
      f"{field} = {sizes[field]}, but it must be positive.",
    )
  _check(
    sizes["max_num_sms"] >= 0,
    what,
    f"max_num_sms = {max_num_sms}, but it must be 0 (automatic) or a positive"
    " number of streaming multiprocessors.",
  )
  dtype = jnp.dtype(max_token_dtype)
  _check(
    dtype.name in _DTYPES,
    what,
    f"max_token_dtype = {dtype.name}, but it must be one of {_DTYPES}.",
  )
  _check(
    backend is None or backend in BACKENDS,
    what,
    f"backend = {backend!r}, but there are only"
    f" {', '.join(map(repr, BACKENDS))}; None picks by platform.",
  )

  group = EpGroup(
    name=rendezvous.group_name(mesh, name),
    mesh=mesh,
    axis_name=axis_name,
    data_axes=data_axes,
    max_token_dtype=dtype,
    overflow=overflow,
    backend=backend,
    timeout_s=timeout_s,
    **sizes,
  )
  return _connect(group)


def ep_finalize(group: EpGroup) -> None:
  """Closes a group: later ops on it fail, on every rank. Idempotent.

  In a forked child of the process that bootstrapped the group it does nothing.

  Wait for the results of the last op first. Compiled programs that use the
  group may live on, and keep nothing of it but its name; there is no need to
  clear JAX's caches.

  Raises:
    ValueError, RuntimeError: an op has failed and none has told (see
      `EpGroup.check`), or a peer has run what this process has not. The group
      is closed all the same.
  """
  lifetime = group._lifetime
  if lifetime is None or not lifetime.alive or lifetime.is_forked:
    return
  try:
    group.check()
  finally:
    lifetime.end()
