# SPDX-License-Identifier: Apache-2.0
"""Losses of the router, and the metrics of a layer.

A loss is a mean over tokens, or over sequences. Given the mesh axes of the
ranks, it is the loss of the whole batch, equal on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from ep._src.base import arguments, arrays, errors
from ep._src.base.group import Sizes
from ep._src.lax import ordered_sum
from ep._src.moe import router
from ep._src.moe.config import MoEConfig
from ep._src.ops.handle import Routing

_Axes = str | Sequence[str]
_Psum = Callable[[Any, _Axes], Any]


class _Terms(NamedTuple):
  """The sums of one rank, and the loss as a function of all ranks' sums."""

  sums: tuple[jax.Array, ...]  # float32, of one rank
  loss: Callable[..., jax.Array]

  def over(self, axes: _Axes, psum: _Psum) -> jax.Array:
    """Returns the loss over all ranks of the mesh axes `axes`."""
    return self.loss(*(psum(self.sums, axes) if axes else self.sums))


def _psum_once(arrays: Any, axes: _Axes) -> Any:
  """Returns `lax.psum` of float32 arrays, as one collective."""
  flat, unravel = ravel_pytree(arrays)
  return unravel(lax.psum(flat, axes))


def load_balancing_loss(
  logits: jax.Array,
  topk_idx: jax.Array,
  *,
  score: router.Score = "softmax",
  mask: jax.Array | None = None,
  axis_name: _Axes = (),
  psum: _Psum = lax.psum,
) -> jax.Array:
  """Returns how unevenly a batch loads the experts: 1 is even, E is worst.

  `E * sum_e f_e P_e`, where `f_e` is the fraction of all choices that fell on
  expert e, and `P_e` the mean of its score over all tokens; the gradient
  reaches `logits` through P (Fedus et al., "Switch Transformers", arXiv
  2101.03961, equations 4 to 6, with f over K choices instead of one).

  Args:
    logits: `[..., E]`, any float dtype.
    topk_idx: integers `[..., K]`, -1 where a choice is unused.
    score: the `score` of `route_topk`. Scores other than "softmax" are divided
      by their sum over the experts.
    mask: `[...]` bool; tokens where it is False do not count and get no
      gradient. If all tokens are masked, the loss is 0.
    axis_name: inside `jax.shard_map`, the axes that tokens are sharded over.
      The loss is then the loss of the whole batch, equal on every rank; without
      axes, it is the loss of the rank's tokens. With `check_vma=True`, the
      default, its gradient is also of the whole batch.
    psum: the function that adds over these axes; `ep.ordered_psum` adds in a
      fixed order.

  Returns:
    A float32 scalar.

  Raises:
    ValueError: `score` or a shape is invalid.
    TypeError: the logits are no floats, or the mask has no bools.
  """
  op = "load_balancing_loss"
  logits, topk_idx = _checked(op, logits, topk_idx, score, mask)
  terms = _balance(logits, topk_idx, score, mask, "batch")
  return terms.over(axis_name, psum)


def sequence_balancing_loss(
  logits: jax.Array,
  topk_idx: jax.Array,
  *,
  score: router.Score = "softmax",
  mask: jax.Array | None = None,
  axis_name: _Axes = (),
  psum: _Psum = lax.psum,
) -> jax.Array:
  """Returns the mean of the `load_balancing_loss` of each sequence.

  This loss balances the load within each sequence, not only in the batch
  (DeepSeek-V3, with "sigmoid" scores: arXiv 2412.19437, equations 17 to 20
  without the factor alpha).

  Args:
    logits: `[..., S, E]`, any float dtype, of sequences of S tokens. In
      `jax.shard_map` a rank holds whole sequences.
    topk_idx: integers `[..., S, K]`, -1 where a choice is unused.
    mask: `[..., S]` bool; a sequence without unmasked tokens does not count.
    score, axis_name, psum: as in `load_balancing_loss`.

  Returns:
    A float32 scalar.

  Raises:
    ValueError, TypeError: as in `load_balancing_loss`.
  """
  op = "sequence_balancing_loss"
  logits, topk_idx = _checked(op, logits, topk_idx, score, mask)
  arguments.check(
    logits.ndim >= 2,
    op,
    f"logits have shape {logits.shape}; the last two axes must be the tokens "
    "of a sequence and the experts.",
  )
  terms = _balance(logits, topk_idx, score, mask, "sequence")
  return terms.over(axis_name, psum)


