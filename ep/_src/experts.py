# SPDX-License-Identifier: Apache-2.0
"""The experts between dispatch and combine: a feed-forward network per slab."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Literal

import jax
from jax import lax
import jax.numpy as jnp

from ep._src import compat, ordered_sum
from ep._src.combine import ep_combine
from ep._src.dispatch import ep_dispatch
from ep._src.group import EpLayerConfig
from ep._src.grouped_matmul import grouped_matmul
from ep._src.handle import EpHandle
from ep._src.prepare import ep_prepare

Activation = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Experts:
  """What an expert computes of a row x.

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

  def hidden(self, up: jax.Array, gate: jax.Array | None) -> jax.Array:
    """Returns h of the two products with x."""
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
  beside: Callable[[], jax.Array] | None = None,
) -> tuple[jax.Array, EpHandle]:
  """Sends tokens to their experts and sums what comes back. Local view.

  `params` holds the rank's own experts: w_up, w_down, and w_gate, b_up, b_gate,
  b_down if there are any. `beside` computes an addend that does not depend on
  the exchange: it stands between dispatch and the experts, so that XLA may run
  it while rows are under way.
  """
  layer = dataclasses.replace(layer, tail="unspecified")
  handle = ep_prepare(layer, topk_idx)
  segments = None
  if experts.deterministic:
    segments = _rows_by_source(handle, topk_idx)
  rows, row_weights = ep_dispatch(handle, tokens, topk_weights)
  addend = None if beside is None else beside()
  with jax.named_scope("experts"):
    early = row_weights if experts.weigh == "early" else None
    multiply = functools.partial(_multiply, handle.group_sizes, segments)
    rows = _apply(experts, params, rows, early, multiply)
  weights = row_weights if experts.weigh == "late" else None
  out = ep_combine(handle, rows, weights=weights)
  return (out if addend is None else out + addend), handle


def _rows_by_source(handle, topk_idx):
  """Returns int32 [L, P]: the rows of each slab by the rank they came from."""
  layer = handle.layer
  experts, axis = layer.group.num_experts, layer.group.axis_name
  ids = jnp.where(topk_idx < 0, experts, topk_idx).ravel()
  sent = jnp.bincount(ids, length=experts).reshape(layer.ep_size, -1)
  (sent,) = compat.vary_together(sent, axes=[axis])
  received = lax.all_to_all(sent, axis, split_axis=0, concat_axis=0)
  # What was dropped is missing at the end of a slab, and what pads it is there.
  ends = jnp.minimum(received.cumsum(axis=0), handle.group_sizes)
  ends = ends.at[-1].set(handle.group_sizes)
  return jnp.diff(ends, axis=0, prepend=0).astype(jnp.int32).T


def _multiply(group_sizes, segments, rows, matrices):
  """Returns the grouped matmul; with segments, each is a slab of its own."""
  if segments is not None:
    group_sizes = segments.ravel()
    matrices = ordered_sum.copies(matrices, segments.shape[1])
  return grouped_matmul(rows, matrices, group_sizes)


def _apply(experts, params, rows, weights, multiply):
  """Returns the experts' outputs, times `weights` unless these are None."""

  def product(rows, name):
    out = multiply(rows, params["w_" + name])
    bias = params.get("b_" + name)
    if bias is None:
      return out
    # Each row gets the bias of its slab: the product of a one with it.
    ones = jnp.ones((rows.shape[0], 1), rows.dtype)
    if name == "down" and weights is not None:
      ones = weights[:, None].astype(rows.dtype)
    return out + multiply(ones, bias[:, None])

  gate = product(rows, "gate") if "w_gate" in params else None
  hidden = experts.hidden(product(rows, "up"), gate)
  if weights is not None:
    hidden = hidden * weights[:, None].astype(hidden.dtype)
  return product(hidden, "down")
