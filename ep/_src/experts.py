# SPDX-License-Identifier: Apache-2.0
"""The experts between dispatch and combine: a feed-forward network per slab."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
from typing import Literal

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from ep._src import compat, used_rows
from ep._src.combine import ep_combine
from ep._src.dispatch import ep_dispatch
from ep._src.group import EpLayerConfig
from ep._src.handle import EpHandle
from ep._src.prepare import ep_prepare

Activation = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Experts:
  """Describes the network of an expert, for a row x.

  The hidden activations h are, with gates and without,

      activation(x @ w_gate + b_gate) * up_activation(x @ w_up + b_up)
      activation(x @ w_up + b_up)

  and the expert's output is h @ w_down + b_down. An expert has gates and biases
  if its parameters do.

  Attributes:
    activation: elementwise.
    up_activation: elementwise; None is the identity.
    weigh: whether the routing weights multiply the outputs while they are
      summed ("late"), or h ("early"), which gives the same but for rounding.
    deterministic: whether gradients of parameters are sums over source ranks,
      added as in ordered_sum.py.
  """

  activation: Activation = jax.nn.silu
  up_activation: Activation | None = None
  weigh: Literal["late", "early"] = "late"
  deterministic: bool = False

  def is_traced(self) -> bool:
    """Returns whether its functions close over values that are traced now.

    Then programs with it must not be kept: they would keep these values.
    """
    block = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    return any(
      isinstance(value, jax.core.Tracer)
      for fn in (self.activation, self.up_activation)
      if fn is not None
      for value in jax.make_jaxpr(fn)(block).consts
    )

  def hidden(self, up: jax.Array, gate: jax.Array | None = None) -> jax.Array:
    """Returns h of the two products with x, biases included."""
    if gate is None:
      return self.activation(up)
    if self.up_activation is not None:
      up = self.up_activation(up)
    return self.activation(gate) * up


def through_experts(
  layer: EpLayerConfig,
  experts: Experts,
  params: Mapping[str, jax.Array],
  tokens: jax.Array,
  topk_idx: jax.Array,
  topk_weights: jax.Array,
  *,
  weigh_moved: Callable[[jax.Array], jax.Array] | None = None,
  beside: Callable[[], jax.Array] | None = None,
  expected_rows: int | None = None,
) -> tuple[jax.Array, EpHandle]:
  """Sends tokens to their experts and sums what comes back. Local view.

  `params` holds the rank's own experts: w_up, w_down, and w_gate, b_up, b_gate,
  b_down if there are any. If choices can move to other candidates,
  `weigh_moved` returns the weights of the experts [..., K] that they have got;
  without it, those of the candidates stay. `beside` computes an addend that
  does not depend on the exchange: it stands between dispatch and the experts,
  so that XLA may run it while rows are under way. The experts round alike for
  the same `expected_rows`, unless the capacity is less than a tile of rows;
  None is what a rank gets of these tokens if all get as much.
  """
  layer = dataclasses.replace(layer, tail="unspecified")
  handle = ep_prepare(layer, topk_idx, topk_weights)
  if handle.candidate is not None:
    topk_idx = jnp.take_along_axis(topk_idx, handle.candidate, axis=-1)
    if weigh_moved is not None:
      topk_weights = weigh_moved(topk_idx)
  out = exchange(
    handle,
    experts,
    params,
    tokens,
    topk_idx,
    topk_weights,
    beside,
    expected_rows,
  )
  return out, handle


def exchange(
  handle: EpHandle,
  experts: Experts,
  params: Mapping[str, jax.Array],
  tokens: jax.Array,
  topk_idx: jax.Array,
  topk_weights: jax.Array,
  beside: Callable[[], jax.Array] | None = None,
  expected_rows: int | None = None,
) -> jax.Array:
  """Returns what `through_experts` does, for a routing that is prepared."""
  if expected_rows is None:
    expected_rows = topk_idx.size
  segments = None
  if experts.deterministic:
    segments = _rows_by_source(handle, topk_idx)
  rows, row_weights = ep_dispatch(handle, tokens, topk_weights)
  addend = None if beside is None else beside()
  with jax.named_scope("experts"):
    early = row_weights if experts.weigh == "early" else None
    rows = _apply(
      experts,
      params,
      rows,
      early,
      handle,
      segments=segments,
      expected_rows=expected_rows,
    )
  weights = row_weights if experts.weigh == "late" else None
  out = ep_combine(handle, rows, weights=weights)
  return out if addend is None else out + addend


def _rows_by_source(handle, topk_idx):
  """Returns int32 [L, P]: the rows of each slab by the rank they came from."""
  layer = handle.layer
  experts, axis = layer.group.num_experts, layer.group.axis_name
  ids = jnp.where(handle.kept, topk_idx, experts).ravel()
  sent = jnp.bincount(ids, length=experts).reshape(layer.ep_size, -1)
  (sent,) = compat.vary_together(sent, axes=[axis])
  received = lax.all_to_all(sent, axis, split_axis=0, concat_axis=0)
  # It belongs to what `jax.checkpoint` keeps of the routing.
  return checkpoint_name(received.astype(jnp.int32).T, "ep_routing")


def _holds_token(handle):
  """Returns bool [C, 1], False for the rows that pad a slab."""
  sizes, counts = handle.group_sizes, handle.token_counts
  start = jnp.cumsum(sizes) - sizes
  steps = jnp.zeros(handle.capacity, jnp.int32)
  steps = steps.at[start].add(1, mode="drop")
  steps = steps.at[start + counts].add(-1, mode="drop")
  return jnp.cumsum(steps)[:, None] > 0


def _apply(experts, params, rows, weights, handle, **options):
  """Returns the experts' outputs, times `weights` unless these are None.

  Rows after the last slab are neither read nor written. The options are those
  of `map_slabs`.
  """

  def matrices(names):
    parts = [params["w_" + n] for n in names]
    if "b_" + names[0] in params:
      parts += [params["b_" + n][:, None] for n in names]
    return parts

  def map_slabs(fn, arrays, names):
    return used_rows.map_slabs(
      fn, handle.group_sizes, arrays, matrices(names), **options
    )

  names = ["up", "gate"] if "w_gate" in params else ["up"]
  blocks = map_slabs(_Enter(len(names)), [rows], names)
  if is_padded := handle.layer.alignment > 1:
    blocks.append(_holds_token(handle))
  if weights is not None:
    blocks.append(weights[:, None].astype(rows.dtype))
  (out,) = map_slabs(_Leave(experts, len(names), is_padded), blocks, ["down"])
  return out


@dataclasses.dataclass(frozen=True)
class _Enter:
  """A function of blocks: tokens x to x @ w + b, for each of the products."""

  num_products: int

  def __call__(self, slabs, x, *matrices):
    n = self.num_products
    return _affine(slabs, x, None, matrices[:n], matrices[n:])


@dataclasses.dataclass(frozen=True)
class _Leave:
  """A function of blocks: products, perhaps weights, to outputs.

  If slabs are padded, which rows hold tokens comes after the products. The
  products of other rows are zeros that have no gradient, whatever the
  derivative of an activation is there: it may be infinite, and its product with
  the gradient of such a row, which is zero, a NaN.
  """

  experts: Experts
  num_products: int
  is_padded: bool

  def __call__(self, slabs, *operands):
    n = self.num_products
    products, operands = operands[:n], operands[n:]
    if self.is_padded:
      holds_token, *operands = operands
      products = [jnp.where(holds_token, x, 0) for x in products]
    hidden = self.experts.hidden(*products)
    weights = None
    if self.experts.weigh == "early":
      weights, *operands = operands
      hidden *= weights
    return _affine(slabs, hidden, weights, operands[:1], operands[1:])


def _affine(slabs, rows, weights, matrices, biases):
  """Returns `rows @ w + weights * b` for each w and b, or without biases."""
  outs = slabs.multiply(rows, matrices)
  if not biases:
    return outs
  if weights is None:
    weights = jnp.ones((rows.shape[0], 1), rows.dtype)
  # Each row gets its slab's bias: the product of a weight with it.
  return list(map(jnp.add, outs, slabs.multiply(weights, biases)))
