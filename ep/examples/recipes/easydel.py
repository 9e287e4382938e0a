# SPDX-License-Identifier: Apache-2.0
"""EasyDeL's `_sparse_moe_call` on ep.

Theirs gives every EP rank all tokens of its data rank, and the ranks return
what their experts made of them. Here the batch is split over the EP axis as
well, so that a rank routes its own tokens only.
"""

from collections.abc import Callable

import jax

import ep
from ep.examples.recipes import experts


def sparse_moe_call(
  layer: ep.EpLayerConfig,
  hidden_state: jax.Array,
  gate_layer: Callable[[jax.Array], jax.Array],
  wi_kernel: jax.Array,
  wu_kernel: jax.Array,
  wd_kernel: jax.Array,
  wi_bias: jax.Array | None = None,
  wu_bias: jax.Array | None = None,
  wd_bias: jax.Array | None = None,
  *,
  act_fn: Callable[[jax.Array], jax.Array],
  select_hook: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Returns the output [B, S, H] and the router's logits [B * S, E].

  `select_hook` maps the weights [B, S, K] of the chosen experts to those that
  are used; by default, as for their routing TOP_K, it divides them by their
  sum.
  """
  logits = gate_layer(hidden_state.reshape(-1, hidden_state.shape[-1]))
  topk_idx, weights = ep.route_topk(
    logits.reshape(*hidden_state.shape[:-1], -1), layer.top_k, normalize=False
  )
  output, _ = experts.routed(
    layer,
    hidden_state,
    topk_idx,
    (select_hook or _divided_by_sum)(weights),
    (wi_kernel, wu_kernel, wd_kernel),
    (wi_bias, wu_bias, wd_bias),
    activation=act_fn,
    tensor_axis="tp",
  )
  return output, logits


def _divided_by_sum(weights):
  return weights / weights.sum(axis=-1, keepdims=True)
