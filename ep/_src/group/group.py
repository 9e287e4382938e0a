# SPDX-License-Identifier: Apache-2.0
"""EpGroup and EpLayerConfig: a group of ranks, and a layer's configuration."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Generic, NoReturn, overload, Self, TypeVar

import jax.numpy as jnp

from ep._src.base import arguments, contexts
from ep._src.base.backend import Connection, OpParams
from ep._src.base.config import GroupConfig, LayerConfig, NotCopied
from ep._src.base.meshes import Mesh
from ep._src.group import ending

_T = TypeVar("_T")


class _Held(Generic[_T]):
  """A descriptor that reads the attribute of the same name in `self.config`."""

  def __set_name__(self, owner: type, name: str) -> None:
    self._name = name

  @overload
  def __get__(self, holder: None, owner: type) -> Self: ...

  @overload
  def __get__(self, holder: Any, owner: type) -> _T: ...

  def __get__(self, holder: Any, owner: type) -> Any:
    return self if holder is None else getattr(holder.config, self._name)


@dataclasses.dataclass(frozen=True, repr=False)
class EpGroup(NotCopied):
  """The EP domains of a mesh and their communicators. Made by `ep_bootstrap`.

  Frozen and hashable, so programs may close over it. A `with` block ends with a
  wait of at most `timeout_s` for all programs that this process has launched,
  and with `ep_finalize`. After an exception, the group closes immediately.

  The attributes are the arguments of `ep_bootstrap`, with defaults resolved,
  and derived values: `ep_size` is P, `num_local_experts` L, `num_expert_slots`
  P * L, `token_axes` are the mesh axes that shard tokens, and `num_token_ranks`
  is R.
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
  errors = _Held[str]()
  max_num_sms = _Held[int]()
  timeout_s = _Held[float]()
  exit_after_s = _Held[float]()
  ep_size = _Held[int]()
  num_local_experts = _Held[int]()
  num_expert_slots = _Held[int]()
  token_axes = _Held[tuple[str, ...]]()
  num_token_ranks = _Held[int]()

  @property
  def config(self) -> GroupConfig:
    """The arguments of `ep_bootstrap`, without the connection."""
    return self.connection.group

  def __repr__(self) -> str:
    return repr(self.config).replace("GroupConfig", "EpGroup", 1)

  def raise_failures(self) -> None:
    """Waits for the device, and raises failures that no op has raised yet.

    On a GPU, an op only enqueues work, and the device finds a bad id or an
    overflow later. Then outputs are NaN, and one of the next `ep_prepare`
    fails. Collective, because it may close the group. With "xla" and
    `errors="flag"`, it raises the fault of the last op or layer that ran
    outside of a program; `ep.check` raises faults of programs. No effect
    otherwise, because ops raise all failures.

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
        ending.wait_for_programs("the end of `with group`", [self.config])
    finally:
      self.connection.finalize()


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class EpLayerConfig(NotCopied):
  """The static configuration of one MoE layer. Frozen and hashable.

  Args:
    group: the group whose ranks exchange tokens.
    top_k: K, choices of a token. If `top_k`, `alignment` or `overflow` is None,
      the layer inherits the value of the group.
    alignment: dispatch pads each expert's slab to a multiple of this number of
      rows; 0 and 1 do not pad.
    recv_capacity_per_rank: C, receive rows of a rank, a multiple of the
      alignment. If None here and in the group, C is enough for any routing:
      `P * T * min(K, L)` rows for `T = group.max_tokens_per_rank`, plus
      `L * (alignment - 1)`, rounded up to the alignment. If the group has no
      such limit, T is the number of tokens of each op; see `capacity_for`.
    capacity_factor: f, with which C is `f * T * K` rows instead of the worst
      case: at least a slab for each local expert, and at most the capacity of
      the group or of the worst case. Ignored if the layer has a
      `recv_capacity_per_rank`.
    capacity_multiple: unless the layer has a `recv_capacity_per_rank`, C is
      rounded up to a multiple of this number of rows.
    overflow: the policy if a rank would receive more than C rows: "error" fails
      on every rank, "drop" drops the choices for which no rows are free, and
      with "chunk" `moe_layer` and `ep.MoE` send the tokens of such a step in
      chunks, each of which fits for any routing. The ops refuse "chunk".
    drop_by: which choices are kept, if `overflow` is "drop": "slot" drops slots
      past the capacity, hence the last experts of a rank first; "fair" gives
      the experts of a rank equal shares of its capacity, and an expert keeps
      its choices with the largest weights. "fair" needs weights in `ep_prepare`
      and, if a rank overflows, a collective of XLA and a second exchange. None
      inherits from the group. If the group also has None, it is "fair" where
      `ep_prepare` gets weights, as in `ep.MoE` and `moe_layer`, else "slot".
    tail: the rows past the last slab after dispatch: "zero", or "unspecified",
      if the program never reads them.
    wire: the fp8 transport of dispatch, and of gradients in the backward pass
      of combine: "mxfp8" and "fp8_block128" round float rows like
      `ep.quant.quantize`, and send about half the bytes of bfloat16; None does
      not round. Derivatives ignore the rounding.
    name: the name in messages and profiles; default "moe".

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
    check_group("EpLayerConfig", group)
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
    vars(self).update(group=group, config=LayerConfig(group.config, **values))

  @classmethod
  def of(cls, connection: Connection, config: LayerConfig) -> EpLayerConfig:
    """Returns a layer that does not keep the user's `EpGroup` open."""
    layer = cls.__new__(cls)
    vars(layer).update(group=EpGroup(connection), config=config)
    return layer

  def replace(self, **changes: Any) -> EpLayerConfig:
    """Returns a layer with other values.

    Args:
      **changes: arguments of `EpLayerConfig`; the other values stay the same. A
        default capacity becomes the default of the new values.

    Raises:
      ValueError, TypeError: as `EpLayerConfig` does.
    """
    values = {**vars(self.config), "group": self.group}
    if self.recv_capacity_per_rank == self.config.default_capacity():
      del values["recv_capacity_per_rank"]
    return EpLayerConfig(**(values | changes))

  __replace__ = replace  # for copy.replace

  def capacity_for(self, num_tokens: int) -> int:
    """Returns C: rows that a rank can receive if T = `num_tokens`.

    C is the same for all T if the layer has a capacity or the group has a
    limit of tokens. Otherwise T = 0 has the capacity of T = 1.

    Raises:
      ValueError: `num_tokens` is negative, or C does not fit into 32 bits.
      TypeError: `num_tokens` is no integer.
    """
    return self.config.capacity_for(num_tokens)

  def __repr__(self) -> str:
    return f"Ep{self.config}"

  def __reduce__(self) -> NoReturn:
    raise arguments.cannot_pickle(
      f'the layer "{self.name}"',
      "pickle the arguments of EpLayerConfig, and call it with a group there;"
      " of a handle, pickle jax.tree.leaves(handle), which are plain arrays,"
      " and give them to EpHandle with that layer",
    )

  def op_params(self, num_tokens: int) -> OpParams:
    """Returns the parameters of an op that is traced now.

    JAX's caches keep the parameters, so they do not keep the group open.
    """
    return OpParams(
      connection=self.group.connection,
      layer=self.config,
      num_tokens=num_tokens,
      tail=contexts.tail(self.tail),
      checked=contexts.is_checked(),
    )


def check_group(what: str, group: EpGroup) -> None:
  cure = "get one from ep_bootstrap"
  arguments.check_type(what, "group", group, EpGroup, cure)


def check_layer(op: str, layer: EpLayerConfig) -> None:
  cure = "make one of the group, EpLayerConfig(group, top_k=...)"
  arguments.check_type(op, "layer", layer, EpLayerConfig, cure)
