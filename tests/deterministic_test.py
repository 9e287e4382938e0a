# SPDX-License-Identifier: Apache-2.0
"""Deterministic layers train alike on every split of the ranks into axes."""

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from conftest import to_global
import ep
from groups import E, group, H, K, T

STEPS = 8
R = 4  # ranks
CONFIG = ep.MoEConfig(H, 6, E, K, shared_inner=3, deterministic=True)
LAYOUTS = ["dp4_ep1", "dp2_ep2", "ep4"]


def train(layout, view, config=CONFIG):
  """Returns the losses of a few steps of plain gradient descent, as bits."""
  mesh_group = group(layout)
  mesh, axes = mesh_group.mesh, mesh_group.token_axes
  layer = config.layer(mesh_group)
  specs = ep.moe.partition_specs(config, mesh_group.axis_name)
  tokens = PartitionSpec(axes)

  def loss_fn(params, x):
    y, metrics = ep.moe.apply(layer, config, params, x)
    total = sum_of_squares(y - x[:, ::-1])
    return total / (R * T * H) + 1e-2 * metrics.aux_loss

  def sum_of_squares(x):
    return ep.ordered_psum(jnp.square(x).sum(), axes)

  if view == "global":
    sum_of_squares = jax.shard_map(
      sum_of_squares, mesh=mesh, in_specs=tokens, out_specs=PartitionSpec()
    )
  grad = jax.value_and_grad(loss_fn)
  if view == "local":
    grad = jax.shard_map(
      grad,
      mesh=mesh,
      in_specs=(specs, tokens),
      out_specs=(PartitionSpec(), specs),
    )

  @jax.jit
  def run(params, x):
    def step(params, _):
      loss, grads = grad(params, x)
      return jax.tree.map(lambda p, g: p - 0.3 * g, params, grads), loss

    return lax.scan(step, params, length=STEPS)[1]

  params = jax.tree.map(np.asarray, ep.moe.init(jax.random.key(0), config))
  params = {n: to_global(p, mesh, specs[n]) for n, p in params.items()}
  rng = np.random.default_rng(0)
  x = rng.normal(size=(R * T, H)).astype(np.float32)
  losses = np.asarray(run(params, to_global(x, mesh, tokens)))
  assert losses[-1] < losses[0]
  return losses.view(np.uint32)


def test_losses_have_the_same_bits_in_every_layout_and_view():
  first = train("dp4_ep1", "local")
  for layout, view in [
    ("dp2_ep2", "local"),
    ("ep4", "local"),
    ("ep4", "global"),
    ("dp2_ep2", "global"),
  ]:
    losses = train(layout, view)
    np.testing.assert_array_equal(losses, first, err_msg=f"{layout} {view}")
