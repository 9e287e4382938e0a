# SPDX-License-Identifier: Apache-2.0
"""overflow="chunk": tokens go through the experts in parts if they do not fit.

Any routing of T' tokens of each rank fits into a capacity of C rows if

    P * T' * min(K, L) + L * (alignment - 1) <= C

If C has room for any routing of all tokens, there is nothing to decide.
Otherwise a step that fits is one exchange, and a step that does not fit is a
loop over as few chunks of tokens as this bound allows. All ranks of a domain
take the same branch: they know the rows of the busiest rank from `ep_prepare`.
Ranks of other domains may take the other branch, so nothing here may be a
collective over other axes.

The derivative is written by hand, because the derivative of `lax.cond` would
return a copy of the matrices from the forward pass, for the backward pass to
read. The branch with one exchange keeps the arrays that JAX keeps, except the
arguments, which exist anyway. The other branch keeps nothing, and computes each
chunk again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from ep._src.base import arguments, compat, reverse_mode
from ep._src.group.group import EpLayerConfig
from ep._src.moe.network import Experts
from ep._src.moe.parts import Parts
from ep._src.moe.round_trip import round_trip
from ep._src.ops.handle import EpHandle
from ep._src.ops.prepare import ep_prepare
from ep._src.ops.taps import tapping


def num_chunks(layer: EpLayerConfig, experts: Experts, num_tokens: int) -> int:
  """Returns how many chunks of tokens a step may need; 1 is no chunks.

  Raises:
    ValueError: it may need several, but not even one token fits, or the layer's
      experts cannot work on chunks.
  """
  capacity = layer.capacity_for(num_tokens)
  most = _chunk_tokens(layer, capacity)
  if layer.overflow != "chunk" or num_tokens <= most:
    return 1
  _check(layer, experts, capacity, most)
  return -(-num_tokens // most)


def round_trips(
  handle: EpHandle,
  experts: Experts,
  params: Mapping[str, jax.Array],
  tokens: jax.Array,
  topk_idx: jax.Array,
  topk_weights: jax.Array,
  num_chunks: int,
) -> jax.Array:
  """Does what `round_trip` does, in chunks if the step does not fit."""
  layer = handle.layer
  # A cast to vary over more mesh axes is a sum over them in the backward pass,
  # in which all ranks take part. So it is done here, and in no branch.
  args = (dict(params), tokens, topk_weights), topk_idx, handle
  floats, *routing = compat.vary_together(*args)
  floats = reverse_mode.only(_FORWARD.format(layer.name), floats)
  # All chunks have the capacity of the whole, whose factor is of all tokens.
  of_chunk = dataclasses.replace(layer, recv_capacity_per_rank=handle.capacity)
  chunks = _Chunks(of_chunk, experts, num_chunks)
  run = _either(functools.partial(_whole, experts), chunks)
  return run(floats, *routing)


_ANY_ROUTING = (
  "a capacity for any routing (capacity_factor=None,"
  " recv_capacity_per_rank=None)"
)
_FORWARD = (
  'overflow="chunk" (layer "{}"): the layer has reverse mode alone (jax.grad,'
  " jax.vjp), because its backward pass computes each chunk again; for forward"
  f" mode (jax.jvp, jax.linearize) give it {_ANY_ROUTING}."
)


def _chunk_tokens(layer, capacity):
  """Returns the largest number of tokens of a rank that fit with any routing.

  It is not negative: a capacity has a slab of the alignment for each expert.
  """
  local = layer.num_local_experts
  rows = capacity - local * (layer.alignment - 1)
  return rows // (layer.ep_size * min(layer.top_k, local))


def _check(layer, experts, capacity, chunk_tokens):
  what = f'overflow="chunk" (layer "{layer.name}")'
  arguments.check(
    chunk_tokens > 0,
    what,
    f"the capacity is {capacity} rows, but a chunk of one token of each rank"
    f" may need {layer.worst_case(1)}; raise capacity_factor or"
    " recv_capacity_per_rank to that at least, and the larger it is, the fewer"
    " chunks.",
  )
  arguments.check(
    not experts.deterministic,
    what,
    "deterministic = True promises the same bits for every split of the ranks"
    " into mesh axes, but sums over chunks depend on it; give the layer"
    f" {_ANY_ROUTING}.",
  )
  arguments.check(
    not experts.is_traced(),
    what,
    "an activation closes over values that are traced, which get no gradient"
    f" here; give the layer {_ANY_ROUTING}.",
  )


def _whole(experts, floats, topk_idx, handle):
  """Returns the output of one exchange."""
  params, tokens, weights = floats
  return round_trip(handle, experts, params, tokens, topk_idx, weights)


@dataclasses.dataclass(frozen=True)
class _Chunks:
  """Computes what `_whole` does, and its gradients, chunk by chunk."""

  layer: EpLayerConfig
  experts: Experts
  num_chunks: int

  def __call__(self, floats, topk_idx, handle):
    del handle
    params, tokens, weights = floats
    parts = Parts(topk_idx.shape[:-1], self.num_chunks)
    chunks = *map(parts.split, (tokens, weights)), parts.split(topk_idx, -1)
    return parts.join(
      lax.map(lambda chunk: self._of_chunk(params, *chunk), chunks)
    )

  def gradients(self, ct, floats, topk_idx, handle):
    """Returns the gradients of the floats.

    The gradients of parameters are sums in float32 over the chunks, in order.
    """
    del handle
    params, tokens, weights = floats

    def step(sums, chunk):
      tokens, weights, ids, ct = chunk

      def of_floats(params, tokens, weights):
        return self._of_chunk(params, tokens, weights, ids)

      _, vjp = jax.vjp(of_floats, params, tokens, weights)
      terms, *grads = vjp(ct)
      terms = jax.tree.map(lambda g: g.astype(jnp.float32), terms)
      return jax.tree.map(jnp.add, sums, terms), grads

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
    zeros, _ = compat.vary_together(zeros, ct)
    parts = Parts(topk_idx.shape[:-1], self.num_chunks)
    tokens, weights, ct = map(parts.split, (tokens, weights, ct))
    chunks = tokens, weights, parts.split(topk_idx, -1), ct
    sums, grads = lax.scan(step, zeros, chunks)
    return (
      jax.tree.map(lambda g, p: g.astype(p.dtype), sums, params),
      *map(parts.join, grads),
    )

  def _of_chunk(self, params, tokens, weights, topk_idx):
    with tapping(None):  # the tap has read all tokens
      handle = ep_prepare(self.layer, topk_idx, weights)
    return _whole(self.experts, (params, tokens, weights), topk_idx, handle)


def _either(
  whole: Callable[..., jax.Array], chunks: _Chunks
) -> Callable[..., jax.Array]:
  """Returns a function that is `whole` if all rows fit, and else `chunks`."""

  @jax.custom_vjp
  def run(floats, topk_idx, handle):
    return lax.cond(_fits(handle), whole, chunks, floats, topk_idx, handle)

  saved = _Saved()

  def run_and_save(floats, *routing):
    def whole_and_saved(floats, *routing):
      out, vjp = jax.vjp(lambda floats: whole(floats, *routing), floats)
      return together(out, saved.drop(vjp, (floats, routing)))

    def chunks_and_nothing(floats, *routing):
      nothing = [jnp.zeros(x.shape, x.dtype) for x in kept]
      return together(chunks(floats, *routing), nothing)

    def together(out, kept):
      return compat.vary_together(out, *kept)

    _, *kept = jax.eval_shape(whole_and_saved, floats, *routing)
    handle = routing[-1]
    out, *kept = lax.cond(
      _fits(handle), whole_and_saved, chunks_and_nothing, floats, *routing
    )
    return out, (floats, routing, kept)

  def gradients(residuals, ct):
    floats, routing, kept = residuals

    def of_whole(floats, routing, kept, ct):
      (grads,) = saved.restore(kept, (floats, routing))(ct)
      return grads

    def of_chunks(floats, routing, kept, ct):
      del kept
      return chunks.gradients(ct, floats, *routing)

    handle = routing[-1]
    grads = lax.cond(
      _fits(handle), of_whole, of_chunks, floats, routing, kept, ct
    )
    return grads, None, None

  run.defvjp(run_and_save, gradients)
  return run


def _fits(handle):
  return handle.max_recv_tokens[0] <= handle.capacity


class _Saved:
  """Takes arguments out of what a derivative has saved, and puts them back."""

  def drop(self, vjp: Any, args: Any) -> list[jax.Array]:
    """Returns the arrays in `vjp` that are none of the arguments."""
    places = {id(x): i for i, x in enumerate(jax.tree.leaves(args))}
    leaves, self._tree = jax.tree.flatten(vjp)
    self._places = [places.get(id(x)) for x in leaves]
    pairs = zip(leaves, self._places, strict=True)
    return [x for x, place in pairs if place is None]

  def restore(self, kept: list[jax.Array], args: Any) -> Any:
    """Returns the `vjp`, given what `drop` returned and equal arguments."""
    given, others = jax.tree.leaves(args), iter(kept)
    leaves = [next(others) if i is None else given[i] for i in self._places]
    return jax.tree.unflatten(self._tree, leaves)
