# SPDX-License-Identifier: Apache-2.0
"""The expert networks, and one exchange: dispatch, experts, combine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Literal

import jax
from jax import lax
import jax.numpy as jnp

from ep._src.base import compat
from ep._src.base.identities import keep_routing
from ep._src.matmul.grouped_matmul import grouped_matmuls
from ep._src.matmul.row_map import map_used_rows, repeated, weighted
from ep._src.ops.combine import ep_combine
from ep._src.ops.dispatch import ep_dispatch
from ep._src.ops.handle import EpHandle

Activation = Callable[[jax.Array], jax.Array]
Weigh = Literal["late", "early", "input"]


@dataclasses.dataclass(frozen=True)
class Experts:
  """The network of an expert, a function of a row x.

  The hidden activations h are, with gates and without gates,

      activation(x @ w_gate + b_gate) * up_activation(x @ w_up + b_up)
      activation(x @ w_up + b_up)

  and the expert's output is h @ w_down + b_down. An expert has gates and biases
  if its parameters do.

  Attributes:
    activation: elementwise.
    up_activation: elementwise; None is the identity.
    weigh: which rows routing weights multiply: outputs ("late"); h ("early"),
      where only rounding differs; or x ("input"), which is another function.
    deterministic: whether gradients of parameters are summed by source rank,
      in the order that ordered_sum.py defines.
  """

  activation: Activation = jax.nn.silu
  up_activation: Activation | None = None
  weigh: Weigh = "late"
  deterministic: bool = False

  def is_traced(self) -> bool:
    """Returns whether an activation closes over traced values.

    Programs with such activations must not be cached, or tracers would leak.
    """
    block = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    return any(
      isinstance(value, jax.core.Tracer)
      for fn in (self.activation, self.up_activation)
      if fn is not None
      for value in jax.make_jaxpr(fn)(block).consts
    )

  def hidden(self, up: jax.Array, gate: jax.Array | None = None) -> jax.Array:
    """Returns h, the hidden activations, given the two products plus biases."""
    if gate is None:
      return self.activation(up)
    if self.up_activation is not None:
      up = self.up_activation(up)
    return self.activation(gate) * up


@dataclasses.dataclass(frozen=True)
class SharedExpert:
  """The expert that all tokens visit, in halves: `hidden`, then `output`.

  Attributes:
    experts: the network of an expert.
    params: shared_up, shared_down, and shared_gate if there are gates.
    mask: bool [...]; the output is 0 where it is False.
    overlap: whether the shared expert may run while rows are exchanged.
  """

  experts: Experts
  params: Mapping[str, jax.Array]
  mask: jax.Array | None = None
  overlap: bool = True

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.output(self.hidden(x))

  @jax.named_scope("shared_experts")
  def hidden(self, x: jax.Array) -> jax.Array:
    """Returns the hidden activations [..., S] of tokens [..., H]."""
    names = ["up", "gate"] if "shared_gate" in self.params else ["up"]
    products = (self._product(x, name) for name in names)
    return self.experts.hidden(*products)

  @jax.named_scope("shared_experts")
  def output(self, hidden: jax.Array) -> jax.Array:
    """Returns the outputs [..., H] for hidden activations [..., S]."""
    out = self._product(hidden, "down")
    return out if self.mask is None else jnp.where(self.mask[..., None], out, 0)

  def _product(self, x: jax.Array, name: str) -> jax.Array:
    return x @ self.params["shared_" + name].astype(x.dtype)


def round_trip(
  handle: EpHandle,
  experts: Experts,
  params: Mapping[str, jax.Array],
  tokens: jax.Array,
  topk_idx: jax.Array,
  topk_weights: jax.Array,
  shared: SharedExpert | None = None,
) -> jax.Array:
  """Sends tokens to their experts and sums the outputs.

  `handle` is the routing of the tokens, by a layer with `tail="unspecified"`.
  The output of the shared expert is added. With `shared.overlap`, XLA may run
  `shared.hidden` during dispatch and `shared.output` during combine, and their
  gradients during the gradient of the same exchange.
  """
  segments = None
  if experts.deterministic:
    segments = _rows_by_source(handle, topk_idx)
  rows, row_weights = ep_dispatch(handle, tokens, topk_weights)
  beside = shared if shared is not None and shared.overlap else None
  if beside is not None:
    rows, hidden = _together(rows, beside.hidden(tokens))
  with jax.named_scope("experts"):
    if experts.weigh == "input":
      rows = map_used_rows(weighted, handle.group_sizes, rows, row_weights)
    early = row_weights if experts.weigh == "early" else None
    rows = _apply(experts, params, rows, early, handle, segments)
  weights = row_weights if experts.weigh == "late" else None
  if weights is not None and not handle.params.connection.weighs:
    # Multiply here, not in combine: otherwise the gradient of combine includes
    # the gradient of the product, and XLA does not overlap the exchange and the
    # shared expert.
    rows = map_used_rows(weighted, handle.group_sizes, rows, weights)
    weights = None
  if beside is not None:
    rows, hidden = _together(rows, hidden)
  out = ep_combine(handle, rows, weights=weights)
  if shared is None:
    return out
  if beside is None:
    out, tokens = _together(out, tokens)
    return out + shared(tokens)
  # XLA would fuse the sum with the last product, which would wait for `out`.
  out, of_shared = _together(out, shared.output(hidden))
  return out + of_shared


def _together(*xs: jax.Array) -> tuple[jax.Array, ...]:
  """Returns the arrays; XLA computes all of them before it uses any of them.

  The same holds for their cotangents. So if one array is the result of an
  exchange, XLA computes the other arrays during the exchange.
  """
  return tuple(lax.optimization_barrier(compat.vary_together(*xs)))


def _rows_by_source(handle: EpHandle, topk_idx: jax.Array) -> jax.Array:
  """Returns int32 [L, P], the rows of each local expert from each rank."""
  layer = handle.layer
  slots, axis = layer.group.num_expert_slots, layer.group.axis_name
  ids = jnp.where(handle.kept, topk_idx, slots).ravel()
  sent = jnp.bincount(ids, length=slots).reshape(layer.ep_size, -1)
  (sent,) = compat.vary_together(sent, axes=[axis])
  received: jax.Array = lax.all_to_all(sent, axis, split_axis=0, concat_axis=0)
  return keep_routing(received.astype(jnp.int32).T)


def _holds_token(handle: EpHandle) -> jax.Array:
  """Returns int32 [C], 1 for rows that hold a token and 0 for all others."""
  sizes, counts = handle.group_sizes, handle.token_counts
  start = jnp.cumsum(sizes) - sizes
  steps = jnp.zeros(handle.capacity, jnp.int32)
  steps = steps.at[start].add(1, mode="drop")
  steps = steps.at[start + counts].add(-1, mode="drop")
  return jnp.cumsum(steps)


def _apply(
  experts: Experts,
  params: Mapping[str, jax.Array],
  rows: jax.Array,
  weights: jax.Array | None,
  handle: EpHandle,
  segments: jax.Array | None,
) -> jax.Array:
  """Returns the experts' outputs, times `weights` unless these are None.

  Rows after the last used block (row_map.py) are neither read nor written.
  """
  sizes = handle.group_sizes
  names = ["up", "gate"] if "w_gate" in params else ["up"]
  has_biases = "b_up" in params
  is_padded = handle.layer.alignment > 1

  def multiply(rows: jax.Array, *matrices: jax.Array) -> list[jax.Array]:
    return grouped_matmuls(rows, matrices, sizes, segments=segments)

  def of_biases(weights: jax.Array | None, *names: str) -> list[jax.Array]:
    """Returns, for each name, [C, F]: the bias of each row times its weight."""
    if weights is None:
      weights = jnp.ones(handle.capacity)
    weights = weights[:, None].astype(rows.dtype)
    return multiply(weights, *(params["b_" + n][:, None] for n in names))

  # Hidden rows are as large as `products`, but cheap to recompute: do not save.
  @jax.checkpoint
  def leave(products: Sequence[jax.Array]) -> list[jax.Array]:
    blocks = [*products]
    if has_biases:
      blocks += of_biases(None, *names)
    if is_padded:
      blocks.append(_holds_token(handle))
    if weights is not None:
      blocks.append(weights)
    hidden = _Hidden(experts, len(names), has_biases, is_padded)
    return multiply(map_used_rows(hidden, sizes, *blocks), params["w_down"])

  out: jax.Array
  (out,) = leave(multiply(rows, *(params["w_" + n] for n in names)))
  if has_biases:
    out = map_used_rows(jnp.add, sizes, out, *of_biases(weights, "down"))
  return out


@dataclasses.dataclass(frozen=True)
class _Hidden:
  """Maps blocks of the products x @ w to hidden rows.

  The operands are the products, then optionally their biases, a mask of the
  rows with tokens, and weights. Constant zeros replace the products of padding
  rows, because there an infinite derivative would give NaN gradients.
  """

  experts: Experts
  num_products: int
  has_biases: bool
  is_padded: bool

  def __call__(self, *operands: jax.Array) -> jax.Array:
    n = self.num_products
    products, others = [*operands[:n]], [*operands[n:]]
    if self.has_biases:
      products = [*map(jnp.add, products, others[:n])]
      others = others[n:]
    if self.is_padded:
      holds_token, *others = others
      products = [
        jnp.where(repeated(holds_token, x) > 0, x, 0) for x in products
      ]
    hidden = self.experts.hidden(*products)
    return weighted(hidden, *others) if others else hidden
