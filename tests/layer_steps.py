# SPDX-License-Identifier: Apache-2.0
"""Runs `ep.MoE` and `ep.moe_layer` on whole (unsharded) NumPy arrays."""

import functools

import jax
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from conftest import to_global
import ep
import quick_compiler


def draw_params(config, draw):
  """Returns unsharded parameters, each `draw(shape)` in float32."""
  shapes = jax.eval_shape(lambda: ep.moe.init(jax.random.key(0), config))
  return {n: np.float32(draw(s.shape)) for n, s in sorted(shapes.items())}


def in_slots(placement, params):
  """Returns unsharded parameters with the experts in slot order."""
  return {
    n: p[placement.experts] if n.startswith(("w_", "b_")) else p
    for n, p in params.items()
  }


def put(layer, params, *tokens):
  mesh, specs = layer.group.mesh, layer.specs()
  spec = PartitionSpec(layer.group.token_axes)
  params = {n: to_global(p, mesh, specs[n]) for n, p in params.items()}
  return params, *(x if x is None else to_global(x, mesh, spec) for x in tokens)


def whole(tree):
  """Gathers sharded arrays: returns whole NumPy arrays on every process."""
  if jax.process_count() == 1:
    return jax.tree.map(np.asarray, tree)
  everywhere = jax.tree.map(
    lambda x: NamedSharding(x.sharding.mesh, PartitionSpec()), tree
  )
  tree = jax.jit(_same, out_shardings=everywhere)(tree)
  return jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), tree)


def _same(tree):
  return tree


@functools.cache
def step_of(layer, view="global", optimized=False):
  """Returns a program that computes a layer's outputs, metrics and gradients.

  XLA compiles one program for equal layers. With `optimized`, XLA optimizes it
  even if conftest.py turns that off.
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
  options = quick_compiler.OPTIMIZED if optimized else None
  return jax.jit(step, compiler_options=options)


def run_step(layer, params, *tokens, state=None, placement=None, **program):
  """Runs `step_of(layer, **program)`; takes and returns whole arrays."""
  args, *others = put(layer, params, *tokens)
  return whole(step_of(layer, **program)(args, *others, state, placement))


def run_forward(layer, params, x, forced_idx):
  """Returns outputs and metrics as whole arrays."""

  def forward(params, x, forced_idx):
    return layer(params, x, forced_idx=forced_idx)

  return whole(jax.jit(forward)(*put(layer, params, x, forced_idx)))


@functools.cache
def moe_step_of(layer, experts=None, is_local=False):
  """Returns a program that computes `ep.moe_layer` and its gradients.

  With `is_local`, the program is a `shard_map` without `check_vma`.
  """

  def step(topk_idx, tokens, weights, matrices, ct):
    def moe(tokens, weights, matrices):
      given = matrices
      if experts is not None:
        given = dict(experts=experts, params=matrices)
      return ep.moe_layer(layer, tokens, topk_idx, weights, **given)

    out, vjp = jax.vjp(moe, tokens, weights, matrices)
    return out, *vjp(ct)

  if is_local:
    tokens = PartitionSpec(layer.group.token_axes)
    split = PartitionSpec(layer.group.axis_name)
    step = jax.shard_map(
      step,
      mesh=layer.group.mesh,
      in_specs=(tokens, tokens, tokens, split, tokens),
      out_specs=(tokens, tokens, tokens, split),
      check_vma=False,
    )
  return jax.jit(step)


def put_moe(layer, topk_idx, tokens, weights, matrices, *others):
  mesh, arrays = layer.group.mesh, (topk_idx, tokens, weights, *others)
  spec = PartitionSpec(layer.group.token_axes)
  experts = PartitionSpec(layer.group.axis_name)
  idx, tokens, weights, *others = (to_global(x, mesh, spec) for x in arrays)
  matrices = {n: to_global(w, mesh, experts) for n, w in matrices.items()}
  return idx, tokens, weights, matrices, *others


def run_moe_step(layer, *arrays, **options):
  """Runs `moe_step_of(layer)` on whole arrays and returns whole arrays."""
  return whole(moe_step_of(layer, **options)(*put_moe(layer, *arrays)))


def assert_same_bits(actual, expected):
  """Fails unless two trees of whole arrays are equal; -0 differs from +0."""

  def check(a, b):
    assert a.dtype == b.dtype
    bits = f"u{a.dtype.itemsize}"
    np.testing.assert_array_equal(a.view(bits), b.view(bits))

  jax.tree.map(check, actual, expected)


def assert_close(actual, expected, rtol, atol):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol, atol), actual, expected
  )
