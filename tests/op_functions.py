# SPDX-License-Identifier: Apache-2.0
"""Defines the ops under test, and functions that call them.

Each function takes `Ops`, or the `Oracle` of oracle.py with the same methods.
"""

import dataclasses
from typing import NamedTuple

import jax

import ep


class Sizes(NamedTuple):
  """The leaves of a handle that the contract defines: all but `mem`."""

  group_sizes: jax.Array
  token_counts: jax.Array
  total_recv_tokens: jax.Array
  dropped_counts: jax.Array
  max_recv_tokens: jax.Array
  kept: jax.Array


class Ops:
  """The ops under test, bound to a handle."""

  def __init__(self, handle):
    self.handle = handle

  def sizes(self):
    return Sizes(*(getattr(self.handle, name) for name in Sizes._fields))

  def dispatch(self, tokens, weights, scales=None):
    return ep.ep_dispatch(self.handle, tokens, weights, scales=scales)

  def combine(self, rows, weights=None):
    return ep.ep_combine(self.handle, rows, weights)

  def dispatch_bwd(self, primals, cotangents):
    return jax.vjp(self.dispatch, *primals)[1](cotangents)

  def combine_bwd(self, primals, cotangent):
    return jax.vjp(self.combine, *primals)[1](cotangent)


class LocalOps(Ops):
  """Calls the ops inside `shard_map`, with shapes of the global view."""

  def sizes(self):
    *of_rank, kept = super().sizes()
    return Sizes(*(x[None] for x in of_rank), kept)

  def dispatch(self, *args):
    return jax.tree.map(lambda x: x[None], super().dispatch(*args))

  def combine(self, rows, weights=None):
    return super().combine(*jax.tree.map(lambda x: x[0], (rows, weights)))


def handle_of(ops):
  return ops.handle


def sizes(ops):
  return ops.sizes()


def dispatch(ops, *args):
  return ops.dispatch(*args)


def combine(ops, rows, weights=None):
  return ops.combine(rows, weights)


def round_trip(ops, tokens, weights):
  return ops.combine(*ops.dispatch(tokens, weights))


def block(ops, tokens, weights, *_):
  """Dispatches, squares the rows instead of applying experts, and combines."""
  recv, recv_weights = ops.dispatch(tokens, weights)
  return ops.combine(recv * recv, recv_weights)


def block_and_back(ops, tokens, weights, g):
  out, vjp = jax.vjp(lambda *x: block(ops, *x), tokens, weights)
  return out, vjp(g)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moved:
  """Arrays that an op copies without arithmetic, so NaNs keep their bits."""

  arrays: tuple[jax.Array, ...]


def everything(ops, tokens, weights, rows, row_weights):
  """Applies every op to separate inputs."""
  g_tokens, g_weights = ops.dispatch_bwd((tokens, weights), (rows, row_weights))
  return dict(
    sizes=ops.sizes(),
    dispatch=Moved(ops.dispatch(tokens, weights)),
    combine=ops.combine(rows),
    weighted=ops.combine(rows, row_weights),
    dispatch_bwd=(g_tokens, Moved((g_weights,))),
    combine_bwd=Moved(ops.combine_bwd((rows,), tokens)),
  )
