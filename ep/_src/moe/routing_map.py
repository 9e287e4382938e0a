# SPDX-License-Identifier: Apache-2.0
"""topk_from_map: turns a dense routing into the choices of each token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ep._src.base import arguments
from ep._src.moe import router


def topk_from_map(
  routing_map: jax.Array, probs: jax.Array, top_k: int
) -> tuple[jax.Array, jax.Array]:
  """Returns the choices of a dense routing, as `ep_prepare` takes them.

  A dense router, such as Megatron-LM's, marks the experts of each token in a
  map. The choices of a token are the experts that its row marks, in ascending
  order, and their weights are its probabilities of them:

      topk_idx, topk_weights = ep.topk_from_map(routing_map, probs, top_k=2)
      out = ep.moe_layer(layer, tokens, topk_idx, topk_weights, ...)

  Works in both views and communicates nothing: a compiled program shards it as
  it shards the map. Differentiable in `probs`, and a probability that the map
  does not mark gets the gradient 0.

  A row that marks more than `top_k` experts is an error. Where this process
  knows the whole map, that is raised here. In a compiled program, and for a map
  that other processes hold a part of, the row gets weights of NaN and, as ids,
  minus the number of experts that it marks. `ep_prepare` refuses them on every
  rank, with an error that names the rank and the token.

  Args:
    routing_map: bool [..., E], True where the token visits the expert.
    probs: [..., E], any float dtype.
    top_k: K, the largest number of experts of a token, from 1 to E.

  Returns:
    `topk_idx` int32 [..., K], where -1 is an unused choice and stands after all
    others, and `topk_weights` float32 [..., K], where an unused choice has 0.

  Raises:
    ValueError: a shape or `top_k` does not fit, or a row marks too many.
    TypeError: the map is not bool, `probs` not of a float dtype, or `top_k` no
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
  # Of equal logits, the router chooses the lowest ids.
  marks = routing_map.astype(jnp.float32)
  experts, _ = router.route_topk(marks, top_k, normalize=False)
  used = jnp.take_along_axis(routing_map, experts, axis=-1)
  weights = jnp.take_along_axis(probs, experts, axis=-1).astype(jnp.float32)
  count = routing_map.sum(axis=-1, keepdims=True, dtype=jnp.int32)
  too_many = count > top_k
  return (
    jnp.where(too_many, -count, jnp.where(used, experts, -1)),
    jnp.where(too_many, jnp.nan, jnp.where(used, weights, 0.0)),
  )


def _check_rows(op, routing_map, top_k):
  """Raises `ValueError` if a row marks more than `top_k` experts."""
  counts = routing_map.sum(axis=-1)
  if (counts > top_k).any():
    row = tuple(np.argwhere(counts > top_k)[0].tolist())
    raise ValueError(
      f"{op}: routing_map[{', '.join(map(str, row))}] marks {counts[row]}"
      f" experts, {np.flatnonzero(routing_map[row]).tolist()}, but top_k ="
      f" {top_k}; raise top_k, or mark fewer."
    )
