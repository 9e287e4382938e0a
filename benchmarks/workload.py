# SPDX-License-Identifier: Apache-2.0
"""What is measured: a shape, a routing, and the inputs of every op.

**Payload** of one direction, in bytes: the rows that dispatch delivers, on all
ranks together, times H times the bytes of an element. A row counts wherever it
comes from, also from its own rank, and once for each expert that it is sent to.
Weights, routing, padding and tails do not count. It is the same number for
every contender, whatever that one really moves, and for combine as for
dispatch; a round trip carries it twice.
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
  """Of one rank's tokens, and of the model: T, H, K and E."""

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
  """Shapes from names of presets and from "TxHxKxE"."""
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
  """All that a contender may know before it sees a routing.

  Attributes:
    ranks: P.
    capacity: C, rows that a rank can receive.
    pair_rows: rows that a rank can send another, for contenders that pad: C / P
      or, if this routing needs more, just what it needs. So with the default
      capacity no routing overflows, and with a smaller one nobody is padded
      more than whoever had guessed right.
    zero_tail: whether rows past the last that arrives are zero, or anything.
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
  """The layout for a routing; `ValueError` if it cannot be.

  The capacity is `capacity_factor` times the rows of a balanced routing, or
  without a factor the worst case.
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
  """A layout, a routing and a dtype, and the inputs that follow from them."""

  def __init__(self, layout: Layout, choices: np.ndarray, dtype: np.dtype):
    self.layout = layout
    self.choices = choices
    self.dtype = dtype

  def inputs(
    self, mesh: jax.sharding.Mesh, names: Collection[str]
  ) -> dict[str, jax.Array]:
    """Global arrays, split along their first axis into what is each rank's.

    That is topk_idx `[T, K]`, tokens `[T, H]`, topk_weights `[T, K]`, rows
    `[C, H]` and row_weights `[C]`. Each serves as a cotangent of its like, too.
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
    """Of one direction; see the top of this file."""
    rows = int((self.choices >= 0).sum())
    return rows * self.layout.shape.hidden * self.dtype.itemsize

  # Any part of the inputs, by ids of tokens, or of rows: `rank * C + slot`.

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
  # As integers, which numpy copies faster than bfloat16.
  table = table.astype(dtype).view(f"u{dtype.itemsize}")
  return np.lib.stride_tricks.sliding_window_view(table, width)


def _numbers(ids: np.ndarray, width: int, dtype: np.dtype) -> np.ndarray:
  """`[*ids.shape, width]` normal numbers, which depend on the ids alone.

  All input is made of windows of one short table: any rank can tell what any
  row holds, at the cost of a copy, and without holding the others.
  """
  return _windows(width, dtype)[ids * _STRIDE % _WINDOWS].view(dtype)
