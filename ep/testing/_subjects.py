# SPDX-License-Identifier: Apache-2.0
"""Defines the subjects of the kit, and what they declare of themselves.

`T` tokens of a rank, `K` choices of a token, `E` experts, `P` ranks,
`L = E / P` local experts (expert `e` lives on rank `e // L`), `C` receive
capacity of a rank in rows, `H` hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import numbers
from typing import Any, get_args, Literal, NamedTuple

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Tolerance:
  """How far a sum may be from the oracle's.

  The contract adds up in float32, in ascending `k`, and rounds once. Code that
  adds in another order, or in steps, rounds otherwise. The kit counts one
  rounding for each of the `K` terms, for each of the ranks that may hold a
  partial sum, at most `K` of the `P`, and for the result, so a value may be off
  by `ulps * (K + min(P, K) + 1)` units. A unit is the machine epsilon of the
  tokens' dtype times the sum of the magnitudes of the terms or, for a `Layer`,
  whose terms the kit does not know, times the largest magnitude of the array. A
  limit of a tenth of that or more would accept nearly anything, so it is
  refused.

  Attributes:
    ulps: units for each rounding; 0 demands the oracle's bits.
  """

  ulps: float

  def __post_init__(self) -> None:
    if not isinstance(self.ulps, numbers.Real) or not self.ulps >= 0:
      raise TypeError(
        f"ulps={self.ulps!r} of a Tolerance has to be a number from 0 on."
      )

  def limit(self, setting: Setting) -> float:
    """Returns how many units a value may be off; 0 demands its bits.

    Raises:
      ValueError: they are too many for the dtype.
    """
    partial_sums = min(setting.top_k, setting.ep_size)
    limit = self.ulps * (setting.top_k + partial_sums + 1)
    relative = limit * float(jax.numpy.finfo(setting.dtype).eps)
    if relative >= 0.1:
      raise ValueError(
        f"{self} accepts errors of {relative:.0%} with {setting.dtype}; declare"
        " fewer ulps, or leave out that dtype."
      )
    return limit


@dataclasses.dataclass(frozen=True)
class Setting:
  """The sizes that a subject is built for, before it sees a routing.

  Attributes:
    mesh: one axis, "ep", with the P devices.
    num_experts: E, a multiple of P.
    top_k: K.
    tokens: T.
    hidden: H.
    capacity: C, a multiple of the alignment. Except in the rule `overflow`,
      every routing fits.
    alignment: rows to a multiple of which each slab is padded.
    dtype: the dtype of the tokens, and of the parameters of a layer.
  """

  mesh: jax.sharding.Mesh
  num_experts: int
  top_k: int
  tokens: int
  hidden: int
  capacity: int
  alignment: int
  dtype: np.dtype[Any]

  @property
  def ep_size(self) -> int:
    """P."""
    return self.mesh.size

  @property
  def num_local_experts(self) -> int:
    """L."""
    return self.num_experts // self.ep_size


class Received(NamedTuple):
  """The result of a transport's dispatch on one rank.

  Attributes:
    rows: `[C, H]` in the dtype of the tokens. The slabs of the rank's experts
      follow each other, in the order of the experts. A slab has a row for each
      choice of its expert, and then the rows that pad it.
    weights: float32 `[C]`, the weight of each row's choice.
    group_sizes: int32 `[L]`, rows of each slab below C, padding included.
    state: a pytree that `combine` needs.
    scales: `[C, S]`, the scales of each row, if `dispatch` got scales.
  """

  rows: jax.Array
  weights: jax.Array
  group_sizes: jax.Array
  state: Any
  scales: jax.Array | None = None


# dispatch(tokens [T, H], topk_idx [T, K], topk_weights [T, K]) -> Received, and
# with scales=True also dispatch(..., scales [T, S])
Dispatch = Callable[..., Received]
# combine(rows [C, H], state) -> tokens [T, H]
Combine = Callable[[jax.Array, Any], jax.Array]
# apply(params, tokens [P * T, H], topk_idx [P * T, K], topk_weights [P * T, K])
#   -> tokens [P * T, H]
Apply = Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]
# expert(params, e, rows [n, H]) -> rows [n, H]
Expert = Callable[[Any, int, jax.Array], jax.Array]
Order = Literal["source", "any"]
Tail = Literal["zero", "unspecified"]
Overflow = Literal["drop", "error", None]

# By the annotation of a field: its allowed values, or its type and the words
# for an error.
_LITERALS = {
  name: get_args(kind)
  for name, kind in dict(Order=Order, Tail=Tail, Overflow=Overflow).items()
}
_TYPES: dict[str, tuple[Any, str]] = {
  "str": (str, "a string"),
  "str | None": (str, "a string or None"),
  "bool": (bool, "True or False"),
  "float": (numbers.Real, "a number"),
  "Tolerance": (Tolerance, "an ep.testing.Tolerance"),
  "Callable": (Callable, "a function"),
  "Expert": (Callable, "a function"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
  """A subject that declares only what any can; other rules are not run.

  Attributes:
    name: the name in reports.
    location: where ranks that the kit starts import the subject, as
      "package.module:name"; None leaves out the rules that start ranks.
    dtypes: the dtypes of tokens.
    alignments: the alignments that `build` supports. Padding is zero.
    tolerance: the tolerance of sums. Rows that are moved have the bits of their
      tokens.
    supports: returns whether `build` supports the sizes of a `Setting`; None
      stands for all. The kit draws sizes until it finds supported ones.
    repeatable: whether the same inputs give the same tokens and gradients each
      time, bit for bit. Rows may come in another order, with `order="any"`.
    gradients: whether reverse mode works.
    second_order: whether reverse mode works for the gradients, too.
    jvp: whether forward mode works.
    reports_death: whether an op fails if a process has died.
    reports_disagreement: whether an op, or building the subject, fails on every
      process if one of them uses another hidden size.
    limit_s: seconds within which an error that is reported has to come.
  """

  name: str
  location: str | None = None
  dtypes: tuple[str, ...] = ("float32",)
  alignments: tuple[int, ...] = (1,)
  tolerance: Tolerance = Tolerance(0)
  supports: Callable[[Setting], bool] | None = None
  repeatable: bool = True
  gradients: bool = False
  second_order: bool = False
  jvp: bool = False
  reports_death: bool = False
  reports_disagreement: bool = False
  limit_s: float = 30.0

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      given = f"{field.name}={value!r} of {self.name!r}"
      annotation = str(field.type).partition("[")[0]
      if value is None and str(field.type).endswith("| None"):
        continue
      if annotation in _LITERALS and value not in _LITERALS[annotation]:
        raise ValueError(
          f"{given} is unknown; declare one of {_LITERALS[annotation]}."
        )
      kind, words = _TYPES.get(annotation, (object, ""))
      if not isinstance(value, kind):
        raise TypeError(f"{given} has to be {words}.")
      if annotation == "tuple" and not (isinstance(value, tuple) and value):
        raise ValueError(
          f"{given} has to be a tuple with at least one element; write"
          f" {field.name}=({value or '...'!r},)."
        )
    if not all(isinstance(x, int) and x > 0 for x in self.alignments):
      raise ValueError(
        f"alignments={self.alignments!r} of {self.name!r} has to have whole"
        " numbers from 1 on; 1 stands for slabs without padding."
      )
    for dtype in self.dtypes:
      if not hasattr(jax.numpy, str(dtype)) or not jax.numpy.issubdtype(
        dtype, jax.numpy.floating
      ):
        raise ValueError(
          f"dtypes={self.dtypes!r} of {self.name!r} has {dtype!r}, which is no"
          ' name of a floating-point dtype; write names such as "bfloat16".'
        )
    module, _, name = (self.location or "module:name").partition(":")
    if not module or not name:
      raise ValueError(
        f"location={self.location!r} of {self.name!r} does not name the subject"
        ' in its module; write it as "package.module:name".'
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transport(Subject):
  """A pair of dispatch and combine, and what it declares.

  Attributes:
    build: returns `(dispatch, combine)` for a setting. Both are functions of
      one rank's arrays, inside `jax.shard_map` over the mesh of the setting:
      `dispatch(tokens, topk_idx, topk_weights)` returns a `Received`, and
      `combine(rows, state)` returns the sum of each token's rows, `[T, H]` in
      their dtype. A choice of -1 is unused. The kit builds a setting once.
    order: "source" if the rows of a slab ascend by source rank, then by source
      token; "any" if their order is not specified.
    tail: "zero" if the rows and weights past the last slab are zero.
    overflow: "error" if an op fails when a rank needs more rows than C; "drop"
      if the rows from C on are left out of each slab, hence the last experts
      lose theirs, with zero as their part of sums and gradients; None if the
      capacity always has to suffice.
    special_values: whether the bits of NaNs, infinities, zeros of both signs
      and denormal numbers arrive unchanged, and sums treat them as the contract
      says: a zero is +0, and denormal float32 numbers are zeros.
    scales: whether `dispatch(tokens, topk_idx, topk_weights, scales)` takes
      tokens of any type of one byte, with scales `[T, S]` of float32, bfloat16
      or float8_e8m0fnu, and brings both bit for bit, NaNs included. Rows
      without a token have scales of zero.
  """

  build: Callable[[Setting], tuple[Dispatch, Combine]]
  order: Order = "source"
  tail: Tail = "unspecified"
  overflow: Overflow = None
  special_values: bool = False
  scales: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer(Subject):
  """A MoE layer with its parameters, and what it declares.

  Attributes:
    build: returns `(apply, params)` for a setting. `apply(params, tokens,
      topk_idx, topk_weights)` is a function of global arrays, whose leading
      axis is split over the mesh; it returns tokens. `params` is a pytree of
      arrays, equal on every process.
    expert: returns the rows that expert `e` makes of any rows `[n, H]`, as
      `expert(params, e, rows)`. The kit calls it with float32 arrays on one
      device. A token's result is the sum of these for its choices, each times
      its weight.
  """

  build: Callable[[Setting], tuple[Apply, Any]]
  expert: Expert
  tolerance: Tolerance = Tolerance(1)
