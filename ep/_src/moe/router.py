# SPDX-License-Identifier: Apache-2.0
"""Routers, which choose the experts of each token and their weights.

Routers do not communicate: a compiled program shards them like the logits. Any
function that returns ids and weights of these shapes can replace `route_topk`.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
from typing import Any, Literal, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from ep._src.base import arguments, arrays, compat
from ep._src.ops.prepare import keep_routing

Score = Literal["softmax", "sigmoid", "sqrtsoftplus"]


class Rule(NamedTuple):
  """The static arguments of `route_topk`, which `MoEConfig` also has."""

  top_k: int
  score: Score
  normalize: bool
  scale: Any  # a number, or an array
  num_groups: int
  top_groups: int
  group_best: int

  def check(self, op: str, num_experts: int) -> None:
    """Raises unless the arguments of the choice are valid and fit together."""
    top_k, num_groups, top_groups = self.top_k, self.num_groups, self.top_groups
    for name in ("num_groups", "top_groups", "group_best"):
      arguments.integer(op, name, getattr(self, name))
    arguments.check(
      1 <= top_k <= num_experts,
      op,
      f"top_k = {top_k}, but it must be in 1..num_experts = {num_experts}.",
    )
    arguments.check(
      num_groups >= 1 and num_experts % num_groups == 0,
      op,
      f"num_groups = {num_groups} does not divide {num_experts} experts into "
      "groups of equal size; choose a divisor.",
    )
    arguments.check(
      1 <= top_groups <= num_groups,
      op,
      f"top_groups = {top_groups}; choose between 1 and num_groups = "
      f"{num_groups}.",
    )
    size = num_experts // num_groups
    arguments.check(
      top_k <= top_groups * size,
      op,
      f"top_k = {top_k}, but top_groups = {top_groups} groups of {size} experts"
      f" hold only {top_groups * size}; raise top_groups or lower num_groups.",
    )
    arguments.check(
      top_groups == num_groups or 1 <= self.group_best <= size,
      op,
      f"group_best = {self.group_best}, but groups have {size} experts; choose "
      f"between 1 and {size}.",
    )

  def check_call(
    self,
    op: str,
    num_experts: int,
    lead: tuple[int, ...],
    forced_idx: Any,
    captured_idx: Any,
  ) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns both kinds of ids as arrays, of which only one may be given.

    Warns if every choice has the same weight.
    """
    arguments.check(
      forced_idx is None or captured_idx is None,
      op,
      "got forced_idx and captured_idx; pass one of them. An id of -1 is no"
      " expert in forced_idx, and in captured_idx a token that was not"
      " captured.",
    )
    if self.normalize and self.top_k == 1 < num_experts:
      arguments.warn(
        f"{op}: top_k = 1 and normalize = True give every choice the same"
        " weight, so the weights have no gradient, and the router is not"
        " trained by the output of its experts; pass normalize=False, as Switch"
        " Transformer and Llama 4 do."
      )
    shape = *lead, self.top_k
    return (
      arrays.shaped(op, "forced_idx", forced_idx, shape, jnp.integer),
      arrays.shaped(op, "captured_idx", captured_idx, shape, jnp.integer),
    )


