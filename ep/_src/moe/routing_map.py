# SPDX-License-Identifier: Apache-2.0
"""Routing maps of dense routers, as choices for `ep_prepare`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ep._src.base import arguments
from ep._src.moe.router import route_topk


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

  A row that marks more than `top_k` experts is an error. If this process has
  the values of the whole map, the function raises. In a compiled program, or if
  other processes have a part of the map, the row gets NaN weights and, as ids,
  minus the number of marked experts. `ep_prepare` refuses these ids on every
  rank, with an error that names the rank and the token.

  Args:
    routing_map: bool [..., E], True where the token visits the expert.
    probs: [..., E], any float dtype.
    top_k: K, the largest number of experts of a token, from 1 to E.

  Returns:
    `topk_idx` int32 [..., K], with unused choices (-1) after all others, and
    `topk_weights` float32 [..., K], with 0 for unused choices.

  Raises:
    ValueError: a shape or `top_k` does not fit, or a row marks too many.
    TypeError: the map is not bool, `probs` has no float dtype, or `top_k` is no
      integer.
  """
  op = "topk_from_map"
  routing_map, probs = jnp.asarray(routing_map), jnp.asarray(probs)
  top_k = arguments.integer(op, "top_k", top_k)
  if routing_map.dtype != bool:
    raise TypeError(
      f"{op}: routing_map is {routing_map.dtype}, but a map of bools is"
      " expected; pass routing_map != 0."
    )
  if not jnp.issubdtype(probs.dtype, jnp.floating):
    raise TypeError(f"{op}: probs is {probs.dtype}, but a float is expected.")
  arguments.check(
    routing_map.ndim > 0 and routing_map.shape == probs.shape,
    op,
    f"routing_map has shape {routing_map.shape} and probs {probs.shape}, but"
    " both must be [..., E], an entry for each token and expert.",
  )
  num_experts = routing_map.shape[-1]
  arguments.check(
    1 <= top_k <= num_experts,
    op,
    f"top_k = {top_k}, but maps of shape {routing_map.shape} have {num_experts}"
    f" experts; choose between 1 and {num_experts}.",
  )
  is_traced = isinstance(routing_map, jax.core.Tracer)
  if not is_traced and routing_map.is_fully_addressable:
    _check_rows(op, np.asarray(routing_map), top_k)
  # Among equal logits, `route_topk` chooses the lowest ids.
  marks = routing_map.astype(jnp.float32)
  experts, _ = route_topk(marks, top_k, normalize=False)
  used = jnp.take_along_axis(routing_map, experts, axis=-1)
  weights = jnp.take_along_axis(probs, experts, axis=-1).astype(jnp.float32)
  count = routing_map.sum(axis=-1, keepdims=True, dtype=jnp.int32)
  too_many = count > top_k
  return (
    jnp.where(too_many, -count, jnp.where(used, experts, -1)),
    jnp.where(too_many, jnp.nan, jnp.where(used, weights, 0.0)),
  )


def _check_rows(op: str, routing_map: np.ndarray, top_k: int) -> None:
  counts = routing_map.sum(axis=-1)
  if (counts > top_k).any():
    row = tuple(np.argwhere(counts > top_k)[0].tolist())
    raise ValueError(
      f"{op}: routing_map[{', '.join(map(str, row))}] marks {counts[row]}"
      f" experts, {np.flatnonzero(routing_map[row]).tolist()}, but top_k ="
      f" {top_k}; raise top_k, or mark fewer."
    )
