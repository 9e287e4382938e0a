# SPDX-License-Identifier: Apache-2.0
"""EpGroup and EpLayerConfig: what is fixed before a program is traced."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any, NoReturn, TypeVar

from ep._src.base import arguments, checked, tracing
from ep._src.base.backend import Connection, GroupMemory, OpParams
from ep._src.base.config import GroupConfig, LayerConfig
from ep._src.group import ending

_Config = TypeVar("_Config", GroupConfig, LayerConfig)


@dataclasses.dataclass(frozen=True, repr=False)
class EpGroup(GroupConfig):
  """The EP domains of a mesh and their communicators. Made by `ep_bootstrap`.

  Frozen and hashable, so programs may close over it. A context manager that
  waits for all programs that this process has launched, for at most
  `timeout_s`, and calls `ep_finalize`. An exception closes the group at once.

  The attributes are the arguments of `ep_bootstrap`, with defaults resolved.
  """

  connection: Connection

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
        ending.wait_for_programs("the end of `with group`", [self])
    finally:
      self.connection.finalize()


@dataclasses.dataclass(frozen=True, repr=False)
class EpLayerConfig(LayerConfig):
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

  def __post_init__(self) -> None:
    if not isinstance(self.group, EpGroup):
      raise TypeError(
        f"EpLayerConfig: group is a {type(self.group).__name__}, but an EpGroup"
        " is expected; get one from ep_bootstrap."
      )
    super().__post_init__()

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

  @functools.cached_property
  def unowned(self) -> EpLayerConfig:
    """An equal layer that does not keep the group open."""
    return dataclasses.replace(self, group=dataclasses.replace(self.group))

  @functools.cached_property
  def _frozen(self) -> LayerConfig:
    """The values of layer and group, which do not keep the group open."""
    return _values(LayerConfig, self, group=_values(GroupConfig, self.group))

  def op_params(self, num_tokens: int) -> OpParams:
    """Returns the parameters of an op that is traced now.

    They do not refer to the group, and so do not keep it open.
    """
    return OpParams(
      connection=self.group.connection,
      layer=self._frozen,
      num_tokens=num_tokens,
      drop=self.overflow != "error",
      tail=checked.tail(self.tail),
      checked=checked.is_on(),
      in_trace=tracing.is_on(),
    )


def check_layer(op: str, layer: EpLayerConfig) -> None:
  """Raises `TypeError` unless `layer` is an EpLayerConfig."""
  if not isinstance(layer, EpLayerConfig):
    raise TypeError(
      f"{op}: layer is a {type(layer).__name__}, but an EpLayerConfig is"
      " expected; make one of the group, EpLayerConfig(group, top_k=...)."
    )


def _values(cls: type[_Config], source: _Config, **changes: Any) -> _Config:
  """Returns the fields that `source` inherits from `cls`, as a `cls`."""
  fields = dataclasses.fields(cls)
  values = {field.name: getattr(source, field.name) for field in fields}
  return cls(**values | changes)
