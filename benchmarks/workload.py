# SPDX-License-Identifier: Apache-2.0
"""The workload: a shape, a routing, and the inputs of every op.

The **payload** of one direction is, in bytes, the number of rows that dispatch
delivers on all ranks together, times H, times the bytes of an element. A row
counts wherever it comes from, even from its own rank, and once for each expert
that it is sent to. Weights, routing, padding and tails do not count. The
payload is the same for every contender, whatever that contender really moves,
and the same for combine as for dispatch. A round trip carries it twice.
"""

from __future__ import annotations

from collections.abc import Collection
import dataclasses
import functools
import re

import jax
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from benchmarks import routings

AXIS = "ep"
SPEC = PartitionSpec(AXIS)


@dataclasses.dataclass(frozen=True)
class Shape:
  """T tokens of a rank, hidden size H, K choices of a token, E experts."""

  tokens: int
  hidden: int
  top_k: int
  num_experts: int

  def __str__(self) -> str:
    return f"{self.tokens}x{self.hidden}x{self.top_k}x{self.num_experts}"


PRESETS = {
  "goals": (
    Shape(1024, 1024, 2, 16),
    Shape(1024, 2048, 8, 64),
    Shape(4096, 1024, 2, 16),
    Shape(256, 7168, 8, 256),
  ),
  "gate": (Shape(512, 1024, 2, 16),),
  "tiny": (Shape(16, 32, 2, 8),),
}


def parse_shapes(names: list[str]) -> list[Shape]:
  """Returns the shapes of names: presets, or sizes like "TxHxKxE"."""
  shapes = []
  for name in names:
    if re.fullmatch(r"\d+(x\d+){3}", name):
      shapes.append(Shape(*map(int, name.split("x"))))
    elif name in PRESETS:
      shapes.extend(PRESETS[name])
    else:
      raise ValueError(
        f"{name!r} is no shape; choose among {', '.join(PRESETS)}, or write"
        " TxHxKxE, as in 1024x2048x8x64."
      )
  return shapes


@dataclasses.dataclass(frozen=True)
class Layout:
  """Everything that a contender may know before it sees a routing.

  Attributes:
    ranks: P.
    capacity: C, the rows that a rank can receive.
    pair_rows: the rows that a rank can send another, for contenders that pad.
      It is C / P, or exactly what this routing needs if that is more. So with
      the default capacity no routing overflows, and with a smaller one a
      contender pads no more than with a perfect guess.
    zero_tail: whether rows past the last one that arrives must be zero.
  """

  shape: Shape
  ranks: int
  capacity: int
  pair_rows: int
  zero_tail: bool

  @property
  def num_local_experts(self) -> int:
    return self.shape.num_experts // self.ranks


def make_layout(
  shape: Shape,
  choices: np.ndarray,
  ranks: int,
  *,
  capacity_factor: float | None,
  zero_tail: bool,
) -> Layout:
  """Returns the layout for a routing; raises `ValueError` if there is none.

  The capacity is `capacity_factor` times the rows of a balanced routing.
  Without a factor it is the worst case.
  """
  if shape.num_experts % ranks or shape.top_k > shape.num_experts:
    raise ValueError(
      f"{shape}: E must be a multiple of the {ranks} ranks and not less than K."
    )
  local = shape.num_experts // ranks
  capacity = ranks * shape.tokens * min(shape.top_k, local)
  if capacity_factor is not None:
    balanced = capacity_factor * shape.tokens * shape.top_k
    capacity = min(capacity, max(local, int(balanced)))
  loads = routings.loads(choices, ranks, shape.num_experts)
  if loads.sum(axis=0).max() > capacity:
    raise ValueError(
      f"{shape}: {loads.sum(axis=0).max()} rows for one rank, but its capacity"
      f" is {capacity}; raise --capacity_factor, or leave it out."
    )
  pair_rows = max(-(-capacity // ranks), int(loads.max()))
  return Layout(shape, ranks, capacity, pair_rows, zero_tail)


class Workload:
  """A layout, a routing and a dtype, and the inputs that they determine."""

  def __init__(self, layout: Layout, choices: np.ndarray, dtype: np.dtype):
    self.layout = layout
    self.choices = choices
    self.dtype = dtype

  def inputs(
    self, mesh: jax.sharding.Mesh, names: Collection[str]
  ) -> dict[str, jax.Array]:
    """Returns global arrays, split along their first axis among the ranks.

    A rank's parts are topk_idx `[T, K]`, tokens `[T, H]`, topk_weights
    `[T, K]`, rows `[C, H]` and row_weights `[C]`. Each also serves as a
    cotangent of an array of its shape.
    """
    shape, ranks = self.layout.shape, self.layout.ranks
    num_tokens, num_rows = ranks * shape.tokens, ranks * self.layout.capacity
    known = {
      "topk_idx": (num_tokens, shape.top_k, self.choices.__getitem__),
      "tokens": (num_tokens, shape.hidden, self.tokens),
      "topk_weights": (num_tokens, shape.top_k, self.topk_weights),
      "rows": (num_rows, shape.hidden, self.rows),
      "row_weights": (num_rows, None, self.row_weights),
    }

    def place(count, width, make):
      return jax.make_array_from_callback(
        (count,) if width is None else (count, width),
        NamedSharding(mesh, SPEC),
        lambda index: make(np.arange(*index[0].indices(count))),
      )

    return {name: place(*known[name]) for name in known if name in names}

  @property
  def payload_bytes(self) -> int:
    """The payload of one direction; see the top of this file."""
    rows = int((self.choices >= 0).sum())
    return rows * self.layout.shape.hidden * self.dtype.itemsize

  # These return any part of the inputs, by the ids of tokens or of rows. The
  # id of a row is `rank * C + slot`.

  def tokens(self, ids: np.ndarray) -> np.ndarray:
    return _numbers(ids, self.layout.shape.hidden, self.dtype)

  def topk_weights(self, ids: np.ndarray) -> np.ndarray:
    return _numbers(ids + 1, self.layout.shape.top_k, np.dtype("float32"))

  def rows(self, ids: np.ndarray) -> np.ndarray:
    return _numbers(ids + 2, self.layout.shape.hidden, self.dtype)

  def row_weights(self, ids: np.ndarray) -> np.ndarray:
    return _numbers(ids + 3, 1, np.dtype("float32"))[..., 0]


_WINDOWS = 1 << 20
_STRIDE = 40503  # odd, so that different ids have different windows


@functools.cache
def _windows(width: int, dtype: np.dtype) -> np.ndarray:
  size = _WINDOWS + width - 1
  table = np.random.default_rng(0).standard_normal(size, np.float32)
  # The view is of integers, which numpy copies faster than bfloat16.
  table = table.astype(dtype).view(f"u{dtype.itemsize}")
  return np.lib.stride_tricks.sliding_window_view(table, width)


def _numbers(ids: np.ndarray, width: int, dtype: np.dtype) -> np.ndarray:
  """Returns normal numbers `[*ids.shape, width]` that depend on the ids only.

  All inputs consist of windows of one short table. So any rank can compute any
  row, at the cost of a copy, and need not hold the others.
  """
  return _windows(width, dtype)[ids * _STRIDE % _WINDOWS].view(dtype)
