# SPDX-License-Identifier: Apache-2.0
"""Declares the properties of the transport, layer or matmul under test.

`T` tokens of a rank, `K` choices of a token, `E` experts, `P` ranks,
`L = ceil(E / P)` local experts (rank `e // L` owns expert `e`), `C` receive
capacity of a rank in rows, `H` hidden size. A grouped matmul is the matmul of
one rank: `C` rows of `F` columns, `L` groups, results of `G` columns.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import (
  Any,
  get_args,
  get_origin,
  get_type_hints,
  Literal,
  NamedTuple,
)

import jax
import numpy as np

from ep._src.base import arguments


@dataclasses.dataclass(frozen=True)
class Tolerance:
  """The allowed error of a sum.

  The contract sums in float32, in ascending `k`, and rounds once. Code that
  sums in another order, or in steps, rounds differently. The kit allows one
  rounding for each of the `K` terms, for each rank that may have a partial sum
  (at most `K` of the `P` ranks), and for the result: an error of at most
  `ulps * (K + min(P, K) + 1)` units. A unit is the machine epsilon of the
  tokens' dtype times the sum of the magnitudes of the terms. For a `Layer`,
  whose terms the kit does not know, it is the epsilon times the largest
  magnitude of the array. For a `GroupedMatmul`, K and P are 1, and the terms
  are the products of a sum. The kit refuses a tolerance that allows an error of
  a tenth of these magnitudes or more.

  Attributes:
    ulps: units for each rounding; 0 demands the oracle's bits.
  """

  ulps: float

  def limit(self, setting: Setting) -> float:
    """Returns the largest allowed error in units; 0 demands equal bits.

    Raises:
      ValueError: the tolerance is too large for the dtype.
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
  """The sizes for which `build` makes a transport or layer.

  Attributes:
    mesh: a mesh with one axis, "ep", of P devices.
    num_experts: E, a multiple of P unless the transport is `uneven`.
    top_k: K.
    tokens: T.
    hidden: H.
    capacity: C, a multiple of the alignment. Every routing fits, except in the
      rule `overflow`.
    alignment: each expert segment is padded to a multiple of this.
    dtype: dtype of the tokens, and of the parameters of a layer.
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
    """The number of ranks, P."""
    return self.mesh.size

  @property
  def num_local_experts(self) -> int:
    """The number of experts of a rank, L; the last ranks may have fewer."""
    return -(-self.num_experts // self.ep_size)


class Received(NamedTuple):
  """The result of a transport's dispatch on one rank.

  Attributes:
    rows: `[C, H]` in the dtype of the tokens. They consist of a segment for
      each of the rank's experts, in the order of the experts, and the tail. A
      segment has a row for each choice of its expert, followed by padding.
    weights: float32 `[C]`, the weight of each row's choice.
    group_sizes: int32 `[L]`, rows of each segment below C, padding included.
    state: a pytree for `combine`.
    scales: `[C, S]`, the scales of each row, if `dispatch` got scales.
    counts: further results that the rules compare, by the names of the fields
      of `ep.EpHandle`: int32 `token_counts` and `dropped_counts` `[L]`,
      `total_recv_tokens` and `max_recv_tokens` `[1]`, bool `kept` `[T, K]`.
  """

  rows: jax.Array
  weights: jax.Array
  group_sizes: jax.Array
  state: Any
  scales: jax.Array | None = None
  counts: dict[str, jax.Array] | None = None


Dispatch = Callable[..., Received]
Combine = Callable[..., jax.Array]
Tail = Literal["zero", "unspecified"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
  """The properties that everything under test can declare.

  A rule for a property runs only if the property is declared.

  Attributes:
    name: the name in reports.
    dtypes: dtypes of tokens.
    alignments: alignments that `build` supports. Padding is zero.
    tolerance: the tolerance of sums. Rows always have the bits of their tokens.
    supports: returns whether `build` supports a `Setting`; None means that it
      supports all. The kit draws sizes until it finds supported ones.
    repeatable: whether equal inputs give equal bits of tokens and gradients in
      each run. With `order="any"`, the order of rows may differ.
    gradients: whether reverse mode works.
    second_order: whether reverse mode of the gradients works.
    jvp: whether forward mode works.
  """

  name: str
  dtypes: tuple[str, ...] = ("float32",)
  alignments: tuple[int, ...] = (1,)
  tolerance: Tolerance = Tolerance(0)
  supports: Callable[[Setting], bool] | None = None
  repeatable: bool = True
  gradients: bool = False
  second_order: bool = False
  jvp: bool = False

  def __post_init__(self) -> None:
    for name, kind in get_type_hints(type(self)).items():
      value = getattr(self, name)
      if get_origin(kind) is Literal:
        arguments.one_of(*get_args(kind))(self.name, name, value)
      if get_origin(kind) is tuple and not (isinstance(value, tuple) and value):
        raise ValueError(
          f"{self.name}: {name} = {value!r}, but it must be a tuple with at"
          f" least one element; write {name}=({value or '...'!r},)."
        )
    for alignment in self.alignments:
      arguments.at_least(1)(self.name, "alignments", alignment)
    for dtype in self.dtypes:
      if not hasattr(jax.numpy, str(dtype)) or not jax.numpy.issubdtype(
        dtype, jax.numpy.floating
      ):
        raise ValueError(
          f"{self.name}: dtypes = {self.dtypes!r} has {dtype!r}, which is no"
          ' name of a floating-point dtype; write names such as "bfloat16".'
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transport(Subject):
  """A pair of dispatch and combine, and its properties.

  Attributes:
    build: returns `(dispatch, combine)` for a setting. Both are functions of
      one rank's arrays, inside `jax.shard_map` over the mesh of the setting:
      `dispatch(tokens [T, H], topk_idx [T, K], topk_weights [T, K])` returns a
      `Received`, and `combine(rows [C, H], state)` returns the sum of each
      token's rows, `[T, H]` in their dtype. A choice of -1 is unused. The kit
      calls `build` once for each setting.
    view: "local" as above; "global" if both are functions of the arrays of all
      ranks, concatenated along the leading axis, outside of `jax.shard_map`.
    uneven: whether E may be no multiple of P. The last ranks have fewer
      experts, whose missing segments are empty.
    weighted: whether `combine(rows, state, weights)` multiplies rows by weights
      `[C]` in float32. The experts of the kit then do not.
    order: "source" if the rows of a segment ascend by source rank, then by
      source token; "any" if their order is not specified.
    tail: "zero" if the rows and weights after the last segment are zero.
    overflow: "error" if an op fails when a rank needs more than C rows; "drop"
      if it drops the rows from C on, whose terms of sums and gradients are
      zero; None if every routing must fit.
    drop_by: "slot" if rows from C on are dropped; "fair" if weights decide, as
      with `ep.EpLayerConfig(drop_by="fair")`.
    special_values: whether NaNs, infinities, zeros of both signs and denormal
      numbers keep their bits, and sums follow the contract: a zero is +0, and
      denormal float32 numbers are zeros.
    scales: whether `dispatch(tokens, topk_idx, topk_weights, scales)` takes fp8
      and int8 tokens with scales `[T, S]` of float32, bfloat16 or
      float8_e8m0fnu, and keeps the bits of both, NaNs included. Rows without a
      token have scales of zero.
  """

  build: Callable[[Setting], tuple[Dispatch, Combine]]
  view: Literal["local", "global"] = "local"
  uneven: bool = False
  weighted: bool = False
  order: Literal["source", "any"] = "source"
  tail: Tail = "unspecified"
  overflow: Literal["drop", "error", None] = None
  drop_by: Literal["slot", "fair"] = "slot"
  special_values: bool = False
  scales: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer(Subject):
  """A MoE layer with its parameters, and its properties.

  Attributes:
    build: returns `(apply, params)` for a setting. `apply(params, tokens,
      topk_idx, topk_weights)` is a function of global arrays, whose leading
      axis is split over the mesh; it returns tokens. `params` is a pytree of
      arrays, equal on every process.
    expert: `expert(params, e, rows)` applies expert `e` to any rows `[n, H]`.
      The kit calls it with float64 arrays on one device. The result of a token
      is the weighted sum of its experts' outputs.
  """

  build: Callable[[Setting], tuple[Callable[..., jax.Array], Any]]
  expert: Callable[[Any, int, jax.Array], jax.Array]
  tolerance: Tolerance = Tolerance(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedMatmul(Subject):
  """A function such as `jax.lax.ragged_dot`, and its properties.

      check(GroupedMatmul(name="mine", matmul=mine, gradients=True))

  Attributes:
    matmul: `matmul(rows [C, F], matrices [L, F, G], group_sizes [L])` returns
      `[C, G]`: `rows[r] @ matrices[j]` for every row r of group j. Group j is
      the `group_sizes[j]` rows after groups 0 to j - 1. Rows and matrices have
      one of `dtypes`; group sizes are int32, from 0 on, and their sum is at
      most C. Rows after the last group may have any values, NaN included, and
      must not be read. The kit calls the function in jitted programs of one
      device, and differentiates it in rows and matrices.
    result_dtype: dtype of results; None means the dtype of the rows. Gradients
      always have the dtypes of rows and matrices. Sums are float32 and round
      once to these dtypes.
    multiples: C, F and G are multiples of these numbers.
    tail: "zero" if rows after the last group are zero, in results, gradients
      and tangents.
    dtypes: dtypes of rows and matrices. Each drawn size has one of them.
    alignments: group sizes are multiples of one of these.
    tolerance: the tolerance of sums. Sums of whole numbers up to 2**24 are
      exact in float32, so no tolerance applies to these.
    supports: returns whether to draw a `Setting`, which has C as `capacity`, F
      as `hidden` and L as `num_experts`, before C and F are rounded up.
  """

  matmul: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
  result_dtype: str | None = None
  multiples: tuple[int, int, int] = (1, 1, 1)
  tail: Tail = "unspecified"
  tolerance: Tolerance = Tolerance(1)
