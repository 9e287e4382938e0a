# SPDX-License-Identifier: Apache-2.0
"""The configurations of a group and of a layer, without a connection.

`EpGroup` and `EpLayerConfig` (group.py) wrap them. An op's primitive has a
`LayerConfig` as parameter: JAX's caches keep parameters alive, and must not
keep a group open.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any, Self

import jax.numpy as jnp

from ep._src.base import arguments, arrays, quantizers
from ep._src.base.meshes import has_devices, Mesh, platform

_OVERFLOW = ("error", "drop", "chunk")
_DROP_BY = (None, "slot", "fair")
_ERRORS = ("raise", "flag")
_TAILS = ("zero", "unspecified")
WIRES = (None, *quantizers.FORMATS)
_DTYPES = ("float32", "bfloat16", "float16")

_OPTIONAL_SIZES = (
  "max_tokens_per_rank",
  "hidden_dim",
  "top_k",
  "recv_capacity_per_rank",
)

# The default of a field that `__post_init__` resolves. The field's annotation
# is the type of the resolved value.
_INHERITED: Any = None

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


class NotCopied:
  """A base class: `copy.copy` and `copy.deepcopy` return the object itself.

  A copy of a group could close the group, and would repeat its program names.
  Copies of the functions in a `MoEConfig` would not be equal.
  """

  def __copy__(self) -> Self:
    return self

  def __deepcopy__(self, memo: Any) -> Self:
    return self


@dataclasses.dataclass(frozen=True)
class GroupConfig:
  """The arguments of `ep_bootstrap`, with defaults resolved and checked."""

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

  def __post_init__(self) -> None:
    what = "ep_bootstrap"

    def resolve(field: str, value: Any) -> None:
      object.__setattr__(self, field, value)

    def check(condition: bool, message: str) -> None:
      arguments.check(condition, what, message)

    given = [f for f in _OPTIONAL_SIZES if getattr(self, f) is not None]
    for field in (*given, "num_experts", "max_num_sms"):
      resolve(field, arguments.integer(what, field, getattr(self, field)))
    resolve("alignment", arguments.alignment(what, self.alignment))
    for field in ("timeout_s", "exit_after_s"):
      resolve(field, arguments.seconds(what, field, getattr(self, field)))
    arguments.label(what, self.name)
    arguments.string(what, "axis_name", self.axis_name)
    resolve("data_axes", arguments.strings(what, "data_axes", self.data_axes))
    axis, names = self.axis_name, self.mesh.axis_names
    check(
      axis in names,
      f"axis_name = {axis!r}, but the mesh has the axes {names}; name one of"
      " them.",
    )
    others = tuple(a for a in names if a != axis)
    check(
      set(self.data_axes) <= set(others)
      and len(set(self.data_axes)) == len(self.data_axes),
      f"data_axes = {self.data_axes}, but they must be distinct axes of the"
      f" mesh other than {axis!r}: {others}.",
    )
    for field in ("num_experts", "max_tokens_per_rank", "hidden_dim"):
      value = getattr(self, field)
      is_valid = value is None or value > 0
      check(is_valid, f"{field} = {value}, but it must be positive.")
    check(
      self.max_num_sms >= 0,
      f"max_num_sms = {self.max_num_sms}, but it must be 0 (automatic) or a"
      " positive number of streaming multiprocessors.",
    )
    dtype = token_dtype(what, "max_token_dtype", self.max_token_dtype)
    resolve("max_token_dtype", dtype)
    if self.errors is None:
      is_flagged = has_devices(self.mesh) and platform(self.mesh) != "cpu"
      resolve("errors", "flag" if is_flagged else "raise")
    arguments.check_choices(
      what, self, overflow=_OVERFLOW, drop_by=_DROP_BY, errors=_ERRORS
    )

  @property
  def ep_size(self) -> int:
    """P: the number of ranks of an EP domain."""
    return int(self.mesh.shape[self.axis_name])

  @property
  def num_local_experts(self) -> int:
    """L: the number of expert slots of a rank; the last ones may be empty."""
    return -(-self.num_experts // self.ep_size)

  @property
  def num_expert_slots(self) -> int:
    """V = P * L: the number of expert slots of all ranks of an EP domain."""
    return self.ep_size * self.num_local_experts

  @property
  def token_axes(self) -> tuple[str, ...]:
    """The mesh axes that shard tokens: the data axes, then the EP axis."""
    return (*self.data_axes, self.axis_name)

  @property
  def num_token_ranks(self) -> int:
    """R: the number of ranks that hold distinct tokens."""
    return math.prod(self.mesh.shape[a] for a in self.token_axes)

  def __repr__(self) -> str:
    given = {f: getattr(self, f) for f in _OPTIONAL_SIZES}
    shown = {
      "name": self.name,
      "mesh": dict(self.mesh.shape),
      "axis_name": self.axis_name,
      "num_experts": self.num_experts,
      **{name: value for name, value in given.items() if value is not None},
      "backend": self.backend,
    }
    return short_repr("GroupConfig", shown)

  @property
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
    return {name: str(value) for name, value in vars(self).items()}


@dataclasses.dataclass(frozen=True)
class LayerConfig:
  """The arguments of `EpLayerConfig`, with defaults resolved and checked."""

  group: GroupConfig
  top_k: int = _INHERITED
  alignment: int = _INHERITED
  recv_capacity_per_rank: int | None = None
  capacity_factor: float | None = None
  capacity_multiple: int = 1
  overflow: str = _INHERITED
  drop_by: str | None = None
  tail: str = "zero"
  wire: str | None = None
  name: str = _INHERITED

  def __post_init__(self) -> None:
    group = self.group

    def resolve(field: str, value: Any) -> None:
      object.__setattr__(self, field, value)

    def check(condition: bool, message: str) -> None:
      arguments.check(condition, what, message)

    def inherit(field: str, default: Any) -> None:
      if getattr(self, field) is None:
        resolve(field, default)

    inherit("top_k", group.top_k)
    inherit("alignment", group.alignment)
    inherit("overflow", group.overflow)
    inherit("drop_by", group.drop_by)
    inherit("name", "moe")
    arguments.label("EpLayerConfig", self.name)
    what = f'EpLayerConfig(name="{self.name}")'
    check(
      self.top_k is not None,
      "neither the layer nor its group has a top_k; give the layer one, the"
      " choices of a token.",
    )
    if self.capacity_factor is not None:
      factor = arguments.capacity_factor(what, self.capacity_factor)
      resolve("capacity_factor", factor)
    for field in ("top_k", "recv_capacity_per_rank", "capacity_multiple"):
      value = getattr(self, field)
      if value is not None or field == "capacity_multiple":
        resolve(field, arguments.integer(what, field, value))
    resolve("alignment", arguments.alignment(what, self.alignment))
    check(
      1 <= self.top_k <= group.num_experts,
      f"top_k = {self.top_k}, but it must be in 1..num_experts ="
      f" {group.num_experts}.",
    )
    arguments.check_choices(
      what, self, overflow=_OVERFLOW, drop_by=_DROP_BY, tail=_TAILS, wire=WIRES
    )
    check(
      self.overflow == "drop" or self.drop_by in (None, "slot", group.drop_by),
      f"drop_by = {self.drop_by!r} has no effect, because overflow ="
      f' {self.overflow!r} drops nothing; pass overflow="drop" as well, or'
      ' drop_by="slot".',
    )
    # Without max_tokens_per_rank, check the sizes of an op with one token.
    most = 1 if group.max_tokens_per_rank is None else group.max_tokens_per_rank
    self.check_tokens(what, most)
    worst_case = self.worst_case(most)
    check(
      self.capacity_multiple > 0,
      f"capacity_multiple = {self.capacity_multiple}, but it must be a positive"
      " number of rows.",
    )
    inherit("recv_capacity_per_rank", self.default_capacity())
    # The least C: an aligned slab per local expert, at most the worst case.
    least = min(group.num_local_experts * self.alignment, worst_case)
    rows = self.capacity_for(most)
    check(
      rows >= least and rows % self.alignment == 0,
      f"recv_capacity_per_rank = {rows}, but it must be a multiple of"
      f" alignment = {self.alignment} and at least {least}, an aligned slab for"
      f" each of the {group.num_local_experts} local experts; raise it, or pass"
      " None for the worst case.",
    )

  def __repr__(self) -> str:
    """Shows the layer's and group's names, top_k, and values not inherited."""
    others = dataclasses.fields(LayerConfig)[1:-1]
    defaults = {f.name: getattr(self.group, f.name, f.default) for f in others}
    values = {name: getattr(self, name) for name in defaults}
    shown = {
      name: value
      for name, value in values.items()
      if name == "top_k" or value != defaults[name]
    }
    shown = {"name": self.name, "group": self.group.name, **shown}
    return short_repr("LayerConfig", shown)

  @property
  def capacity(self) -> int:
    """C: the number of receive rows of a rank, if it is the same for all ops.

    Raises:
      ValueError: C depends on the tokens of an op; see `capacity_for`.
    """
    arguments.check(
      self.recv_capacity_per_rank is not None,
      f'EpLayerConfig(name="{self.name}")',
      "the capacity follows the tokens of each op, because neither the layer"
      " has a recv_capacity_per_rank nor its group a max_tokens_per_rank; take"
      " handle.capacity or layer.capacity_for(num_tokens).",
    )
    return self.capacity_for(0)

  def capacity_for(self, num_tokens: int) -> int:
    """Returns C for T = `num_tokens`; see `EpLayerConfig.capacity_for`."""
    what = f'EpLayerConfig(name="{self.name}").capacity_for'
    num_tokens = arguments.integer(what, "num_tokens", num_tokens)
    arguments.check(
      num_tokens >= 0,
      what,
      f"num_tokens = {num_tokens}, but a rank has 0 tokens or more.",
    )
    if self.recv_capacity_per_rank is not None:
      return self.recv_capacity_per_rank
    return self.rows_for(max(num_tokens, 1))

  def default_capacity(self) -> int | None:
    """Returns the C of a layer without one; None if it follows the tokens."""
    group = self.group
    most, rows = group.max_tokens_per_rank, group.recv_capacity_per_rank
    if most is None and (rows is None or self.capacity_factor is not None):
      return None
    return self.rows_for(most or 1)

  def rows_for(self, num_tokens: int) -> int:
    """Returns C for T > 0 tokens if the layer has no fixed capacity."""
    rows = self.group.recv_capacity_per_rank
    if rows is None:
      rows = self.worst_case(num_tokens)
    if self.capacity_factor is not None:
      even = min(self.capacity_factor * num_tokens * self.top_k, rows)
      slabs = max(math.ceil(even / self.alignment), self.num_local_experts)
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
    most = self.group.max_tokens_per_rank
    arguments.check(
      most is None or num_tokens <= most,
      what,
      f"{num_tokens} tokens on a rank, but max_tokens_per_rank = {most}; raise"
      " it with ep_resize, or split the tokens.",
    )
    # The native libraries check the same bound: ValidateDims in plan.cc.
    rows = (
      self.ep_size * num_tokens * self.top_k
      + self.num_local_experts * self.alignment
    )
    arguments.check(
      rows <= arguments.INT32_MAX,
      what,
      f"an exchange may have {rows} rows (ep_size = {self.ep_size} times"
      f" {num_tokens} tokens of a rank times top_k = {self.top_k}, and an"
      f" alignment = {self.alignment} for each of the"
      f" {self.num_local_experts} local experts), but they are counted in 32"
      " bits; lower one of these, and split the tokens into several ops.",
    )

  @property
  def drops_fairly(self) -> bool:
    """Whether an `ep_prepare` with weights drops choices by "fair"."""
    return self.overflow == "drop" and self.drop_by != "slot"

  @property
  def ep_size(self) -> int:
    return self.group.ep_size

  @property
  def num_local_experts(self) -> int:
    return self.group.num_local_experts

  @property
  def fingerprint(self) -> int:
    """A 63-bit hash of layer and group; equal on all processes."""
    own = {n: str(v) for n, v in vars(self).items() if n != "group"}
    digest = hashlib.sha256(repr(self.group.texts() | own).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1

  def worst_case(self, num_tokens: int) -> int:
    """Returns the least capacity for any routing of T = `num_tokens` tokens."""
    local = self.num_local_experts
    tokens = self.ep_size * num_tokens
    rows = tokens * min(self.top_k, local) + local * (self.alignment - 1)
    return -(-rows // self.alignment) * self.alignment


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


def short_repr(name: str, values: dict[str, Any]) -> str:
  fields = ", ".join(f"{name}={value!r}" for name, value in values.items())
  return f"{name}({fields})"
