# SPDX-License-Identifier: Apache-2.0
"""A step of an `ep.MoE` on whole arrays, which tests compare."""

import functools

import jax
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from conftest import to_global


def in_slots(placement, params):
  """Returns whole parameters with experts in the order of the slots."""
  return {
    n: p[placement.experts] if n.startswith(("w_", "b_")) else p
    for n, p in params.items()
  }


def put(layer, params, *tokens):
  mesh, specs = layer.group.mesh, layer.specs()
  spec = PartitionSpec(layer.group.token_axes)
  params = {n: to_global(p, mesh, specs[n]) for n, p in params.items()}
  return params, *(to_global(x, mesh, spec) for x in tokens)


def whole(tree):
  """Returns arrays as each process has them whole."""
  everywhere = jax.tree.map(
    lambda x: NamedSharding(x.sharding.mesh, PartitionSpec()), tree
  )
  tree = jax.jit(_same, out_shardings=everywhere)(tree)
  return jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), tree)


def _same(tree):
  return tree


@functools.cache
def step_of(layer, view="global"):
  """Returns a program of outputs, metrics and gradients.

  Equal layers share it, so that XLA compiles it once.
  """

  def step(params, x, ct, state, placement):
    def loss(params, x):
      y, metrics = layer(params, x, state, placement=placement)
      return (y * ct).sum() + metrics.aux_loss, (y, metrics)

    grads, (y, metrics) = jax.grad(loss, (0, 1), has_aux=True)(params, x)
    return y, metrics, *grads

  if view == "local":
    tokens, specs = PartitionSpec(layer.group.token_axes), layer.specs()
    replicated = PartitionSpec()
    step = jax.shard_map(
      step,
      mesh=layer.group.mesh,
      in_specs=(specs, tokens, tokens, replicated, replicated),
      out_specs=(tokens, replicated, specs, tokens),
    )
  return jax.jit(step)
