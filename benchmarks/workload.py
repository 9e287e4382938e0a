# SPDX-License-Identifier: Apache-2.0
"""Defines the workload: a shape, a routing, and the inputs of every op."""

from __future__ import annotations

from collections.abc import Collection
import dataclasses
import re

import jax
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from ep import presets
from ep.testing._routings import ROUTINGS

AXIS = "ep"
SPEC = PartitionSpec(AXIS)


@dataclasses.dataclass(frozen=True)
class Shape:
  """Sizes: T tokens per rank, hidden size H, K choices per token, E experts.

  A whole layer also needs F, the inner size of an expert.
  """

  tokens: int
  hidden: int
  top_k: int
  num_experts: int
  inner: int | None = None

  def __str__(self) -> str:
    sizes = dataclasses.astuple(self)
    return "x".join(str(size) for size in sizes if size is not None)


# "goals" are the shapes of docs/performance.md; "gate" is for CI's gate.
NAMED = {
  "goals": (
    Shape(1024, 1024, 2, 16),
    Shape(1024, 2048, 8, 64),
    Shape(4096, 1024, 2, 16),
    Shape(256, 7168, 8, 256),
  ),
  "gate": (Shape(512, 1024, 2, 16),),
}


def parse_shapes(names: list[str], *, tokens: int, scale: int) -> list[Shape]:
  """Parses names of shapes.

  A name is in `NAMED`, a model of `ep.presets`, "models" for all models, or
  sizes like "TxHxKxE" or "TxHxKxExF". For a model, T is `tokens`, and H and F
  are divided by `scale`.
  """
  shapes = []
  for name in names:
    if re.fullmatch(r"[1-9]\d*(x[1-9]\d*){3,4}", name):
      shapes.append(Shape(*map(int, name.split("x"))))
    elif name in NAMED:
      shapes.extend(NAMED[name])
    elif name in (*presets.BY_NAME, "models"):
      models = presets.BY_NAME if name == "models" else [name]
      shapes.extend(_of_model(model, tokens, scale) for model in models)
    else:
      raise ValueError(
        f"{name!r} is no shape; choose among"
        f" {', '.join([*NAMED, *presets.BY_NAME])} and models, or write"
        " TxHxKxE or TxHxKxExF, as in 1024x2048x8x64."
      )
  return shapes


def _of_model(name: str, tokens: int, scale: int) -> Shape:
  cfg = presets.scaled(presets.BY_NAME[name], scale)
  return Shape(tokens, cfg.hidden, cfg.top_k, cfg.num_experts, cfg.inner)


def uniform(shape: Shape, ranks: int) -> np.ndarray:
  """Returns random experts `[P * T, K]`, the same on all processes."""
  size = ranks * shape.tokens, shape.top_k
  return ROUTINGS["uniform"](np.random.default_rng(0), size, shape.num_experts)


@dataclasses.dataclass(frozen=True)
class Layout:
  """The static sizes of a contender's programs.

  Attributes:
    ranks: P.
    capacity: C, the rows that a rank can receive.
    pair_rows: rows of the padded block from one rank to another: C / P, or the
      maximum in this routing if that is larger. With the default capacity no
      routing overflows. With a smaller capacity, padding is minimal.
    expert_rows: the maximum number of rows from one rank to one expert in this
      routing, for contenders that pad per expert.
    zero_tail: whether rows after the last received row must be zero.
  """

  shape: Shape
  ranks: int
  capacity: int
  pair_rows: int
  expert_rows: int
  zero_tail: bool

  @property
  def num_local_experts(self) -> int:
    return self.shape.num_experts // self.ranks


