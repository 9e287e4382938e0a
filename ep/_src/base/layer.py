# SPDX-License-Identifier: Apache-2.0
"""EpLayerConfig: the configuration of one MoE layer of a group."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any, NoReturn

from ep._src.base import arguments, contexts
from ep._src.base.group import (
  check_group,
  DROP_BY,
  EpGroup,
  NotCopied,
  OVERFLOW,
  Sizes,
  worst_case,
)

# The formats of ops/quantizers.py, whose index is an attribute of native ops.
WIRES = (None, "fp8_block128", "mxfp8")

_CHECKS: dict[str, arguments.Check] = {
  "capacity_factor": arguments.optional(arguments.capacity_factor),
  "top_k": arguments.optional(arguments.integer),
  "recv_capacity_per_rank": arguments.optional(arguments.integer),
  "capacity_multiple": arguments.at_least(1, "a positive number of rows"),
  "alignment": arguments.alignment,
  "overflow": arguments.one_of(*OVERFLOW),
  "drop_by": arguments.one_of(*DROP_BY),
  "tail": arguments.one_of("zero", "unspecified"),
  "wire": arguments.one_of(*WIRES),
}

# The fields that a layer inherits from its group if they are None.
_INHERITED = ("top_k", "alignment", "overflow", "drop_by")


@dataclasses.dataclass(frozen=True)
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

  group: EpGroup = dataclasses.field(repr=False)
  # These are Any, because they are None until `__post_init__` inherits a value.
  top_k: Any = None
  alignment: Any = None
  recv_capacity_per_rank: int | None = dataclasses.field(
    default=None, compare=False
  )
  capacity_factor: float | None = None
  capacity_multiple: int = 1
  overflow: Any = None
  drop_by: str | None = None
  tail: str = "zero"
  wire: str | None = None
  name: str = "moe"
  # A 63-bit hash of layer and group, equal on all processes.
  fingerprint: int = dataclasses.field(init=False, repr=False, compare=False)
  # C if it is the same for all ops, else None.
  _fixed: int | None = dataclasses.field(init=False, repr=False)
  _known: dict[Any, Sizes] = dataclasses.field(
    init=False, repr=False, compare=False
  )

  def __post_init__(self) -> None:
    check_group("EpLayerConfig", self.group)
    for field in _INHERITED:
      if getattr(self, field) is None:
        object.__setattr__(self, field, getattr(self.group, field))
    label = arguments.label("EpLayerConfig", "name", self.name)
    what = f'EpLayerConfig(name="{label}")'
    arguments.resolve(what, self, _CHECKS)
    self._check_choices(what)
    self._set_capacity(what)
    names = (f.name for f in dataclasses.fields(self) if f.compare)
    values = [getattr(self, name) for name in names]
    digest = hashlib.sha256(repr(values).encode()).digest()
    fingerprint = int.from_bytes(digest[:8], "little") >> 1
    vars(self).update(fingerprint=fingerprint, _known={})

  def _check_choices(self, what: str) -> None:
    group = self.group
    arguments.check(
      self.top_k is not None,
      what,
      "neither the layer nor its group has a top_k; give the layer one, the"
      " choices of a token.",
    )
    arguments.check(
      1 <= self.top_k <= group.num_experts,
      what,
      f"top_k = {self.top_k}, but it must be in 1..num_experts ="
      f" {group.num_experts}.",
    )
    arguments.check(
      self.overflow == "drop" or self.drop_by in (None, "slot", group.drop_by),
      what,
      f"drop_by = {self.drop_by!r} has no effect, because overflow ="
      f' {self.overflow!r} drops nothing; pass overflow="drop" as well, or'
      ' drop_by="slot".',
    )

  def _set_capacity(self, what: str) -> None:
    group, fixed = self.group, self.recv_capacity_per_rank
    # Without max_tokens_per_rank, check the sizes of an op with one token.
    most = group.max_tokens_per_rank or 1
    self.check_tokens(what, most)
    rows = self.rows_for(most) if fixed is None else fixed
    if group.max_tokens_per_rank is not None or (
      group.recv_capacity_per_rank is not None and self.capacity_factor is None
    ):
      fixed = rows
    object.__setattr__(self, "_fixed", fixed)
    # The least C: an aligned slab per local expert, at most the worst case.
    least = self.group.num_local_experts * self.alignment
    worst = worst_case(group, most, self.top_k, self.alignment)
    least = min(least, worst)
    arguments.check(
      rows >= least and rows % self.alignment == 0,
      what,
      f"recv_capacity_per_rank = {rows}, but it must be a multiple of"
      f" alignment = {self.alignment} and at least {least}, an aligned slab for"
      f" each of the {self.group.num_local_experts} local experts; raise it, or"
      " pass None for the worst case.",
    )

  def __reduce__(self) -> NoReturn:
    raise arguments.cannot_pickle(
      f'the layer "{self.name}"',
      "pickle the arguments of EpLayerConfig, and call it with a group there;"
      " of a handle, pickle jax.tree.leaves(handle), which are plain arrays,"
      " and give them to EpHandle with that layer",
    )

  @property
  def capacity(self) -> int:
    """C: the number of receive rows of a rank, if it is the same for all ops.

    Raises:
      ValueError: C depends on the tokens of an op; see `capacity_for`.
    """
    arguments.check(
      self._fixed is not None,
      f'EpLayerConfig(name="{self.name}")',
      "the capacity follows the tokens of each op, because neither the layer"
      " has a recv_capacity_per_rank nor its group a max_tokens_per_rank; take"
      " handle.capacity or layer.capacity_for(num_tokens).",
    )
    return self.capacity_for(0)

  def capacity_for(self, num_tokens: int) -> int:
    """Returns C: rows that a rank can receive if T = `num_tokens`.

    C is the same for all T if the layer has a capacity or the group has a
    limit of tokens. Otherwise T = 0 has the capacity of T = 1.

    Raises:
      ValueError: `num_tokens` is negative, or C does not fit into 32 bits.
      TypeError: `num_tokens` is no integer.
    """
    what = f'EpLayerConfig(name="{self.name}").capacity_for'
    num_tokens = arguments.integer(what, "num_tokens", num_tokens)
    arguments.check(
      num_tokens >= 0,
      what,
      f"num_tokens = {num_tokens}, but a rank has 0 tokens or more.",
    )
    if self._fixed is not None:
      return self._fixed
    self.check_tokens(what, num_tokens)
    return self.rows_for(max(num_tokens, 1))

  def rows_for(self, num_tokens: int) -> int:
    """Returns C for T > 0 tokens if the layer has no fixed capacity."""
    rows = self.group.recv_capacity_per_rank
    if rows is None:
      rows = worst_case(self.group, num_tokens, self.top_k, self.alignment)
    if self.capacity_factor is not None:
      even = min(self.capacity_factor * num_tokens * self.top_k, rows)
      slabs = max(
        math.ceil(even / self.alignment), self.group.num_local_experts
      )
      rows = min(slabs, rows // self.alignment) * self.alignment
    if self.capacity_multiple > 1:
      unit = math.lcm(self.capacity_multiple, self.alignment)
      rows = -(-rows // unit) * unit
    arguments.check(
      rows <= arguments.INT32_MAX,
      f'EpLayerConfig(name="{self.name}")',
      f"{num_tokens} tokens of a rank need a capacity of {rows} rows"
      f" (alignment = {self.alignment}, capacity_multiple ="
      f" {self.capacity_multiple}), but rows are counted in 32 bits; lower one"
      " of these.",
    )
    return rows

  def check_tokens(self, what: str, num_tokens: int) -> None:
    """Raises `ValueError` if an op with T = `num_tokens` is too large."""
    most, P = self.group.max_tokens_per_rank, self.group.ep_size
    L = self.group.num_local_experts
    arguments.check(
      most is None or num_tokens <= most,
      what,
      f"{num_tokens} tokens on a rank, but max_tokens_per_rank = {most}; raise"
      " it with ep_resize, or split the tokens.",
    )
    # The native libraries check the same bound: ValidateDims in plan.cc.
    rows = P * num_tokens * self.top_k + L * self.alignment
    arguments.check(
      rows <= arguments.INT32_MAX,
      what,
      f"an exchange may have {rows} rows (ep_size = {P} times"
      f" {num_tokens} tokens of a rank times top_k = {self.top_k}, and an"
      f" alignment = {self.alignment} for each of the {L} local"
      " experts), but they are counted in 32 bits; lower one of these, and"
      " split the tokens into several ops.",
    )

  def sizes(self, num_tokens: int, tail: str | None = None) -> Sizes:
    """Returns the parameter of an op that is traced now.

    Args:
      num_tokens: T.
      tail: replaces the `tail` of the layer.

    Raises:
      ValueError: `num_tokens` is too large.
    """
    checked = contexts.is_checked()
    key = num_tokens, contexts.tail(tail or self.tail), checked
    if key in self._known:
      return self._known[key]
    connection = self.group.connection
    group = connection.group
    self._known[key] = Sizes(
      connection=connection,
      group=group,
      name=self.name,
      T=num_tokens,
      K=self.top_k,
      E=group.num_experts,
      P=group.ep_size,
      L=group.num_local_experts,
      V=group.num_expert_slots,
      C=self._fixed or self.rows_for(max(num_tokens, 1)),
      alignment=self.alignment,
      overflow=self.overflow,
      fair=self.overflow == "drop" and self.drop_by != "slot",
      tail=key[1],
      wire=self.wire,
      checked=checked,
      raises=checked or group.errors == "raise",
      fingerprint=self.fingerprint,
    )
    return self._known[key]


def check_layer(op: str, layer: EpLayerConfig) -> None:
  cure = "make one of the group, EpLayerConfig(group, top_k=...)"
  arguments.check_type(op, "layer", layer, EpLayerConfig, cure)
