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
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ep._src.base import compat
from ep._src.ops import views


def examples(
  fn: Callable[..., tuple[Any, Any]], tokens: Any, others: Any, pad: bool
) -> tuple[Any, Any]:
  """Returns `fn(tokens, others, pad)`, with one call for all of a `vmap`.

  `fn` maps token arrays with any leading axes, and arrays without a token axis,
  to token arrays and a summary of all tokens. Under `vmap` over token arrays
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

  def call(*leaves: Any) -> tuple[list[Any], list[Any]]:
    tokens = jax.tree.unflatten(tree, leaves)
    outs, summary = examples(fn, tokens, others, pad=True)
    outs, out_tree = jax.tree.flatten(outs)
    summary, summary_tree = jax.tree.flatten(summary)
    trees[:] = out_tree, summary_tree
    return outs, summary

  results = _examples_p.bind(*leaves, call=call)
  out_tree, summary_tree = trees
  n = out_tree.num_leaves
  return (
    jax.tree.unflatten(out_tree, results[:n]),
    jax.tree.unflatten(summary_tree, results[n:]),
  )


# This primitive needs only a batching rule: `examples` binds it only under
# `vmap`, which applies the rule immediately.
_examples_p = compat.Primitive("ep_examples")
_examples_p.multiple_results = True


def _call_once(
  leaves: Sequence[Any], dims: Sequence[int | None], *, call: Callable[..., Any]
) -> tuple[list[Any], list[Any]]:
  (size,) = {
    x.shape[d] for x, d in zip(leaves, dims, strict=True) if d is not None
  }
  whole = [
    jnp.broadcast_to(x, (size, *x.shape))
    if d is None
    else jnp.moveaxis(x, d, 0)
    for x, d in zip(leaves, dims, strict=True)
  ]
  outs, summary = call(*whole)
  return outs + summary, [0] * len(outs) + [None] * len(summary)


compat.batching.primitive_batchers[_examples_p] = _call_once


@dataclasses.dataclass(frozen=True)
class Padding:
  """The tokens to add to [*lead, ...], so that R ranks get equal parts.

  Arrays do not change if the first axis is a multiple of R, or in the local
  view, where a rank has any number of tokens. Differentiable.

  Attributes:
    lead: the leading axes of the tokens.
    count: the number of added tokens, after the flattened leading axes; None if
      arrays do not change.
  """

  lead: tuple[int, ...]
  count: int | None = None

  @classmethod
  def of(cls, view: views.View, lead: Sequence[int]) -> Padding:
    """Returns the smallest padding for tokens [*lead, ...] in a view."""
    lead, ranks = tuple(lead), view.group.num_token_ranks
    if view.is_local or (lead and lead[0] % ranks == 0):
      return cls(lead)
    return cls(lead, -math.prod(lead) % ranks)

  def add(self, array: jax.Array, value: jax.typing.ArrayLike) -> jax.Array:
    """Flattens [*lead, ...] to [tokens, ...]; appends tokens equal to `value`.

    The result is replicated; `RankFunction` splits it over the ranks.
    """
    if self.count is None:
      return array
    rest = array.shape[len(self.lead) :]
    array = _whole(array).reshape(math.prod(self.lead), *rest)
    widths = [(0, self.count), *[(0, 0)] * len(rest)]
    return jnp.pad(array, widths, constant_values=value)

  def remove(self, array: jax.Array) -> jax.Array:
    """Cuts the added tokens off [tokens, ...], and returns [*lead, ...].

    The result is replicated, because it cannot be split over the ranks.
    """
    if self.count is None:
      return array
    array = _whole(array)[: math.prod(self.lead)]
    return array.reshape(*self.lead, *array.shape[1:])


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
      rank's tokens and the `Padding`. It returns the tokens' outputs and a
      summary.
  """

  def call(
    tokens: Sequence[Any], others: Any, pad: bool
  ) -> tuple[jax.Array, Any]:
    lead, arrays = tokens[0].shape[:-1], tokens
    padding = Padding.of(view, lead) if pad else Padding(lead)
    if padding.count is not None:
      arrays = [
        x if x is None else padding.add(x, fill)
        for x, fill in zip(tokens, fills, strict=True)
      ]
    token_shape = view.lead(name, arrays[0].shape)
    outs, summary = run(arrays, others, token_shape, padding)
    if padding.count is not None:
      outs = padding.remove(outs)
    sharding = jax.typeof(tokens[0]).sharding  # along Explicit axes
    outs = views.resharded(sharding.mesh, sharding.spec, outs, is_named=True)
    return outs, summary

  return call


def _whole(array: jax.Array) -> jax.Array:
  """Returns the array, replicated over Explicit mesh axes."""
  mesh = jax.typeof(array).sharding.mesh
  whole: jax.Array = views.resharded(
    mesh, PartitionSpec(), array, is_named=True
  )
  return whole
