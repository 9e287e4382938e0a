# SPDX-License-Identifier: Apache-2.0
"""moe_layer: a feed-forward layer of experts, made of ep's ops."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses

import jax

from ep._src import sharding
from ep._src.combine import ep_combine
from ep._src.dispatch import ep_dispatch
from ep._src.group import EpLayerConfig
from ep._src.grouped_matmul import grouped_matmul
from ep._src.prepare import ep_prepare


def moe_layer(
  layer: EpLayerConfig,
  tokens: jax.Array,
  topk_idx: jax.Array,
  topk_weights: jax.Array,
  *,
  w_up: jax.Array,
  w_down: jax.Array,
  w_gate: jax.Array | None = None,
  activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
) -> jax.Array:
  """Applies a mixture-of-experts feed-forward layer, spread over ranks.

  Collective over the EP domain. The result for a token x is the weighted sum of
  the outputs of its experts. The output of expert e is

      (activation(x @ w_gate[e]) * (x @ w_up[e])) @ w_down[e]

  as in Mixtral and DeepSeek, or activation(x @ w_up[e]) @ w_down[e] without
  gates. The routing can be that of `route_topk`:

      topk = ep.route_topk(tokens @ w_router, layer.top_k)
      out = ep.moe_layer(layer, tokens, *topk, w_gate=..., w_up=..., w_down=...)

  It is `ep_prepare`, `ep_dispatch`, three grouped matmuls and `ep_combine`, and
  experts of another kind take the same four steps. Differentiable in tokens,
  weights and matrices, in reverse mode.

  Args:
    layer: the layer's configuration. Its `tail` has no effect: rows after the
      last slab are neither written nor read.
    tokens: float32, bfloat16 or float16 [..., H].
    topk_idx: int32 or int64 [..., K], as in `ep_prepare`.
    topk_weights: float [..., K], as in `ep_dispatch`.
    w_up: [L, H, F] in the local view, [E, H, F] in the global one, sharded
      over the EP axis; this and the next two have the tokens' dtype.
    w_down: [L, F, H], or [E, F, H].
    w_gate: like `w_up`, or None.
    activation: an elementwise function.

  Returns:
    [..., H], like `tokens`.

  Raises:
    ValueError, TypeError: a shape or dtype does not fit.
    ep.EpError: when the program runs; see `ep_prepare`.
  """
  group = layer.group
  op = f'moe_layer(layer "{layer.name}")'
  _check_matrices(layer, op, tokens, w_gate, w_up, w_down)
  layer = dataclasses.replace(layer, tail="unspecified")

  return sharding.call(
    group,
    op,
    _experts,
    [layer, activation],
    [tokens, topk_idx, topk_weights, w_gate, w_up, w_down],
    [sharding.TOKENS] * 3 + [sharding.EXPERTS] * 3,
    sharding.TOKENS,
  )


def _experts(
  layer, activation, tokens, topk_idx, topk_weights, w_gate, w_up, w_down
):
  handle = ep_prepare(layer, topk_idx)
  rows, row_weights = ep_dispatch(handle, tokens, topk_weights)
  hidden = grouped_matmul(rows, w_up, handle.group_sizes)
  if w_gate is None:
    hidden = activation(hidden)
  else:
    gates = grouped_matmul(rows, w_gate, handle.group_sizes)
    hidden = activation(gates) * hidden
  rows = grouped_matmul(hidden, w_down, handle.group_sizes)
  return ep_combine(handle, rows, weights=row_weights)


def _check_matrices(layer, op, tokens, w_gate, w_up, w_down):
  is_local = sharding.is_local_view(layer.group, op)
  experts = layer.num_local_experts if is_local else layer.group.num_experts
  hidden, inner = tokens.shape[-1], w_up.shape[-1]
  expected = {
    "w_gate": (w_gate, (experts, hidden, inner)),
    "w_up": (w_up, (experts, hidden, inner)),
    "w_down": (w_down, (experts, inner, hidden)),
  }
  for name, (matrices, shape) in expected.items():
    if matrices is None:
      continue
    if matrices.shape != shape:
      view = "a rank's own experts" if is_local else "all experts"
      raise ValueError(
        f"{op}: {name} has shape {matrices.shape}, but {shape} is expected:"
        f" a matrix for each of {view}, for tokens of hidden size {hidden} and"
        f" w_up of inner size {inner}."
      )
    if matrices.dtype != tokens.dtype:
      raise TypeError(
        f"{op}: {name} is {matrices.dtype}, but tokens are {tokens.dtype};"
        " convert one, so that it is clear which precision is meant."
      )