class Workload:
  """A layout, a routing, a dtype, and the input arrays of all ops."""

  def __init__(
    self,
    shape: Shape,
    choices: np.ndarray,
    ranks: int,
    *,
    dtype: str = "float32",
    capacity_factor: float | None = None,
    zero_tail: bool = True,
  ):
    """Makes the workload; raises `ValueError` if the sizes do not fit.

    The capacity is `capacity_factor` times the rows of a balanced routing, or
    the worst case by default.
    """
    if shape.num_experts % ranks or shape.top_k > shape.num_experts:
      raise ValueError(
        f"{shape}: E must be a multiple of the {ranks} ranks and not less than"
        " K."
      )
    local = shape.num_experts // ranks
    capacity = ranks * shape.tokens * min(shape.top_k, local)
    if capacity_factor is not None:
      balanced = capacity_factor * shape.tokens * shape.top_k
      capacity = min(capacity, max(local, int(balanced)))
    to_experts = np.stack(
      [
        np.bincount(own, minlength=shape.num_experts)
        for own in choices.reshape(ranks, -1)
      ]
    )
    to_ranks = to_experts.reshape(ranks, ranks, local).sum(axis=-1)
    self.received = to_ranks.sum(axis=0)
    if self.received.max() > capacity:
      raise ValueError(
        f"{shape}: {self.received.max()} rows for one rank, but its capacity is"
        f" {capacity}; raise --capacity_factor, or leave it out."
      )
    self.layout = Layout(
      shape,
      ranks,
      capacity,
      pair_rows=max(-(-capacity // ranks), int(to_ranks.max())),
      expert_rows=int(to_experts.max()),
      zero_tail=zero_tail,
    )
    self.choices = choices
    self.dtype = np.dtype(dtype)

  def structs(self, mesh: jax.sharding.Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the types of all inputs, global arrays split over the ranks.

    A rank's shards are topk_idx `[T, K]`, tokens `[T, H]`, topk_weights
    `[T, K]`, rows `[C, H]`, row_weights `[C]`, w_gate and w_up `[L, H, F]` and
    w_down `[L, F, H]`.
    """
    shape, layout = self.layout.shape, self.layout
    up = layout.num_local_experts, shape.hidden, shape.inner
    sizes = {
      "topk_idx": (shape.tokens, shape.top_k),
      "tokens": (shape.tokens, shape.hidden),
      "topk_weights": (shape.tokens, shape.top_k),
      "rows": (layout.capacity, shape.hidden),
      "row_weights": (layout.capacity,),
    }
    if shape.inner is not None:
      down = up[0], up[2], up[1]
      sizes |= {"w_gate": up, "w_up": up, "w_down": down}
    dtypes = {name: np.dtype("float32") for name in sizes if "weights" in name}
    dtypes["topk_idx"] = self.choices.dtype

    def struct(name, lead, *rest):
      return jax.ShapeDtypeStruct(
        (layout.ranks * lead, *rest),
        dtypes.get(name, self.dtype),
        sharding=NamedSharding(mesh, SPEC),
      )

    return {name: struct(name, *size) for name, size in sizes.items()}

  def inputs(
    self, mesh: jax.sharding.Mesh, names: Collection[str]
  ) -> dict[str, jax.Array]:
    """Returns arrays of the types in `structs`.

    An input also serves as cotangent of an array of the same shape.
    """

    def place(name, struct):
      sizes = struct.sharding.shard_shape(struct.shape)
      return jax.make_array_from_callback(
        struct.shape,
        struct.sharding,
        lambda index: self._part(
          name, sizes, struct.dtype, index[0].start or 0
        ),
      )

    structs = self.structs(mesh).items()
    return {name: place(name, x) for name, x in structs if name in names}

  def _part(
    self, name: str, sizes: tuple[int, ...], dtype: np.dtype, start: int
  ) -> np.ndarray:
    """Returns the shard of an input that begins at `start` of the first axis.

    The values repeat a random table, to save time. No two rows are equal,
    because the length of the table is a prime.
    """
    if name == "topk_idx":
      return self.choices[start : start + sizes[0]]
    rng = np.random.default_rng([*name.encode(), start])
    table = rng.standard_normal(1_000_003, np.float32)
    if name.startswith("w_"):  # so products keep the rows' magnitude
      table *= sizes[1] ** -0.5
    return np.resize(table.astype(dtype), sizes)
