# SPDX-License-Identifier: Apache-2.0
"""MoEConfig: the sizes and choices of a MoE layer, without a mesh."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax

from ep._src.base import arguments
from ep._src.group.group import EpGroup, EpLayerConfig
from ep._src.matmul import row_map
from ep._src.moe import router
from ep._src.moe.network import Activation, Experts

_POSITIVE = ("hidden", "inner", "num_experts", "top_k")
_FLAGS = ("gated", "biases", "router_bias", "normalize", "deterministic")


@dataclasses.dataclass(frozen=True)
class MoEConfig:
  """A MoE layer: a router, experts, and perhaps shared experts.

  Frozen and hashable. It knows neither mesh nor batch; `layer` binds it to a
  group. `ep.moe` has the functions that use it.

  Args:
    hidden: H, the size of a token.
    inner: F, the size between the matrices of an expert.
    num_experts: E.
    top_k: K, experts of a token.
    gated: whether an expert multiplies `activation(x @ w_gate)` into its
      hidden activations, as in SwiGLU (silu) and GeGLU (gelu).
    activation: an elementwise function, hashable and without state that
      changes: compiled programs are kept by it.
    up_activation: with gates, an elementwise function of `x @ w_up`.
    biases: whether the matrices of experts have biases.
    router_bias: whether the router's logits have one. It is a parameter with a
      gradient, unlike the `bias` of `ep.moe.apply`.
    shared_inner: S, the inner size of an expert that every token visits besides
      its own; 0 for none.
    weigh: when routing weights multiply: "late", as outputs are summed, or
      "early", before the last matrix.
    score, normalize, scale, jitter: as in `ep.route_topk`.
    num_groups, top_groups, group_best: as in `ep.route_topk`.
    balance: which loss `Metrics.aux_loss` is: that of a whole "batch"
      (`ep.load_balancing_loss`), or of each "sequence", the last axis but one
      of the tokens (`ep.sequence_balancing_loss`).
    capacity_factor: rows that a rank can receive, over those of a step whose
      tokens fill the ranks and spread evenly. None for room for any routing.
    overflow: what happens to a step that needs more: "drop" drops the rest, and
      "chunk" sends the tokens in chunks, as `ep.EpLayerConfig` says.
    drop_by: what "drop" drops, "slot", "weight" or "fair", as in
      `ep.EpLayerConfig`; None inherits from the group.
    num_candidates: M >= K, the candidates of a token, as in `ep.route_topk`: a
      choice without room moves to one of the others. The weights of a token are
      those that the router gives to the experts that it gets. None for no
      moves. It needs a `capacity_factor`, or a group with a capacity.
    tp_axis: a mesh axis over which inner sizes are split. It is none of the
      group's token axes: its ranks hold the same tokens.
    fsdp_axis: a mesh axis over which matrices are split as well. They are
      gathered when they are used.
    deterministic: whether gradients of parameters are added in an order that
      depends on the number of ranks alone, so that losses of a training run
      have the same bits for every split of the ranks into mesh axes whose
      sizes are powers of two. Parameters must be float32; tokens need not be.
      It costs time and memory (docs/performance.md).
    name: for messages and traces.

  Raises:
    ValueError: a value is out of range.
    TypeError: a size is no integer, a flag no bool, or a function none.
  """

  hidden: int
  inner: int
  num_experts: int
  top_k: int
  gated: bool = True
  activation: Activation = jax.nn.silu
  up_activation: Activation | None = None
  biases: bool = False
  router_bias: bool = False
  shared_inner: int = 0
  weigh: Literal["late", "early"] = "late"
  score: Literal["softmax", "sigmoid"] = "softmax"
  normalize: bool = True
  scale: float = 1.0
  jitter: float = 0.0
  num_groups: int = 1
  top_groups: int = 1
  group_best: int = 2
  balance: Literal["batch", "sequence"] = "batch"
  capacity_factor: float | None = None
  overflow: Literal["drop", "chunk"] = "drop"
  drop_by: Literal["slot", "weight", "fair"] | None = None
  num_candidates: int | None = None
  tp_axis: str | None = None
  fsdp_axis: str | None = None
  deterministic: bool = False
  name: str = "moe"

  def __post_init__(self) -> None:
    arguments.label("MoEConfig", self.name)
    what = f'MoEConfig(name="{self.name}")'
    for field in _FLAGS:
      flag = arguments.flag(what, field, getattr(self, field))
      object.__setattr__(self, field, flag)
    for field in ("tp_axis", "fsdp_axis"):
      if getattr(self, field) is not None:
        arguments.string(what, field, getattr(self, field))
    for field in (*_POSITIVE, "shared_inner"):
      value = arguments.integer(what, field, getattr(self, field))
      object.__setattr__(self, field, value)
      least = 1 if field in _POSITIVE else 0
      arguments.check(
        value >= least,
        what,
        f"{field} = {value}, but it must be at least {least}.",
      )
    arguments.check(
      self.top_k <= self.num_experts,
      what,
      f"top_k = {self.top_k}, but it must be in 1..num_experts ="
      f" {self.num_experts}.",
    )
    if self.capacity_factor is not None:
      arguments.capacity_factor(what, self.capacity_factor)
    arguments.number(what, "scale", self.scale)
    router.check_choice(
      what,
      self.num_experts,
      self.top_k,
      self.num_groups,
      self.top_groups,
      self.group_best,
      self.jitter,
    )
    if self.num_candidates is not None:
      allowed = self.num_experts // self.num_groups * self.top_groups
      candidates = router.check_candidates(
        what, self.num_candidates, self.top_k, allowed
      )
      object.__setattr__(self, "num_candidates", candidates)
    arguments.check(
      self.drop_by in (None, "slot") or self.capacity_factor is not None,
      what,
      f"drop_by = {self.drop_by!r}, but capacity_factor = None leaves room for"
      " any routing; give a factor, such as 1.25.",
    )
    arguments.check_choices(what, self, **_CHOICES)
    arguments.function(what, "activation", self.activation)
    if self.up_activation is not None:
      arguments.function(what, "up_activation", self.up_activation)
    arguments.check(
      self.gated or self.up_activation is None,
      what,
      "up_activation is given, but gated = False; without gates, `activation`"
      " is applied to x @ w_up.",
    )

  def __copy__(self) -> MoEConfig:
    """Returns this very object, which never changes."""
    return self

  def __deepcopy__(self, memo: Any) -> MoEConfig:
    """Returns this very object: a copy of its functions would differ."""
    return self

  @property
  def experts(self) -> Experts:
    """The network of an expert."""
    return Experts(
      self.activation, self.up_activation, self.weigh, self.deterministic
    )

  def layer(self, group: EpGroup) -> EpLayerConfig:
    """Binds the layer to a group, and its capacity to the group's sizes.

    `ep.EpLayerConfig` says what a `capacity_factor` means there. If the group
    has no `max_tokens_per_rank`, the capacity follows the tokens of each call.

    Raises:
      ValueError: the group is for another number of experts or a smaller
        hidden size, no choice can move to one of `num_candidates`, or the
        layer is `deterministic` and the group's backend is "nccl".
    """
    inherited: Any = None  # a layer's types are of the resolved values
    overflow = inherited if self.capacity_factor is None else self.overflow
    # Blocks of rows then are alike, also the last one (row_map.py).
    multiple = row_map.HEIGHT if self.deterministic else 1
    layer = EpLayerConfig(
      group,
      top_k=self.top_k,
      capacity_factor=self.capacity_factor,
      capacity_multiple=multiple,
      overflow=overflow,
      drop_by=self.drop_by or inherited,
      num_candidates=self.num_candidates,
      name=self.name,
    )
    what = f'MoEConfig(name="{self.name}").layer'
    arguments.check(
      self.num_experts == group.num_experts,
      what,
      f"num_experts = {self.num_experts}, but the group has"
      f" {group.num_experts}; bootstrap a group for this model.",
    )
    arguments.check(
      group.hidden_dim is None or self.hidden <= group.hidden_dim,
      what,
      f"hidden = {self.hidden}, but the group's rows have"
      f" hidden_dim = {group.hidden_dim}; bootstrap a group for this model.",
    )
    arguments.check(
      not self.deterministic or group.backend != "nccl",
      what,
      'deterministic = True, but backend = "nccl" adds the outputs of experts'
      " in an order of its own; pass deterministic=False, or bootstrap the"
      ' group with backend="xla".',
    )
    arguments.check(
      self.num_candidates is None
      or self.capacity_factor is not None
      or group.recv_capacity_per_rank is not None,
      what,
      f"num_candidates = {self.num_candidates}, but capacity_factor = None"
      " leaves room for any routing, and no choice moves; give a factor, such"
      " as 1.25, or pass num_candidates=None.",
    )
    return layer


_CHOICES = {
  "overflow": ("drop", "chunk"),
  "drop_by": (None, "slot", "weight", "fair"),
  "weigh": ("late", "early"),
  "score": ("softmax", "sigmoid"),
  "balance": ("batch", "sequence"),
}
