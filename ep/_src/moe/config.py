# SPDX-License-Identifier: Apache-2.0
"""MoEConfig describes a MoE layer; `layer_of` makes its `EpLayerConfig`."""

from __future__ import annotations

import dataclasses
import functools
import typing
from typing import Literal

import jax
from jax.typing import DTypeLike

from ep._src.base import arguments, arrays
from ep._src.base.group import (
  DROP_BY,
  EpGroup,
  NotCopied,
  OVERFLOW,
  token_dtype,
)
from ep._src.base.layer import EpLayerConfig, WIRES
from ep._src.matmul import implementations
from ep._src.matmul.implementations import Implementation
from ep._src.moe import router
from ep._src.moe.experts import Activation, Experts, Weigh
from ep._src.ops import quantizers, row_map

_POSITIVE = arguments.at_least(1)
_CHECKS: dict[str, arguments.Check] = {
  "name": arguments.label,
  "gated": arguments.flag,
  "biases": arguments.flag,
  "router_bias": arguments.flag,
  "normalize": arguments.flag,
  "deterministic": arguments.flag,
  "tp_axis": arguments.optional(arguments.string),
  "fsdp_axis": arguments.optional(arguments.string),
  "hidden": _POSITIVE,
  "inner": _POSITIVE,
  "num_experts": _POSITIVE,
  "top_k": _POSITIVE,
  "token_chunks": _POSITIVE,
  "shared_inner": arguments.at_least(0),
  "capacity_factor": arguments.optional(arguments.capacity_factor),
  "scale": arguments.number,
  "overflow": arguments.one_of(None, *OVERFLOW),
  "drop_by": arguments.one_of(*DROP_BY),
  "weigh": arguments.one_of(*typing.get_args(Weigh)),
  "score": router.check_score,
  "balance": arguments.one_of("batch", "sequence"),
  "wire": arguments.one_of(*WIRES),
  "dtype": arguments.optional(token_dtype),
  "activation": arrays.function,
  "up_activation": arguments.optional(arrays.function),
}


