# SPDX-License-Identifier: Apache-2.0
"""Routers, which turn logits into the experts and weights of each token.

Nothing here communicates, except the mean of `load_balancing_loss` when it is
given axes. Any function that returns ids and weights of these shapes can take
the place of `route_topk`.
"""

from collections.abc import Sequence
from typing import Literal

import jax
from jax import lax
import jax.numpy as jnp

from ep._src import arguments


def route_topk(
  logits: jax.Array,
  top_k: int,
  *,
  score: Literal["softmax", "sigmoid"] = "softmax",
  normalize: bool = True,
  scale: float = 1.0,
  selection_bias: jax.Array | None = None,
  mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Chooses `top_k` experts for each token, and the weights to sum them with.

  The scores of a token are `score(logits)`. Its experts are those of the
  highest score, best first; of equals, the lowest id first. Their weights are
  their scores, divided by their sum if `normalize`, times `scale`. In the
  literature's terms:

      Mixtral (softmax over the chosen logits)   the defaults
      Switch Transformer, OLMoE                  normalize=False
      DeepSeek-V3                                score="sigmoid", scale=2.5,
                                                 selection_bias=bias

  Everything is computed in float32, and without the overflow or division by
  zero that scores themselves could meet. Weights are differentiable in
  `logits`; the choice has no gradient.

  Args:
    logits: `[..., E]`, any float dtype.
    top_k: K, from 1 to E.
    score: "softmax" over all experts, or each expert's own "sigmoid".
    normalize: whether the weights of a token sum to `scale`.
    scale: factor on all weights.
    selection_bias: `[E]`, added to the scores for the choice, not for the
      weights, so it gets no gradient. Raising it for idle experts and lowering
      it for busy ones between steps balances load without a loss term (Wang et
      al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts",
      arXiv 2408.15664).
    mask: `[...]` bool; a token where it is False, such as one that pads a
      sequence, gets ids -1 and weights 0 and is sent nowhere.

  Returns:
    `topk_idx` int32 `[..., K]`, distinct within a token, and `topk_weights`
    float32 `[..., K]`.

  Raises:
    ValueError: for a `top_k`, `score` or shape that cannot be.
    TypeError: `top_k` is no integer.
  """
  num_experts = logits.shape[-1]
  top_k = arguments.integer("route_topk", "top_k", top_k)
  if not 1 <= top_k <= num_experts:
    raise ValueError(
      f"route_topk: top_k = {top_k}, but logits of shape {logits.shape} hold "
      f"{num_experts} experts; choose between 1 and {num_experts}."
    )
  if score not in _LOG_SCORES:
    raise ValueError(
      f"route_topk: score = {score!r}; it must be one of {[*_LOG_SCORES]}."
    )
  if selection_bias is not None and selection_bias.shape != (num_experts,):
    raise ValueError(
      f"route_topk: selection_bias has shape {selection_bias.shape}; it must "
      f"hold one number per expert, shape {(num_experts,)}."
    )
  if mask is not None and mask.shape != logits.shape[:-1]:
    raise ValueError(
      f"route_topk: mask has shape {mask.shape}; it must hold one bool per "
      f"token, shape {logits.shape[:-1]}."
    )
  logits = logits.astype(jnp.float32)
  log_scores = _LOG_SCORES[score](logits)
  # Logits order as their scores do, but do not saturate.
  order = (
    logits if selection_bias is None else (jnp.exp(log_scores) + selection_bias)
  )
  _, topk_idx = lax.top_k(lax.stop_gradient(order), top_k)
  chosen = jnp.take_along_axis(log_scores, topk_idx, axis=-1)
  weights = jax.nn.softmax(chosen) if normalize else jnp.exp(chosen)
  weights *= scale
  if mask is not None:
    topk_idx = jnp.where(mask[..., None], topk_idx, -1)
    weights = jnp.where(mask[..., None], weights, 0.0)
  return topk_idx, weights


def load_balancing_loss(
  logits: jax.Array,
  topk_idx: jax.Array,
  *,
  axis_name: str | Sequence[str] = (),
) -> jax.Array:
  """Returns how unevenly a batch loads the experts: 1 if evenly, up to E.

  `E * sum_e f_e P_e`, where `f_e` is the fraction of all choices that fell on
  expert e, and `P_e` the mean of its softmax score over all tokens; the
  gradient reaches `logits` through P (Fedus et al., "Switch Transformers",
  arXiv 2101.03961, equations 4 to 6, with f over K choices instead of one).

  Args:
    logits: `[..., E]`.
    topk_idx: `[..., K]`, -1 where a choice is unused.
    axis_name: inside `jax.shard_map`, the axes that tokens are sharded over.
      The loss is then that of the whole batch, the same on every rank; without
      it, each rank's own.

  Returns:
    A float32 scalar.
  """
  num_experts = logits.shape[-1]
  scores = jax.nn.softmax(logits.astype(jnp.float32))
  choices = jax.nn.one_hot(topk_idx, num_experts).reshape(-1, num_experts)
  f = choices.sum(axis=0)
  p = scores.reshape(-1, num_experts).mean(axis=0)
  if axis_name:
    f, p = lax.psum(f, axis_name), lax.pmean(p, axis_name)
  return num_experts * jnp.sum(f / jnp.maximum(f.sum(), 1.0) * p)


def router_z_loss(logits: jax.Array) -> jax.Array:
  """Returns the mean over tokens of `logsumexp(logits)**2`.

  As a loss it keeps logits small (Zoph et al., "ST-MoE", arXiv 2202.08906,
  equation 5). It is a plain mean: average it over ranks like any other loss.

  Args:
    logits: `[..., E]`.

  Returns:
    A float32 scalar.
  """
  return jnp.mean(jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1) ** 2)


_LOG_SCORES = {
  "softmax": jax.nn.log_softmax,
  "sigmoid": jax.nn.log_sigmoid,
}
