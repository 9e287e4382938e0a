# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's `ep_dispatch` and `ep_combine`, implemented with ep."""

import jax
import numpy as np

import ep


def ep_dispatch(
  cfg: ep.EpLayerConfig,
  topk_idx: jax.Array,
  tokens: jax.Array,
  topk_weights: jax.Array,
  recv_capacity_per_rank: int,
) -> tuple[jax.Array, jax.Array, ep.EpHandle, jax.Array, jax.Array]:
  """Returns TransformerEngine's five results, in the global view.

  They are recv_tokens [R, C, H], recv_topk_weights [R, C], the `EpHandle` as
  handle_mem, token_counts [R, L] with padding, and total_recv_tokens [R, 1].
  """
  layer = cfg.replace(recv_capacity_per_rank=recv_capacity_per_rank)
  handle = ep.ep_prepare(layer, topk_idx, topk_weights)
  rows, row_weights = ep.ep_dispatch(handle, tokens, topk_weights)
  return rows, row_weights, handle, handle.group_sizes, handle.total_recv_tokens


def ep_combine(
  cfg: ep.EpLayerConfig,
  handle_mem: ep.EpHandle,
  token_counts: jax.Array,
  expert_out: jax.Array,
  num_local_tokens: int | tuple[int, ...],
) -> jax.Array:
  """Returns, for each token, the sum of its weighted rows [R, C, H].

  The handle replaces `cfg`, `token_counts` and `num_local_tokens`.

  Raises:
    ValueError: `num_local_tokens` differs from the leading shape of the
      dispatched tokens.
  """
  del cfg, token_counts
  out = ep.ep_combine(handle_mem, expert_out)
  shape = np.atleast_1d(num_local_tokens)
  if out.shape[:-1] != tuple(shape):
    raise ValueError(
      f"num_local_tokens = {num_local_tokens}, but the tokens that were"
      f" dispatched are {out.shape[:-1]}; pass that, and reshape the result."
    )
  return out