def route_topk(
  logits: jax.Array,
  top_k: int,
  *,
  score: Score = "softmax",
  normalize: bool = True,
  scale: float = 1.0,
  selection_bias: jax.Array | None = None,
  mask: jax.Array | None = None,
  num_groups: int = 1,
  top_groups: int = 1,
  group_best: int = 2,
  forced_idx: jax.Array | None = None,
  captured_idx: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Chooses `top_k` experts for each token, and their weights.

  The scores of a token are `score(logits)`. The token gets the experts with the
  highest scores, best first; of equal scores, the lowest id first. The weights
  are the scores of these experts, divided by their sum if `normalize`, times
  `scale`. Models use these arguments:

      Mixtral (softmax over the chosen logits)   the defaults
      Switch Transformer, OLMoE                  normalize=False
      Llama 4                                    score="sigmoid",
                                                 normalize=False
      DeepSeek-V3                                score="sigmoid", scale=2.5,
                                                 selection_bias=bias,
                                                 num_groups=8, top_groups=4

  The computation is in float32, without overflow or division by zero. Weights
  are differentiable in `logits`; the choice has no gradient. The order is the
  order of `lax.top_k`, also with NaNs: a NaN of positive sign is before all
  numbers, a NaN of negative sign after them. The ids of a token with NaNs are
  distinct, and its weights are NaN.

  Args:
    logits: `[..., E]`, any float dtype.
    top_k: K, from 1 to E.
    score: "softmax" over all experts, or of each expert alone: "sigmoid", or
      "sqrtsoftplus", the square root of softplus, as in DeepSeek-V4.
    normalize: whether the weights of a token sum to `scale`. With top_k = 1 the
      weight is then always `scale`, the router gets no gradient, and
      `route_topk` warns: pass False.
    scale: a factor of all weights.
    selection_bias: `[E]`, added to the scores for the choice, not for the
      weights, so it gets no gradient. To balance the load without a loss term,
      raise it for idle experts and lower it for busy ones between steps (Wang
      et al., "Auxiliary-Loss-Free Load Balancing Strategy for
      Mixture-of-Experts", arXiv 2408.15664).
    mask: `[...]` bool; tokens where it is False, such as the padding of a
      sequence, get ids -1 and weights 0 and are not sent. Their logits get no
      gradient, and may be NaN.
    num_groups: G; group g has the experts from `g * E / G` to before
      `(g + 1) * E / G`. G divides E.
    top_groups: the number of groups, from 1 to G, from which a token may choose
      experts. A token gets the groups with the highest scores; of equal scores,
      the lowest group first.
    group_best: the score of a group is the sum of its `group_best` best scores,
      with `selection_bias` added: 2 in DeepSeek-V3 (arXiv 2412.19437), 1 in
      DeepSeek-V2 (arXiv 2405.04434). It has no effect if `top_groups` is G.
    forced_idx: int `[..., K]`, the ids to return, for replaying a routing, for
      tests and for generated loads. Arguments that affect only the choice are
      then ignored. An entry of -1 is unused: its weight is 0, and the other
      weights are normalized without it. `ep_prepare` checks the ids.
    captured_idx: int `[..., K]`, the ids that an inference engine captured, for
      replaying its routing. A token with an id of -1 was not captured: this
      router chooses all of its experts. Not with `forced_idx`, where -1 is no
      expert. `ep_prepare` checks the ids.

  Returns:
    `topk_idx` int32 `[..., K]`, distinct within a token, and `topk_weights`
    float32 `[..., K]`.

  Raises:
    ValueError: `top_k`, `score`, a group, the bias or a shape is invalid.
    TypeError: an argument has another type or dtype.
  """
  op = "route_topk"
  top_k = arguments.integer(op, "top_k", top_k)
  logits = checked_logits(op, logits, mask)
  *lead, num_experts = logits.shape
  check_score(op, "score", score)
  arguments.flag(op, "normalize", normalize)
  if isinstance(scale, jax.Array):  # such as a learned scale
    scale = scale.astype(jnp.float32)
  else:
    scale = arguments.number(op, "scale", scale)
  bias = arrays.shaped(
    op, "selection_bias", selection_bias, (num_experts,), jnp.floating
  )
  rule = Rule(
    top_k, score, normalize, scale, num_groups, top_groups, group_best
  )
  rule.check(op, num_experts)
  ids = rule.check_call(op, num_experts, (*lead,), forced_idx, captured_idx)
  return choose(rule, logits, bias, mask, *ids)


def choose(
  rule: Rule,
  logits: jax.Array,
  selection_bias: jax.Array | None,
  mask: jax.Array | None,
  forced_idx: jax.Array | None,
  captured_idx: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """Does what `route_topk` does, for arguments that are checked already."""
  logits = masked_float32(logits, mask)
  log_scores = LOG_SCORES[rule.score](logits)
  forced_idx, captured_idx = jax.tree.map(
    arrays.int32, (forced_idx, captured_idx)
  )
  if forced_idx is not None:
    topk_idx = forced_idx
  else:
    order, scores = lax.stop_gradient((logits, jnp.exp(log_scores)))
    # Logits have the same order as scores, but do not saturate.
    if selection_bias is not None:
      bias = lax.stop_gradient(selection_bias).astype(jnp.float32)
      order = scores = scores + jnp.broadcast_to(bias, scores.shape)
    allowed = None
    if rule.top_groups < rule.num_groups:
      allowed = _of_best_groups(scores, rule)
    topk_idx = _best(order, rule.top_k, allowed)
  if captured_idx is not None:
    is_captured = (captured_idx != -1).all(axis=-1, keepdims=True)
    topk_idx = jnp.where(is_captured, captured_idx, topk_idx)
  if mask is not None:
    topk_idx = jnp.where(mask[..., None], topk_idx, -1)
  topk_idx = keep_routing(topk_idx)
  chosen = _chosen(log_scores, topk_idx)
  if mask is None and forced_idx is None:
    return topk_idx, _weights(rule, chosen)
  # Unused choices get the least float, whose exp adds 0 to the sum. With -inf,
  # a token without choices would get NaN.
  used = topk_idx >= 0
  chosen = jnp.where(used, chosen, jnp.finfo(jnp.float32).min)
  weights = _weights(rule, chosen)
  return topk_idx, jnp.where(used, weights, 0.0)


def _weights(rule: Rule, chosen: jax.Array) -> jax.Array:
  """Returns the weights [..., K] of choices with these logarithms of scores.

  `jax.nn.softmax` divides, which XLA:CPU replaces by a product in some
  programs. A difference of logarithms rounds equally in all programs.
  """
  if rule.normalize:
    chosen -= lax.stop_gradient(chosen.max(-1, keepdims=True))
    chosen -= jnp.log(jnp.exp(chosen).sum(-1, keepdims=True))
  weights: jax.Array = jnp.exp(chosen) * rule.scale
  return weights


def checked_logits(
  op: str, logits: jax.Array, mask: jax.Array | None
) -> jax.Array:
  """Returns logits; raises unless they are floats, and a mask fits them."""
  logits = arrays.array(op, "logits", logits)
  arrays.check_kind(op, "logits", logits, jnp.floating)
  arrays.shaped(op, "mask", mask, logits.shape[:-1], jnp.bool_)
  return logits


def masked_float32(logits: jax.Array, mask: jax.Array | None) -> jax.Array:
  """Returns float32 logits, with zeros for masked tokens.

  So the logits of masked tokens, even NaNs, reach no value and no gradient.
  """
  logits = logits.astype(jnp.float32)
  return logits if mask is None else jnp.where(mask[..., None], logits, 0.0)


@jax.custom_jvp
def _chosen(values: jax.Array, places: jax.Array) -> jax.Array:
  """Gathers [..., K] at the distinct indices `places` of `values` [..., E].

  The derivative is a masked sum, because the transpose of a gather is a
  scatter, which XLA:CPU computes by a loop over all indices.
  """
  return jnp.take_along_axis(values, places, axis=-1)


@_chosen.defjvp
def _chosen_jvp(
  primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
  return _chosen(*primals), _sum_of_chosen(tangents[0], primals[1])


@functools.partial(jax.checkpoint, prevent_cse=False)  # saves only `places`
def _sum_of_chosen(values: jax.Array, places: jax.Array) -> jax.Array:
  is_chosen = jax.nn.one_hot(places, values.shape[-1], dtype=bool)
  return jnp.where(is_chosen, values[..., None, :], 0.0).sum(axis=-1)


def _of_best_groups(scores: jax.Array, rule: Rule) -> jax.Array:
  """Returns bool `[..., E]`, whether an expert is in one of the best groups."""
  num_groups = rule.num_groups
  lead, num_experts = scores.shape[:-1], scores.shape[-1]
  groups = scores.reshape(*lead, num_groups, num_experts // num_groups)
  best = jnp.take_along_axis(groups, _best(groups, rule.group_best), axis=-1)
  chosen = _best(best.sum(axis=-1), rule.top_groups)
  is_chosen = jax.nn.one_hot(chosen, num_groups, dtype=bool).any(axis=-2)
  return jnp.repeat(is_chosen, num_experts // num_groups, axis=-1)


@functools.partial(jax.jit, static_argnames="k")
def _best(
  values: jax.Array, k: int, allowed: jax.Array | None = None
) -> jax.Array:
  """Returns the indices `[..., k]` of the largest float32 values `[..., n]`.

  The result is the same as with `lax.top_k`. But XLA gathers the operand of
  `lax.top_k` on every device. So where arrays may be sharded, `_best` runs
  argmax k times, which XLA shards like its operand.

  Args:
    values: float32 `[..., n]`.
    k: at most the number of allowed entries.
    allowed: bool `[..., n]`, or None for all.
  """
  if allowed is None and compat.is_on_one_device():
    return lax.top_k(values, k)[1]
  # Integer keys in the order of `lax.top_k`: -NaN, numbers with -0 before +0,
  # NaN. The least integer marks entries that are not allowed or already chosen.
  # (So the two negative NaNs of the largest payloads have the same key.)
  least = jnp.iinfo(jnp.int32).min
  bits = lax.bitcast_convert_type(values, jnp.int32)
  keys = jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)
  keys = jnp.maximum(keys, least + 1)
  if allowed is not None:
    keys = jnp.where(allowed, keys, least)
  places = []
  for _ in range(k):
    places.append(jnp.argmax(keys, axis=-1).astype(jnp.int32))
    is_chosen = jax.nn.one_hot(places[-1], keys.shape[-1], dtype=bool)
    keys = jnp.where(is_chosen, least, keys)
  return jnp.stack(places, axis=-1)


def _log_sqrtsoftplus(logits: jax.Array) -> jax.Array:
  # Below -16, log(softplus(x)) rounds to x, but softplus(x) may underflow.
  is_low = logits < -16
  logs = jnp.log(jax.nn.softplus(jnp.where(is_low, 0.0, logits)))
  return 0.5 * jnp.where(is_low, logits, logs)


LOG_SCORES: dict[Score, Callable[[jax.Array], jax.Array]] = {
  "softmax": jax.nn.log_softmax,
  "sigmoid": jax.nn.log_sigmoid,
  "sqrtsoftplus": _log_sqrtsoftplus,
}
check_score = arguments.one_of(*LOG_SCORES)


def topk_from_map(
  routing_map: jax.Array, probs: jax.Array, top_k: int
) -> tuple[jax.Array, jax.Array]:
  """Converts a dense routing map to the choices that `ep_prepare` takes.

  A dense router, such as Megatron-LM's, marks the experts of each token in a
  map. The choices of a token are the experts that its row marks, in ascending
  order, with the weights in `probs`:

      topk_idx, topk_weights = ep.topk_from_map(routing_map, probs, top_k=2)
      out = ep.moe_layer(layer, tokens, topk_idx, topk_weights, ...)

  Works in both views without communication: a compiled program shards it like
  the map. Differentiable in `probs`; probabilities of unmarked experts get the
  gradient 0.

  A row that marks more than `top_k` experts gets NaN weights and, as ids, minus
  the number of marked experts. `ep_prepare` refuses these ids on every rank,
  with an error that names the rank and the token.

  Args:
    routing_map: bool [..., E], True where the token visits the expert.
    probs: [..., E], any float dtype.
    top_k: K, the largest number of experts of a token, from 1 to E.

  Returns:
    `topk_idx` int32 [..., K], with unused choices (-1) after all others, and
    `topk_weights` float32 [..., K], with 0 for unused choices.

  Raises:
    ValueError: a shape or `top_k` does not fit.
    TypeError: the map is not bool, `probs` has no float dtype, or `top_k` is no
      integer.
  """
  op = "topk_from_map"
  top_k = arguments.integer(op, "top_k", top_k)
  routing_map = arrays.array(op, "routing_map", routing_map)
  shape = routing_map.shape
  arguments.check(
    len(shape) > 0, op, "routing_map has no axes, but [..., E] is expected."
  )
  arrays.check_kind(op, "routing_map", routing_map, jnp.bool_)
  probs = arrays.shaped(op, "probs", probs, shape, jnp.floating)
  rule = Rule(top_k, "softmax", False, 1.0, 1, 1, 1)
  rule.check(op, shape[-1])
  # Among equal logits, `choose` takes the lowest ids.
  marks = routing_map.astype(jnp.float32)
  experts, _ = choose(rule, marks, None, None, None, None)
  used = jnp.take_along_axis(routing_map, experts, axis=-1)
  weights = jnp.take_along_axis(probs, experts, axis=-1).astype(jnp.float32)
  count = routing_map.sum(axis=-1, keepdims=True, dtype=jnp.int32)
  too_many = count > top_k
  return (
    jnp.where(too_many, -count, jnp.where(used, experts, -1)),
    jnp.where(too_many, jnp.nan, jnp.where(used, weights, 0.0)),
  )
