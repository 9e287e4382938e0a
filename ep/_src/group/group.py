# SPDX-License-Identifier: Apache-2.0
"""EpGroup and EpLayerConfig: what is fixed before a program is traced."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Generic, NoReturn, overload, Self, TypeVar

import jax.numpy as jnp

from ep._src.base import arguments, contexts
from ep._src.base.backend import Connection, GroupMemory, OpParams
from ep._src.base.config import GroupConfig, LayerConfig
from ep._src.base.meshes import Mesh
from ep._src.group import ending

_T = TypeVar("_T")


class _Held(Generic[_T]):
  """An attribute of the configuration that an object holds."""

  def __set_name__(self, owner: type, name: str) -> None:
    self._name = name

  @overload
  def __get__(self, holder: None, owner: type) -> Self: ...

  @overload
  def __get__(self, holder: Any, owner: type) -> _T: ...

  def __get__(self, holder: Any, owner: type) -> Any:
    return self if holder is None else getattr(holder.config, self._name)


@dataclasses.dataclass(frozen=True, repr=False)
class EpGroup:
  """The EP domains of a mesh and their communicators. Made by `ep_bootstrap`.

  Frozen and hashable, so programs may close over it. A context manager that
  waits for all programs that this process has launched, for at most
  `timeout_s`, and calls `ep_finalize`. An exception closes the group
  immediately.

  The attributes are the arguments of `ep_bootstrap`, with defaults resolved,
  and what follows from them: `ep_size` is P, `num_local_experts` L,
  `token_axes` are the mesh axes that shard tokens, and `num_token_ranks` is R.
  """

  connection: Connection

  name = _Held[str]()
  mesh = _Held[Mesh]()
  axis_name = _Held[str]()
  data_axes = _Held[tuple[str, ...]]()
  num_experts = _Held[int]()
  max_tokens_per_rank = _Held[int | None]()
  hidden_dim = _Held[int | None]()
  top_k = _Held[int | None]()
  recv_capacity_per_rank = _Held[int | None]()
  alignment = _Held[int]()
  max_token_dtype = _Held[jnp.dtype]()
  overflow = _Held[str]()
  drop_by = _Held[str | None]()
  backend = _Held[str]()
  max_num_sms = _Held[int]()
  timeout_s = _Held[float]()
  exit_after_s = _Held[float]()
  ep_size = _Held[int]()
  num_local_experts = _Held[int]()
  token_axes = _Held[tuple[str, ...]]()
  num_token_ranks = _Held[int]()

  @property
  def config(self) -> GroupConfig:
    """The arguments of `ep_bootstrap`, without the connection."""
    return self.connection.group

  def __repr__(self) -> str:
    return repr(self.config).replace("GroupConfig", "EpGroup", 1)

  def check(self) -> None:
    """Raises what the device has found wrong and no op has reported.

    On a GPU an op is enqueued and done, and a bad id or an overflow is found
    later: outputs are NaN then, and one of the next `ep_prepare` fails. This
    waits for the device and tells now. Collective, since it may end the group;
    where ops report their own failures it does nothing.

    Raises:
      ValueError, RuntimeError: the failure of an earlier op, once.
    """
    self.connection.check_open("EpGroup.check")
    self.connection.check()

  def memory(self) -> GroupMemory:
    """Returns the host memory that this process keeps for the group.

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
    self.connection.check_open("EpGroup.memory")
    return self.connection.memory()

  def waited(self) -> float:
    """Returns for how many seconds a rank has waited for others, in traces.

    For a dashboard: what it grew by in a step is what the step waited, while
    `ep.trace` is on or with EP_TRACE. A mean over the ranks of this process; an
    exchange counts from a rank's arrival to the last one. It is 0 before the
    first trace, and with "nccl" and "xla".
    """
    self.connection.check_open("EpGroup.waited")
    return self.connection.waited()

  def __copy__(self) -> EpGroup:
    """Returns this group itself, since losing the object closes the group."""
    return self

  def __deepcopy__(self, memo: Any) -> EpGroup:
    """Returns this group itself, so that no two programs get the same name."""
    return self

  def __reduce__(self) -> NoReturn:
    raise arguments.cannot_pickle(
      f'the group "{self.name}"',
      "pickle the arguments of ep_bootstrap, and call it there",
    )

  def __enter__(self) -> EpGroup:
    return self

  def __exit__(self, exc_type: Any, *exc: Any) -> None:
    if exc_type is not None:
      # The user gets the exception of the block, and no other.
      with contextlib.suppress(ValueError, RuntimeError):
        return self.connection.close()
    try:
      if self.connection.is_open:
        ending.wait_for_programs("the end of `with group`", [self.config])
    finally:
      self.connection.finalize()


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class EpLayerConfig:
  """The static configuration of one MoE layer. Frozen and hashable.

  Args:
    group: the group whose ranks exchange tokens.
    top_k: K, choices of a token; None inherits from the group, and so for the
      others that may be None.
    alignment: rows to a multiple of which each expert's slab is padded; 0, like
      1, does not pad.
    recv_capacity_per_rank: C, rows that a rank can receive, a multiple of the
      alignment. If None here and in the group: enough for any routing, i.e.
      `P * T * min(K, L)` rows for `T = group.max_tokens_per_rank`, plus
      `L * (alignment - 1)`, rounded up to the alignment. If the group has no
      such limit, T are the tokens of each op; see `capacity_for`.
    capacity_factor: f, with which C is `f * T * K` rows in the place of the
      worst case: at least a slab for each local expert, and at most what the
      group allows or any routing needs. A `recv_capacity_per_rank` of the layer
      takes its place.
    capacity_multiple: rows to a multiple of which a C that the layer does not
      state is rounded up.
    overflow: what to do when a rank would receive more: "error" fails on every
      rank, "drop" drops the choices that find no room, and with "chunk"
      `moe_layer` and `ep.MoE` send the tokens of such a step in chunks,
      of which any routing fits. The ops by themselves refuse "chunk".
    drop_by: which choices find room, if `overflow` is "drop": "slot" drops the
      slots past the capacity, hence the last experts of a rank first; "weight"
      keeps the choices of the largest weights; "fair" gives the experts of a
      rank equal shares of its capacity, and an expert keeps its choices of the
      largest weights. The last two need the weights in `ep_prepare`, and if
      some rank overflows, a collective of XLA's and a second exchange. None
      inherits from the group, and if that has None, too, it is "fair" where
      `ep_prepare` gets weights, as in `ep.MoE` and `moe_layer`, else "slot".
    tail: what dispatch writes past the last slab: "zero", or nothing
      ("unspecified": never read those rows).
    wire: how dispatch sends float rows, and the backward pass of combine its
      gradient: "mxfp8" and "fp8_block128" round them as `ep.quant.quantize`
      does, and send about half the bytes of bfloat16; None sends them as they
      are. Derivatives do not see the rounding.
    name: for messages and traces; default "moe".

  Raises:
    ValueError: a value is out of range or conflicts with the group.
    TypeError: a size is no integer.
  """

  group: EpGroup
  config: LayerConfig

  top_k = _Held[int]()
  alignment = _Held[int]()
  recv_capacity_per_rank = _Held[int | None]()
  capacity_factor = _Held[float | None]()
  capacity_multiple = _Held[int]()
  overflow = _Held[str]()
  drop_by = _Held[str | None]()
  tail = _Held[str]()
  wire = _Held[str | None]()
  name = _Held[str]()
  ep_size = _Held[int]()
  num_local_experts = _Held[int]()
  capacity = _Held[int]()
  fingerprint = _Held[int]()

  def __init__(
    self,
    group: EpGroup,
    top_k: int | None = None,
    alignment: int | None = None,
    recv_capacity_per_rank: int | None = None,
    capacity_factor: float | None = None,
    capacity_multiple: int = 1,
    overflow: str | None = None,
    drop_by: str | None = None,
    tail: str = "zero",
    wire: str | None = None,
    name: str | None = None,
  ) -> None:
    if not isinstance(group, EpGroup):
      raise TypeError(
        f"EpLayerConfig: group is a {type(group).__name__}, but an EpGroup is"
        " expected; get one from ep_bootstrap."
      )
    values: dict[str, Any] = dict(
      top_k=top_k,
      alignment=alignment,
      recv_capacity_per_rank=recv_capacity_per_rank,
      capacity_factor=capacity_factor,
      capacity_multiple=capacity_multiple,
      overflow=overflow,
      drop_by=drop_by,
      tail=tail,
      wire=wire,
      name=name,
    )
    self._hold(group, LayerConfig(group.config, **values))

  def _hold(self, group: EpGroup, config: LayerConfig) -> None:
    vars(self).update(group=group, config=config)

  @classmethod
  def of(cls, connection: Connection, config: LayerConfig) -> EpLayerConfig:
    """Returns a layer that does not keep the group of the user open."""
    layer = cls.__new__(cls)
    layer._hold(EpGroup(connection), config)
    return layer

  def replace(self, **changes: Any) -> EpLayerConfig:
    """Returns a layer of the same group with other values.

    Args:
      **changes: arguments of `EpLayerConfig`; the others stay as they are.

    Raises:
      ValueError, TypeError: as `EpLayerConfig` does.
    """
    values = {**vars(self.config), "group": self.group, **changes}
    return EpLayerConfig(**values)

  __replace__ = replace  # of copy.replace

  def capacity_for(self, num_tokens: int) -> int:
    """Returns C: rows that a rank can receive if T = `num_tokens`.

    It is the same for all T if the layer has a capacity, or the group a limit
    of tokens. If not, it is the capacity of one token at least.

    Raises:
      ValueError: `num_tokens` is negative.
      TypeError: it is no integer.
    """
    return self.config.capacity_for(num_tokens)

  def __repr__(self) -> str:
    return f"Ep{self.config}"

  def __copy__(self) -> EpLayerConfig:
    """Returns this layer itself, as a copy of its group is that group."""
    return self

  def __deepcopy__(self, memo: Any) -> EpLayerConfig:
    """Returns this layer itself."""
    return self

  def __reduce__(self) -> NoReturn:
    raise arguments.cannot_pickle(
      f'the layer "{self.name}"',
      "pickle the arguments of EpLayerConfig, and call it with a group there;"
      " of a handle, pickle jax.tree.leaves(handle), which are plain arrays,"
      " and give them to EpHandle with that layer",
    )

  def op_params(self, num_tokens: int) -> OpParams:
    """Returns the parameters of an op that is traced now.

    They do not keep the group open, since JAX's caches keep them.
    """
    return OpParams(
      connection=self.group.connection,
      layer=self.config,
      num_tokens=num_tokens,
      drop=self.overflow != "error",
      tail=contexts.tail(self.tail),
      checked=contexts.is_checked(),
      in_trace=contexts.in_trace.value,
    )


def check_layer(op: str, layer: EpLayerConfig) -> None:
  """Raises `TypeError` unless `layer` is an EpLayerConfig."""
  if not isinstance(layer, EpLayerConfig):
    raise TypeError(
      f"{op}: layer is a {type(layer).__name__}, but an EpLayerConfig is"
      " expected; make one of the group, EpLayerConfig(group, top_k=...)."
    )