def router_z_loss(
  logits: jax.Array,
  *,
  mask: jax.Array | None = None,
  axis_name: _Axes = (),
  psum: _Psum = lax.psum,
) -> jax.Array:
  """Returns the mean over tokens of `logsumexp(logits)**2`.

  This loss keeps logits small (Zoph et al., "ST-MoE", arXiv 2202.08906,
  equation 5).

  Args:
    logits: `[..., E]`, any float dtype.
    mask, axis_name, psum: as in `load_balancing_loss`.

  Returns:
    A float32 scalar.

  Raises:
    ValueError, TypeError: as in `load_balancing_loss`.
  """
  logits = router.checked_logits("router_z_loss", logits, mask)
  return _logit_size(logits, mask).over(axis_name, psum)


def _checked(
  op: str,
  logits: jax.Array,
  topk_idx: jax.Array,
  score: router.Score,
  mask: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """Returns logits and int32 ids; raises unless a loss's arguments fit."""
  router.check_score(op, "score", score)
  logits = router.checked_logits(op, logits, mask)
  topk_idx = arrays.integers(op, "topk_idx", topk_idx)
  arguments.check(
    topk_idx.shape[:-1] == logits.shape[:-1],
    op,
    f"topk_idx has shape {topk_idx.shape}, but logits {logits.shape}; they "
    "must have the same tokens.",
  )
  return logits, topk_idx


def _balance(
  logits: jax.Array,
  topk_idx: jax.Array,
  score: router.Score,
  mask: jax.Array | None,
  balance: str,
) -> _Terms:
  """Returns the terms of the loss that balances a "batch" or a "sequence"."""
  parts = _per_token(logits, topk_idx, score, mask)
  if balance == "batch":
    lead = tuple(range(logits.ndim - 1))
    return _Terms(tuple(x.sum(lead) for x in parts), _imbalance)
  choices, scores, tokens = (x.sum(logits.ndim - 2) for x in parts)
  imbalance = _imbalance(choices, scores, tokens)
  return _mean(imbalance, tokens > 0)


def _logit_size(logits: jax.Array, mask: jax.Array | None) -> _Terms:
  """Returns the terms of `router_z_loss`."""
  logits = router.masked_float32(logits, mask)
  return _mean(jax.nn.logsumexp(logits, axis=-1) ** 2, mask)


def _per_token(
  logits: jax.Array,
  topk_idx: jax.Array,
  score: router.Score,
  mask: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the terms of the balancing losses for each token.

  The terms are the choices of each expert `[..., E]`, the normalized scores
  `[..., E]`, and ones `[...]`; or zeros for masked tokens. All are float32, so
  that one all-reduce sums them.
  """
  logits = router.masked_float32(logits, mask)
  # A softmax of log scores divides scores by their sum, without underflow.
  logs = logits if score == "softmax" else router.LOG_SCORES[score](logits)
  choices = jax.nn.one_hot(topk_idx, logits.shape[-1], dtype=jnp.float32)
  choices = choices.sum(axis=-2)
  scores = jnp.exp(jax.nn.log_softmax(logs))  # as in route_topk
  counts = _counts(logits[..., 0], mask)
  return choices * counts[..., None], scores * counts[..., None], counts


def _imbalance(
  choices: jax.Array, scores: jax.Array, tokens: jax.Array
) -> jax.Array:
  """Returns `E * sum_e f_e P_e`, given sums over tokens; 0 without tokens."""
  f = choices / jnp.maximum(choices.sum(axis=-1, keepdims=True), 1.0)
  p = scores / jnp.maximum(tokens, 1.0)[..., None]
  return scores.shape[-1] * (f * p).sum(axis=-1)


def _mean(values: jax.Array, mask: jax.Array | None) -> _Terms:
  """Returns the terms of the mean of finite values where `mask` is True.

  Without such values the mean is 0. Each rank divides its terms by its number
  of values. So without a partly masked rank, the ranks' count is the number of
  ranks with values. If it is a power of two, dividing by it is exact, and a
  mean of means, of fewer ranks each, has the same bits.
  """
  counts = _counts(values, mask)
  size = max(values.size, 1)
  return _Terms(
    ((values * counts).sum() / size, counts.sum() / size),
    lambda total, count: total / jnp.where(count > 0, count, 1.0),
  )


def _counts(values: jax.Array, mask: jax.Array | None) -> jax.Array:
  return jnp.ones_like(values) if mask is None else mask.astype(jnp.float32)


class Metrics(NamedTuple):
  """Metrics of a layer in a step, over all ranks' tokens; equal on all ranks.

  Attributes:
    load: float32 [E], choices of each expert, including dropped ones.
    aux_loss: float32 [], the balancing loss; 1 if the load is even. It has a
      gradient, like `z_loss`.
    z_loss: float32 [], the mean of `logsumexp(logits)**2`.
    drops: int32 [E], dropped choices of each expert.
    max_rank_rows: int32 [], the rows of the busiest rank, including dropped
      ones.
    fault: int32 [24], the first fault of the step's routing, with "xla"; zeros
      are none. `ep.check` raises it.
  """

  load: jax.Array
  aux_loss: jax.Array
  z_loss: jax.Array
  drops: jax.Array
  max_rank_rows: jax.Array
  fault: jax.Array

  @property
  def dropped(self) -> jax.Array:
    """int32 [], dropped choices of all experts."""
    return self.drops.sum(axis=-1, dtype=jnp.int32)


def measure(
  sizes: Sizes,
  config: MoEConfig,
  logits: jax.Array,
  topk_idx: jax.Array,
  mask: jax.Array | None,
  routing: Routing,
  experts: jax.Array,
  fault: jax.Array | None,
) -> Metrics:
  """Returns the metrics of a step, by one all-reduce over all ranks.

  The arrays of `routing` may have a leading axis of chunks. `experts` is the
  expert of each slot of the rank. `fault` is a fault that was found before the
  routing's.
  """
  axes, E = sizes.group.token_axes, config.num_experts
  load = jax.nn.one_hot(topk_idx, E, dtype=jnp.float32)
  dropped = routing.dropped_counts.reshape(-1, len(experts))
  drops = jnp.zeros(E, jnp.int32)
  if sizes.overflow != "chunk":  # chunks drop nothing
    of_slots = dropped.sum(0, dtype=jnp.int32)[:, None]
    is_expert = jax.nn.one_hot(experts, E, dtype=bool)
    drops = jnp.where(is_expert, of_slots, 0).sum(0, dtype=jnp.int32)
  rows = routing.total_recv_tokens.sum(dtype=jnp.int32)
  of_ranks = jnp.zeros(lax.axis_size(axes), jnp.int32)
  sums: dict[str, Any] = dict(
    load=load.reshape(-1, E).sum(axis=0),
    drops=_halves(drops),
    rows=_halves(of_ranks.at[lax.axis_index(axes)].set(rows)),
  )
  if sizes.connection.flags:
    sums["faults"] = _halves(_fault_of_domain(sizes, routing, fault))
  terms = dict(
    aux_loss=_balance(logits, topk_idx, config.score, mask, config.balance),
    z_loss=_logit_size(logits, mask),
  )
  # With one vector of sums, XLA would round differently in the local and the
  # global view. So a deterministic layer sums one array after another.
  psum = ordered_sum.ordered_psum if config.deterministic else _psum_once
  sums, of_terms = psum(
    (sums, {name: term.sums for name, term in terms.items()}), axes
  )
  fault = jnp.zeros(errors.FAULT_WORDS, jnp.int32)
  if sizes.connection.flags:
    fault = errors.carried_fault(_whole(sums["faults"]))
  return Metrics(
    load=sums["load"],
    drops=_whole(sums["drops"]),
    max_rank_rows=_whole(sums["rows"]).max(),
    fault=fault,
    **{name: term.loss(*of_terms[name]) for name, term in terms.items()},
  )


def _fault_of_domain(
  sizes: Sizes, routing: Routing, fault: jax.Array | None
) -> jax.Array:
  """Returns int32 [D, 24]: in the first rank of a domain, its domain's fault.

  The sum over all ranks has the faults of all D domains.
  """
  group = sizes.group
  found = errors.carried_fault(routing.mem)
  if fault is not None:
    found = jnp.where(fault[0] > 0, fault, found)
  found = jnp.where(lax.axis_index(group.axis_name) == 0, found, 0)
  faults = jnp.zeros((lax.axis_size(group.data_axes), *found.shape), jnp.int32)
  return faults.at[lax.axis_index(group.data_axes)].set(found)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Splits int32 into float32 halves that 4096 ranks can sum exactly."""
  return (x >> 12).astype(jnp.float32), (x & 4095).astype(jnp.float32)


def _whole(halves: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Inverts `_halves`: returns int32 sums, given the sums of both halves."""
  high, low = (x.astype(jnp.int32) for x in halves)
  return (high << 12) + low
