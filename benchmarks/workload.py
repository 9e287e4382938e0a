# SPDX-License-Identifier: Apache-2.0
"""The workload: a shape, a routing, and the inputs of every op."""

from __future__ import annotations

from collections.abc import Collection
import dataclasses
import re

import jax
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from ep import presets

AXIS = "ep"
SPEC = PartitionSpec(AXIS)


@dataclasses.dataclass(frozen=True)
class Shape:
  """T tokens of a rank, hidden size H, K choices of a token, E experts.

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


# The shapes of docs/performance.md, and the shape of CI's gate.
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
  """Returns the shapes of names.

  A name is in `NAMED`, a model of `ep.presets`, "models" for all of them, or
  sizes like "TxHxKxE" or "TxHxKxExF". The layer of a model gets `tokens` on a
  rank, and its H and F are divided by `scale`.
  """
  shapes = []
  for name in names:
    if re.fullmatch(r"\d+(x\d+){3,4}", name):
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
  """Returns random experts of all ranks' tokens, `[P * T, K]`.

  All processes draw the same.
  """
  odds = np.random.default_rng(0).random(
    (ranks * shape.tokens, shape.num_experts)
  )
  return odds.argsort(-1)[:, : shape.top_k].astype(np.int32)


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
    expert_rows: the most rows that a rank sends an expert in this routing, for
      contenders that pad to it: also a perfect guess.
    zero_tail: whether rows past the last one that arrives must be zero.
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
  """A layout, a routing and a dtype, and the inputs that they determine."""

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

    The capacity is `capacity_factor` times the rows of a balanced routing.
    Without a factor it is the worst case.
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
        np.bincount(part[part >= 0], minlength=shape.num_experts)
        for part in choices.reshape(ranks, -1)
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

  def inputs(
    self, mesh: jax.sharding.Mesh, names: Collection[str]
  ) -> dict[str, jax.Array]:
    """Returns global arrays, split along their first axis among the ranks.

    A rank's parts are topk_idx `[T, K]`, tokens `[T, H]`, topk_weights
    `[T, K]`, rows `[C, H]`, row_weights `[C]`, w_gate and w_up `[L, H, F]` and
    w_down `[L, F, H]`. Each also serves as a cotangent of an array of its
    shape.
    """
    shape, layout = self.layout.shape, self.layout
    up = layout.num_local_experts, shape.hidden, shape.inner
    sizes = {
      "topk_idx": (shape.tokens, shape.top_k),
      "tokens": (shape.tokens, shape.hidden),
      "topk_weights": (shape.tokens, shape.top_k),
      "rows": (layout.capacity, shape.hidden),
      "row_weights": (layout.capacity,),
      "w_gate": up,
      "w_up": up,
      "w_down": (up[0], up[2], up[1]),
    }

    def place(name):
      lead, *rest = sizes[name]
      return jax.make_array_from_callback(
        (layout.ranks * lead, *rest),
        NamedSharding(mesh, SPEC),
        lambda index: self._part(name, sizes[name], index[0].start or 0),
      )

    return {name: place(name) for name in sizes if name in names}

  def _part(self, name: str, sizes: tuple[int, ...], start: int) -> np.ndarray:
    """Returns the part of an input that begins at an index of its first axis.

    Its numbers repeat a short table, which is fast. No two rows are alike,
    because the length of the table is a prime.
    """
    if name == "topk_idx":
      return self.choices[start : start + sizes[0]]
    rng = np.random.default_rng([*name.encode(), start])
    table = rng.standard_normal(1_000_003, np.float32)
    if name.startswith("w_"):  # it keeps the magnitude of rows
      table *= sizes[1] ** -0.5
    is_weight = name.endswith("weights")
    dtype = np.dtype("float32") if is_weight else self.dtype
    return np.resize(table.astype(dtype), sizes)
