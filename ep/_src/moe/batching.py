# SPDX-License-Identifier: Apache-2.0
"""Batches under `jax.vmap`, and padding of batches that R ranks cannot split.

`jax.vmap` of an op makes one exchange for each example, in order. `jax.vmap` of
a MoE layer makes one exchange of all examples, as of one array of tokens.

In the global view the first axis of tokens is split over R ranks, in equal
parts. A batch of 1 or 6 cannot be split over 4 ranks, so the layer adds tokens
that visit no expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ep._src.base import compat
from ep._src.ops import views


def examples(
  fn: Callable[..., tuple[jax.Array, Any]], tokens: Any, others: Any, pad: bool
) -> tuple[jax.Array, Any]:
  """Returns `fn(tokens, others, pad)`, with one call for all of a `vmap`.

  `fn` maps token arrays with any leading axes, and arrays without a token axis,
  to a token array and a summary of all tokens. Under `vmap` over token arrays
  alone, each example gets the summary of all examples, and `pad` is True: the
  first axis is the axis of examples, of any number.

  In three cases each example runs by itself, in order: the `vmap` is around a
  derivative (`vmap(grad(f))`), it is around `jit` or `scan`, or `others` differ
  between examples.
  """
  if compat.is_batched(others) or not compat.is_batched(tokens):
    return fn(tokens, others, pad)
  leaves, tree = jax.tree.flatten(tokens)
  trees: list[Any] = []

  def call(*leaves: Any) -> list[Any]:
    tokens = jax.tree.unflatten(tree, leaves)
    out, summary = examples(fn, tokens, others, pad=True)
    results, summary_tree = jax.tree.flatten(summary)
    trees.append(summary_tree)
    return [out, *results]

  out, *results = _examples_p.bind(*leaves, call=call)
  return out, jax.tree.unflatten(trees[0], results)


# This primitive needs only a batching rule: `examples` binds it only under
# `vmap`, which applies the rule immediately.
_examples_p = compat.Primitive("ep_examples")
_examples_p.multiple_results = True


def _call_once(
  leaves: Sequence[Any], dims: Sequence[int | None], *, call: Callable[..., Any]
) -> tuple[list[Any], list[int | None]]:
  (size,) = {
    x.shape[d] for x, d in zip(leaves, dims, strict=True) if d is not None
  }
  whole = [
    jnp.broadcast_to(x, (size, *x.shape))
    if d is None
    else jnp.moveaxis(x, d, 0)
    for x, d in zip(leaves, dims, strict=True)
  ]
  results = call(*whole)
  return results, [0, *[None] * (len(results) - 1)]


compat.batching.primitive_batchers[_examples_p] = _call_once


def padded(
  view: views.View,
  name: str,
  fills: Sequence[jax.typing.ArrayLike],
  run: Callable[..., tuple[jax.Array, Any]],
) -> Callable[..., tuple[jax.Array, Any]]:
  """Returns a function for `examples`, which calls `run` in a view.

  Args:
    view: the view of the layer.
    name: the name of the first token array, for messages.
    fills: for each token array, the value of its added tokens.
    run: a function of the padded token arrays, `others`, the shape of one
      rank's tokens, and the number of tokens before the added ones, or None if
      arrays do not change. It returns the tokens' outputs and a summary.

  Padding flattens the leading axes and appends tokens, so that R ranks get
  equal parts. Arrays do not change if the first axis is a multiple of R, or in
  the local view, where a rank has any number of tokens. Padded arrays and their
  results are replicated; `RankFunction` splits the arrays over the ranks.
  """
  ranks = view.group.num_token_ranks

  def call(
    tokens: Sequence[Any], others: Any, pad: bool
  ) -> tuple[jax.Array, Any]:
    lead, arrays, size = tokens[0].shape[:-1], tokens, None
    if pad and not (view.is_local or (lead and lead[0] % ranks == 0)):
      size = math.prod(lead)

      def add(x: jax.Array, fill: jax.typing.ArrayLike) -> jax.Array:
        x = _whole(x).reshape(size, *x.shape[len(lead) :])
        widths = [(0, -size % ranks), *[(0, 0)] * (x.ndim - 1)]
        return jnp.pad(x, widths, constant_values=fill)

      arrays = [
        x if x is None else add(x, fill)
        for x, fill in zip(tokens, fills, strict=True)
      ]
    token_shape = view.lead(name, arrays[0].shape)
    outs, summary = run(arrays, others, token_shape, size)
    if size is not None:
      outs = _whole(outs)[:size].reshape(*lead, *outs.shape[1:])
    sharding = jax.typeof(tokens[0]).sharding  # along Explicit axes
    with jax.named_scope("ep_reshard"):
      outs = views.resharded(sharding.mesh, sharding.spec, outs)
    return outs, summary

  return call


def _whole(array: jax.Array) -> jax.Array:
  """Returns the array, replicated over Explicit mesh axes."""
  mesh = jax.typeof(array).sharding.mesh
  with jax.named_scope("ep_reshard"):
    array = views.resharded(mesh, PartitionSpec(), array)
  return array
