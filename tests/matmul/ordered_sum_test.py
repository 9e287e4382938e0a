# SPDX-License-Identifier: Apache-2.0
"""ep.ordered_psum and its transpose add neighboring ranks first."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from conftest import assert_shards_equal, make_mesh, to_global
import ep

RANKS, N = 4, 64
AXES = ("dp", "ep")


def tree_sum(x):
  """Adds float32 x [4, N] in the documented order of `ordered_psum`."""
  return (x[0] + x[1]) + (x[2] + x[3])


@pytest.mark.parametrize("check_vma", [True, False])
def test_sums_and_derivatives(check_vma):
  """The bits equal the tree sum; other orders give other bits."""
  mesh = make_mesh({"dp": 2, "ep": 2})
  rng = np.random.default_rng(0)
  x, tangent, ct = rng.normal(size=(3, RANKS, N)).astype(np.float32)
  others = x[0] + (x[1] + (x[2] + x[3])), ((x[0] + x[1]) + x[2]) + x[3]
  assert all((tree_sum(x) != other).any() for other in others)

  @functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=P(AXES),
    out_specs=P(AXES),
    check_vma=check_vma,
  )
  def run(x, tangent, ct):
    psum = functools.partial(ep.ordered_psum, axis_name=AXES)
    y, y_tangent = jax.jvp(psum, [x], [tangent])
    by_example = jax.vmap(psum, in_axes=2, out_axes=2)(x[..., None])[..., 0]
    # With check_vma, the cotangent of a sum must be the same on all ranks.
    _, vjp = jax.vjp(psum, x)
    (grad,) = vjp(ct if not check_vma else psum(ct))
    return [a.reshape(1, N) for a in (y, y_tangent, by_example, grad)]

  args = [to_global(a, mesh, P(AXES)) for a in (x, tangent, ct)]
  y, y_tangent, by_example, grad = jax.jit(run)(*args)
  expected = np.broadcast_to(tree_sum(x), (RANKS, N))
  assert_shards_equal(y, expected)
  assert_shards_equal(by_example, expected)
  expected = np.broadcast_to(tree_sum(tangent), (RANKS, N))
  assert_shards_equal(y_tangent, expected)
  assert_shards_equal(grad, np.broadcast_to(tree_sum(ct), (RANKS, N)))


@pytest.mark.parametrize("check_vma", [True, False])
def test_no_transpose_scatters(check_vma):
  """A reduce-scatter would add in the transport's order, and slow down Gloo."""

  @functools.partial(
    jax.shard_map,
    mesh=make_mesh({"dp": 2, "ep": 2}),
    in_specs=P(AXES),
    out_specs=P(AXES),
    check_vma=check_vma,
  )
  def grad(x):
    return jax.grad(lambda x: ep.ordered_psum(jnp.sin(x), AXES).sum())(x)

  x = jax.ShapeDtypeStruct((RANKS, N), jnp.float32)
  assert "reduce_scatter" not in jax.jit(grad).lower(x).as_text()
