# SPDX-License-Identifier: Apache-2.0
"""Folds the examples of `vmap` into the tokens of one exchange.

`jax.vmap` of an op makes one exchange for each example, in order. A MoE layer
need not: it treats tokens alike whatever axes they have, so all examples can
share one exchange, as if the caller had passed the batch at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ep._src.base import compat


def examples(
  fn: Callable[..., tuple[Any, Any]], tokens: Any, others: Any
) -> tuple[Any, Any]:
  """Returns `fn(tokens, others)`, one call for all examples of a `vmap`.

  `fn` maps token arrays, whose leading axes may be any, and arrays without a
  token axis, to token arrays and a summary of all tokens. Under `vmap` over
  token arrays alone, each example gets the summary of all examples.

  If the `vmap` is around a derivative (`vmap(grad(f))`), or around `jit` or
  `scan`, or if `others` differ between examples, then examples must not or
  cannot be seen together: each runs by itself, in order.
  """
  if compat.is_batched(others) or not compat.is_batched(tokens):
    return fn(tokens, others)
  leaves, tree = jax.tree.flatten(tokens)
  trees: list[Any] = []

  def call(*leaves):
    outs, summary = examples(fn, jax.tree.unflatten(tree, leaves), others)
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


# This primitive is bound only to the examples of a `vmap`, which applies the
# batching rule at once. So it needs no other rule.
_examples_p = compat.Primitive("ep_examples")
_examples_p.multiple_results = True


def _call_once(leaves, dims, *, call):
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
