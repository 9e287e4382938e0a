# SPDX-License-Identifier: Apache-2.0
"""Deterministic layers train with the same bits on any mesh, in both views."""

import dataclasses
import functools

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import pytest

from conftest import to_global
import ep
from groups import E, group, H, K, of_one_process, with_values
from layer_steps import draw_params
import quick_compiler

# Programs round alike with one flag of quick_compiler.py, but not with both.
QUICK_AND_ALIKE = quick_compiler.OPTIMIZED | {
  "xla_backend_optimization_level": 0
}

STEPS = 20
R, TOKENS = 4, 32  # ranks, and tokens of each
CONFIG = ep.MoEConfig(H, 6, E, K, shared_inner=3, deterministic=True)


def train(layout, view, dtype, compiler_options):
  """Trains by gradient descent; returns all losses and the last parameters."""
  mesh_group = group(layout, max_tokens_per_rank=None)
  mesh, axes = mesh_group.mesh, mesh_group.token_axes
  layer = ep.MoE(dataclasses.replace(CONFIG, dtype=dtype), mesh_group)
  specs = layer.specs()
  tokens = PartitionSpec(axes)

  def loss_fn(params, x):
    y, metrics = layer(params, x)
    loss = distance(y, x) / (R * TOKENS * H)
    return loss + 1e-2 * metrics.aux_loss

  def distance(y, x):
    return ep.ordered_psum(jnp.square(y - x[:, ::-1]).sum(), axes)

  if view == "global":
    distance = jax.shard_map(
      distance, mesh=mesh, in_specs=tokens, out_specs=PartitionSpec()
    )
  grad = jax.value_and_grad(loss_fn)
  if view == "local":
    grad = jax.shard_map(
      grad,
      mesh=mesh,
      in_specs=(specs, tokens),
      out_specs=(PartitionSpec(), specs),
    )

  @functools.partial(
    jax.jit,
    out_shardings=NamedSharding(mesh, PartitionSpec()),
    compiler_options=compiler_options,
  )
  def run(params, x):
    def step(params, _):
      loss, grads = grad(params, x)
      return jax.tree.map(lambda p, g: p - 0.3 * g, params, grads), loss

    return lax.scan(step, params, length=STEPS)

  rng = np.random.default_rng(0)
  params = draw_params(CONFIG, lambda shape: rng.normal(size=shape) / 3)
  params = {n: to_global(p, mesh, specs[n]) for n, p in params.items()}
  x = rng.normal(size=(R * TOKENS, H)).astype(np.float32)
  results = run(params, to_global(x, mesh, tokens))
  params, losses = jax.tree.map(np.asarray, results)
  assert losses[-1] < losses[0]
  return losses, params


def test_layouts_and_views_give_the_same_bits():
  """One process compiles with default options; several multiply in bfloat16."""
  one = jax.process_count() == 1
  dtype, options = (
    (jnp.float32, None) if one else (jnp.bfloat16, QUICK_AND_ALIKE)
  )
  first, second = (
    train(layout, view, dtype, options)
    for layout, view in [
      ("ep4", "global"),
      ("dp4_ep1" if one else "dp2_ep2", "local"),
    ]
  )
  jax.tree.map(np.testing.assert_array_equal, second, first)


@of_one_process
def test_a_checkpoint_exchanges_no_counts_again():
  """The backward pass reuses the row counts that ranks exchanged."""
  mesh_group = group("ep4")
  layer = ep.MoE(CONFIG, mesh_group)
  params = draw_params(CONFIG, np.zeros)

  @jax.checkpoint
  def loss(params, x):
    return layer(params, x)[0].sum()

  jaxpr = jax.make_jaxpr(jax.grad(loss))(params, jnp.ones((R * 2, H)))
  assert str(jaxpr).count("all_to_all[") == 1


def test_nccl_is_refused():
  of_nccl = with_values(group(), backend="nccl")
  with pytest.raises(ValueError, match='deterministic.*backend="xla"'):
    ep.MoE(CONFIG, of_nccl)


@pytest.mark.parametrize("name", ["router", "w_up", "shared_down"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_parameters_are_refused(name, dtype):
  """JAX would round narrow parameters' gradients before it adds them."""
  layer, params = ep.MoE(CONFIG, group()), draw_params(CONFIG, np.zeros)
  params[name] = params[name].astype(dtype)
  words = rf"params\['{name}'\] is {dtype}, but deterministic = True .* float32"
  with pytest.raises(TypeError, match=words):
    layer(params, np.zeros((R, H), np.float32))
