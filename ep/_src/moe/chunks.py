# SPDX-License-Identifier: Apache-2.0
"""Sends the tokens of a rank through the experts in one exchange, or in chunks.

With chunks, buffers hold the rows of one chunk, in the forward and the backward
pass. The forward pass saves only the routing of each chunk. The backward pass
computes the rest again.

`token_chunks=n` runs n chunks in every step. `overflow="chunk"` runs chunks
only in a step whose rows exceed the capacity. Any routing of T' tokens of each
rank fits into a capacity of C rows if

    P * T' * min(K, L) + L * (alignment - 1) <= C

which gives the number of tokens of a chunk. If the bound holds for all tokens
of a rank, the program has only one exchange. Otherwise all ranks of a domain
take the same branch, because `ep_prepare` returns the rows of the busiest rank.
Another domain may take the other branch, so no branch may have a collective
over other axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from ep._src.base import arguments, compat
from ep._src.base.group import Sizes
from ep._src.moe.experts import Experts, round_trip, SharedExpert
from ep._src.ops.handle import Routing
from ep._src.ops.prepare import prepare


def through_experts(
  sizes: Sizes,
  experts: Experts,
  params: Any,
  tokens: jax.Array,
  topk_idx: jax.Array,
  topk_weights: jax.Array,
  shared: SharedExpert | None = None,
) -> tuple[jax.Array, Routing]:
  """Sends tokens to their experts and sums the outputs. Local view.

  Args:
    sizes: the sizes of an exchange. If the rank has more tokens than `sizes.T`,
      they are sent in chunks.
    experts: the network of an expert.
    params: w_up, w_down and optional w_gate, b_up, b_gate, b_down of the rank's
      experts, or a pytree for the user's network.
    tokens: [..., H].
    topk_idx: int [..., K], the slots of the choices.
    topk_weights: float [..., K].
    shared: an expert of all tokens, whose output is added.

  Returns:
    The output [..., H], and the routing. If every step runs chunks, the arrays
    of the routing have a leading axis of chunks.
  """
  args = params, tokens, topk_idx, topk_weights
  if math.prod(topk_idx.shape[:-1]) > sizes.T:
    out, routing = _in_chunks(sizes, experts, *args)
  else:
    num_chunks = 1
    if sizes.overflow == "chunk":  # chunks run if this exchange drops
      num_chunks = _num_chunks(sizes, experts)
      sizes = dataclasses.replace(sizes, overflow="drop")
    routing = prepare.of_rank(sizes, topk_idx, topk_weights)
    if num_chunks == 1:
      return round_trip(sizes, routing, experts, *args, shared), routing
    out = _one_exchange_or_chunks(sizes, routing, experts, num_chunks, *args)
  return out if shared is None else out + shared(tokens), routing


def _in_chunks(
  sizes: Sizes,
  experts: Experts,
  params: Any,
  tokens: jax.Array,
  topk_idx: jax.Array,
  topk_weights: jax.Array,
) -> tuple[jax.Array, Any]:
  """Runs one chunk after another; returns the output and the routings."""
  lead = topk_idx.shape[:-1]
  num_chunks = -(-math.prod(lead) // sizes.T)

  def split(x: jax.Array, fill: int = 0) -> jax.Array:
    """Pads and splits [*lead, n] to [num_chunks, tokens of a chunk, n]."""
    x = x.reshape(-1, x.shape[-1])
    missing = -len(x) % num_chunks
    x = jnp.pad(x, ((0, missing), (0, 0)), constant_values=fill)
    return x.reshape(num_chunks, -1, x.shape[-1])

  ids = split(topk_idx, fill=-1)
  # A loop must not mix XLA collectives with ops of ep: XLA:CPU would not order
  # them (ep.assert_ordered_collectives). With overflow="drop", `ep_prepare` has
  # XLA collectives, so the scan is unrolled. The transpose of `vary_together`
  # is a psum, so `vary_together` is called outside of the loop.
  _, routings = lax.scan(
    lambda _, choices: (None, prepare.of_rank(sizes, *choices)),
    None,
    (ids, split(topk_weights)),
    unroll=sizes.overflow == "drop",
  )
  args = compat.vary_together(params, tokens, topk_weights, routings)

  # Without this checkpoint, JAX would save the tokens twice: whole and split.
  @functools.partial(jax.checkpoint, prevent_cse=False)
  def run(
    params: Any,
    tokens: jax.Array,
    topk_weights: jax.Array,
    routings: Any,
  ) -> Any:
    sums = jax.tree.map(lambda x: x.astype(jnp.float32), params)

    @jax.checkpoint
    def of_chunk(sums: Any, routing: Routing, *arrays: Any) -> jax.Array:
      summed = jax.tree.map(_summed_as, params, sums)
      return round_trip(sizes, routing, experts, summed, *arrays)

    arrays = split(tokens), ids, split(topk_weights)
    outs = lax.map(lambda chunk: of_chunk(sums, *chunk), (routings, *arrays))
    rows = outs.reshape(-1, outs.shape[-1])[: math.prod(lead)]
    return rows.reshape(*lead, -1)

  return run(*args), routings


@jax.custom_jvp
def _summed_as(x: jax.Array, wide: jax.Array) -> jax.Array:
  """Returns x; the gradient goes to `wide`, a copy of x in a wider dtype."""
  del wide
  return x


@_summed_as.defjvp
def _summed_as_jvp(
  primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
  x, _ = primals
  _, tangent = tangents
  return x, tangent.astype(x.dtype)


def _num_chunks(sizes: Sizes, experts: Experts) -> int:
  """Returns the number of chunks of a step that overflows; 1 if no step can.

  Raises:
    ValueError: a step may need several chunks, but not even one token fits, or
      the layer's experts do not support chunks.
  """
  # `rows` >= 0, because C has at least `alignment` rows for each local expert.
  rows = sizes.C - sizes.L * (sizes.alignment - 1)
  chunk_tokens = rows // (sizes.P * min(sizes.K, sizes.L))
  if chunk_tokens >= sizes.T:
    return 1
  what = f'overflow="chunk" (layer "{sizes.name}")'
  arguments.check(
    chunk_tokens > 0,
    what,
    f"the capacity is {sizes.C} rows, but a chunk of one token of each rank"
    f" may need {dataclasses.replace(sizes, T=1).worst_case()}; raise"
    " capacity_factor or recv_capacity_per_rank to that at least, and the"
    " larger it is, the fewer chunks.",
  )
  why = ""
  if experts.deterministic:
    why = (
      "deterministic = True promises the same bits for every split of the ranks"
      " into mesh axes, but sums over chunks depend on it"
    )
  elif experts.is_traced():
    why = "an activation closes over traced values, which get no gradient here"
  arguments.check(
    not why,
    what,
    f"{why}; give the layer a capacity for any routing (capacity_factor=None,"
    " recv_capacity_per_rank=None).",
  )
  return -(-sizes.T // chunk_tokens)


def _one_exchange_or_chunks(
  sizes: Sizes,
  routing: Routing,
  experts: Experts,
  num_chunks: int,
  params: Any,
  tokens: jax.Array,
  topk_idx: jax.Array,
  topk_weights: jax.Array,
) -> jax.Array:
  """Returns the output of one exchange if its rows fit, otherwise of chunks."""
  # Each chunk gets the same capacity as the exchange of all tokens.
  of_chunk = dataclasses.replace(
    sizes, T=-(-sizes.T // num_chunks), overflow="error"
  )

  def whole(floats: Any, topk_idx: jax.Array, routing: Routing) -> jax.Array:
    params, tokens, weights = floats
    args = params, tokens, topk_idx, weights
    return round_trip(sizes, routing, experts, *args)

  def chunks(floats: Any, topk_idx: jax.Array, routing: Routing) -> jax.Array:
    del routing
    params, tokens, weights = floats
    args = params, tokens, topk_idx, weights
    return _in_chunks(of_chunk, experts, *args)[0]

  # The transpose of `vary_together` is a collective over mesh axes, so
  # `vary_together` is called outside of the branches.
  floats, *others = compat.vary_together(
    (params, tokens, topk_weights), topk_idx, routing
  )
  return _either(sizes.C, whole, chunks)(floats, *others)


def _either(
  capacity: int,
  whole: Callable[..., jax.Array],
  chunks: Callable[..., jax.Array],
) -> Callable[..., jax.Array]:
  """Returns a function that calls `whole` if all rows fit, and else `chunks`.

  It is a `custom_vjp`, so forward mode raises JAX's `TypeError`. A branch of
  `lax.cond` returns all that the derivatives of both branches save, and so
  copies the arguments among them, such as the expert weights, also with
  `jax.checkpoint` around `chunks`: 63 MiB of temporaries instead of 48, for 8
  experts of 512 x 1792 on 4 CPU devices (JAX 0.10.2). Instead

  * the arguments are saved once, outside of the branches;
  * a branch returns the other arrays that its derivative needs, and zeros in
    place of the arrays that the derivative of the other branch needs;
  * the backward pass runs the derivative of the same branch.
  """
  branches = _Derivative(whole), _Derivative(chunks)

  def either(
    functions: Sequence[Callable[..., Any]], routing: Routing, *args: Any
  ) -> Any:
    fits = routing.max_recv_tokens[0] <= capacity
    return lax.cond(fits, *functions, *args)

  @jax.custom_vjp
  def run(*args: Any) -> Any:
    return either([whole, chunks], args[-1], *args)

  def run_and_save(*args: Any) -> Any:
    kept = [jax.eval_shape(branch.save, *args)[1] for branch in branches]

    def save(i: int, *args: Any) -> Any:
      out, own = branches[i].save(*args)
      every = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), kept)
      every[i] = own
      return compat.vary_together(out, every)

    saves = [functools.partial(save, i) for i in range(2)]
    out, every = either(saves, args[-1], *args)
    return out, (args, every)

  def gradients(residuals: Any, ct: jax.Array) -> Any:
    args, every = residuals

    def of_branch(i: int, args: Any, every: Any, ct: jax.Array) -> Any:
      return branches[i].gradients(every[i], args, ct)

    both = [functools.partial(of_branch, i) for i in range(2)]
    return either(both, args[-1], args, every, ct), None, None

  run.defvjp(run_and_save, gradients)
  return run


class _Derivative:
  """The VJP of a function, with residuals that exclude its arguments.

  The function that `jax.vjp` returns is a pytree. Its leaves are the arrays
  that it saved, of which some are the arguments themselves: these very objects.
  """

  def __init__(self, fn: Callable[..., jax.Array]):
    self._fn = fn

  def save(self, *args: Any) -> tuple[jax.Array, list[jax.Array]]:
    """Returns the output and the residuals."""
    floats, *routing = args
    out, vjp = jax.vjp(lambda floats: self._fn(floats, *routing), floats)
    places = {id(x): i for i, x in enumerate(jax.tree.leaves(args))}
    leaves, self._tree = jax.tree.flatten(vjp)
    self._places = [places.get(id(x)) for x in leaves]
    pairs = zip(leaves, self._places, strict=True)
    return out, [x for x, place in pairs if place is None]

  def gradients(self, kept: list[jax.Array], args: Any, ct: jax.Array) -> Any:
    """Returns gradients of the first argument, given the residuals `kept`."""
    given, others = jax.tree.leaves(args), iter(kept)
    leaves = [next(others) if i is None else given[i] for i in self._places]
    (grads,) = jax.tree.unflatten(self._tree, leaves)(ct)
    return grads