@dataclasses.dataclass(frozen=True, repr=False)
class MoEConfig(NotCopied):
  """The configuration of a MoE layer: router, experts, shared experts.

  Frozen and hashable. It depends on no mesh and no batch size:
  `ep.MoE(config, mesh)` is the layer on a mesh.

  Args:
    hidden: H, the size of a token.
    inner: F, the size of an expert's hidden activations.
    num_experts: E.
    top_k: K, experts of a token.
    gated: whether an expert multiplies `activation(x @ w_gate)` into its
      hidden activations, as in SwiGLU (silu) and GeGLU (gelu).
    activation: an elementwise function, hashable and without mutable state,
      because it is a key of compiled programs.
    up_activation: with gates, an elementwise function of `x @ w_up`.
    biases: whether experts have biases.
    router_bias: whether the router's logits have a bias, a parameter with a
      gradient, unlike the bias of `ep.moe.State`.
    shared_inner: S, the inner size of the shared expert, which every token
      visits; 0 for no shared expert.
    weigh: the rows that routing weights multiply: "late", the outputs of
      experts; "early", the inputs of `w_down`, where only rounding differs;
      "input", the inputs of experts, as in Llama 4, whose outputs are then
      summed without weights.
    score, normalize, scale: as in `ep.route_topk`.
    num_groups, top_groups, group_best: as in `ep.route_topk`.
    balance: the loss in `Metrics.aux_loss`: of a whole "batch"
      (`ep.load_balancing_loss`), or of each "sequence", the last axis but one
      of the tokens (`ep.sequence_balancing_loss`).
    capacity_factor: rows that a rank can receive, relative to an even spread of
      the largest batch. None reserves enough rows for any routing.
    overflow: policy for a step that needs more rows: "error", "drop" or
      "chunk", as in `ep.EpLayerConfig`; None inherits from the group.
    drop_by: order for "drop": "slot" or "fair", as in `ep.EpLayerConfig`; None
      inherits from the group, whose None is "fair".
    token_chunks: n, the number of chunks into which a rank splits its tokens.
      Chunks pass through the experts one after another, forward and backward,
      in buffers for the rows of one chunk. Outputs have the same bits for every
      n, unless choices are dropped: the capacity is for one chunk. Weight
      gradients are rounded for each chunk, and added in float32. Chunks cost
      time: the backward pass computes the experts again. Not with overflow =
      "chunk" or `deterministic`.
    wire: the fp8 format in which dispatch sends tokens, and the backward pass
      sends gradients to experts: "mxfp8" or "fp8_block128", as in
      `ep.EpLayerConfig`. `hidden` is then a multiple of 32 or 128.
    tp_axis: a mesh axis over which inner sizes are split. It is no token axis
      of the group: its ranks hold the same tokens.
    fsdp_axis: a mesh axis over which matrices are also split, and gathered
      before use.
    deterministic: whether gradients of parameters are added in an order that
      depends on the number of ranks alone. Losses of a training run then have
      the same bits for every split of the ranks into mesh axes whose sizes are
      powers of two. A call refuses parameters that are not float32; `dtype` may
      be another. It costs time and memory.
    implementation: of the experts' products, as in `ep.grouped_matmul`; a
      function is a key of compiled programs. Not with `deterministic`.
    dtype: float32, bfloat16 or float16, the dtype in which tokens and matrices
      are multiplied. Tokens and parameters are converted, and y has this dtype.
      None: tokens and all parameters but the router must have one dtype.
      Logits, scores and metrics are float32.
    name: for messages and profiles.

  Raises:
    ValueError: a value is out of range.
    TypeError: a size is no integer, a flag no bool, an activation no function.
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
  weigh: Weigh = "late"
  score: router.Score = "softmax"
  normalize: bool = True
  scale: float = 1.0
  num_groups: int = 1
  top_groups: int = 1
  group_best: int = 2
  balance: Literal["batch", "sequence"] = "batch"
  capacity_factor: float | None = None
  overflow: Literal["error", "drop", "chunk"] | None = None
  drop_by: Literal["slot", "fair"] | None = None
  token_chunks: int = 1
  wire: Literal["mxfp8", "fp8_block128"] | None = None
  tp_axis: str | None = None
  fsdp_axis: str | None = None
  deterministic: bool = False
  implementation: Implementation = None
  dtype: DTypeLike | None = None
  name: str = "moe"

  def __post_init__(self) -> None:
    label = arguments.label("MoEConfig", "name", self.name)
    what = f'MoEConfig(name="{label}")'
    arguments.resolve(what, self, _CHECKS)
    arguments.check(
      self.tp_axis is None or self.tp_axis != self.fsdp_axis,
      what,
      f"tp_axis and fsdp_axis are both {self.tp_axis!r}, but they split"
      " different axes of a matrix; name two mesh axes.",
    )
    self.rule.check(what, self.num_experts)
    implementations.check(what, self.implementation)
    for name, only in dict(token_chunks=1, implementation=None).items():
      arguments.check(
        not self.deterministic or getattr(self, name) == only,
        what,
        f"{name} = {getattr(self, name)!r}, but deterministic = True promises"
        " one order of sums, of whole batches and of ep's own products; pass"
        f" {name} = {only}.",
      )
    if self.wire is not None:
      quantizers.check_width(what, self.hidden, self.wire)
    arguments.check(
      self.gated or self.up_activation is None,
      what,
      "up_activation is given, but gated = False; without gates, `activation`"
      " is applied to x @ w_up.",
    )

  def __repr__(self) -> str:
    """Shows only the fields that differ from their defaults."""
    shown = (
      f"{field.name}={value!r}"
      for field in dataclasses.fields(self)
      if (value := getattr(self, field.name)) != field.default
    )
    return f"MoEConfig({', '.join(shown)})"

  @functools.cached_property
  def rule(self) -> router.Rule:
    """The rule by which the router chooses."""
    return router.Rule(*(getattr(self, name) for name in router.Rule._fields))

  @functools.cached_property
  def experts(self) -> Experts:
    """The network of an expert."""
    return Experts(
      self.activation,
      self.up_activation,
      self.weigh,
      self.deterministic,
      implementation=self.implementation,
    )


def num_slots(config: MoEConfig, ep_size: int) -> int:
  """Returns P * L, the number of expert slots of all ranks."""
  return ep_size * -(-config.num_experts // ep_size)


def layer_of(config: MoEConfig, group: EpGroup, name: str) -> EpLayerConfig:
  """Returns the `EpLayerConfig` of a `MoEConfig` on a group.

  Raises:
    ValueError: the config does not fit the group; see `ep.MoE`.
  """
  what = f'MoE(layer "{name}")'
  arguments.check(
    group.num_experts in (config.num_experts, num_slots(config, group.ep_size)),
    what,
    f"num_experts = {config.num_experts}, but the group has"
    f" {group.num_experts}; bootstrap a group for this model.",
  )
  arguments.check(
    group.hidden_dim is None or config.hidden <= group.hidden_dim,
    what,
    f"hidden = {config.hidden}, but the group's rows have"
    f" hidden_dim = {group.hidden_dim}; bootstrap a group for this model.",
  )
  arguments.check(
    not config.deterministic or group.backend != "nccl",
    what,
    'deterministic = True, but backend = "nccl" adds the outputs of experts in'
    " another order; pass deterministic=False, or bootstrap the group with"
    ' backend="xla".',
  )
  _check_axes(what, group, config)
  layer = EpLayerConfig(
    group,
    top_k=config.top_k,
    capacity_factor=config.capacity_factor,
    # A deterministic layer needs row blocks of equal size (row_map.py).
    capacity_multiple=row_map.HEIGHT if config.deterministic else 1,
    overflow=config.overflow,
    drop_by=config.drop_by,
    wire=config.wire,
    name=name,
  )
  if config.token_chunks == 1:
    return layer
  arguments.check(
    layer.overflow != "chunk",
    what,
    f"token_chunks = {config.token_chunks} splits the tokens of every step, and"
    ' overflow = "chunk" the tokens of a step that does not fit; choose one.',
  )
  most = group.max_tokens_per_rank
  if most is None:  # the capacity follows the tokens of each chunk
    return layer
  rows = layer.rows_for(-(-most // config.token_chunks))
  return dataclasses.replace(layer, recv_capacity_per_rank=rows)


def _check_axes(op: str, group: EpGroup, config: MoEConfig) -> None:
  for name, axis in [
    ("tp_axis", config.tp_axis),
    ("fsdp_axis", config.fsdp_axis),
  ]:
    if axis is None:
      continue
    arguments.check(
      axis in group.mesh.shape and axis != group.axis_name,
      op,
      f"{name} = {axis!r}, but it must be one of the mesh axes"
      f" {tuple(group.mesh.shape)} and not the EP axis {group.axis_name!r}.",
    )
  arguments.check(
    config.tp_axis not in group.token_axes,
    op,
    f"tp_axis = {config.tp_axis!r}, but the group splits tokens over that axis,"
    f" whose ranks must hold the same tokens; pass ep_bootstrap(data_axes="
    f"{tuple(a for a in group.data_axes if a != config.tp_axis)}).",
  )
