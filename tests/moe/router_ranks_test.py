# SPDX-License-Identifier: Apache-2.0
"""The router and its losses have the same values on four ranks as on one."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from cases import jit_quickly
from conftest import (
  assert_shards_close,
  assert_shards_equal,
  make_mesh,
  to_global,
)
import ep
from router_cases import all_with_gradients, batch, E, K, logits_of


@pytest.mark.parametrize(
  "axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name
)
@pytest.mark.parametrize("spec", [P(("dp", "ep")), P("dp", "ep")])
def test_routing_is_sharded_as_the_logits_are(axis_type, spec):
  """In the global view, neither the choice nor its gradient communicates."""
  mesh = make_mesh({"dp": 2, "ep": 2}, (axis_type,) * 2)
  logits, mask = logits_of(4, 6), np.arange(24).reshape(4, 6) % 5 > 0
  bias, key = jnp.linspace(0.5, -0.5, E), np.uint32([0, 1])

  def route(x, mask, cotangent, key):
    (weights, idx), vjp = jax.vjp(
      lambda x: ep.route_topk(
        x,
        K,
        score="sigmoid",
        selection_bias=bias,
        mask=mask,
        num_groups=4,
        top_groups=2,
        jitter=0.1,
        key=jax.random.wrap_key_data(key),
      )[::-1],
      x,
    )
    no_tangent = np.zeros(idx.shape, jax.dtypes.float0)
    return idx, weights, *vjp((cotangent, no_tangent))

  args = logits, mask, np.asarray(logits_of(4, 6)[..., :K]), key
  sharded = [to_global(x, mesh, spec) for x in args[:3]]
  with jax.set_mesh(mesh):
    program = jax.jit(route).lower(*sharded, to_global(key, mesh)).compile()
    got = program(*sharded, to_global(key, mesh))
  ep.assert_no_hidden_collectives(program)
  expected = jit_quickly(route)(*args)
  assert_shards_equal(got[0], expected[0])
  for got_, expected_ in zip(got[1:], expected[1:], strict=True):
    assert got_.sharding.is_equivalent_to(sharded[0].sharding, 3)
    assert_shards_close(got_, expected_, rtol=1e-5, atol=1e-6)


@functools.cache
def _whole():
  return jit_quickly(all_with_gradients)(*batch())


def test_every_rank_has_the_value_and_gradient_of_the_whole_batch():
  mesh = make_mesh({"ep": 4})

  def ranks(logits, idx, mask):
    # A value for each rank; with check_vma a replicated one would be checked.
    results = all_with_gradients(logits, idx, mask, "ep")
    return {
      name: (jax.lax.pcast(value, "ep", to="varying")[None], gradient)
      for name, (value, gradient) in results.items()
    }

  program = jit_quickly(
    jax.shard_map(ranks, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
  )
  got = program(*(to_global(x, mesh, P("ep")) for x in batch()))
  for name, (value, gradient) in got.items():
    expected, expected_gradient = _whole()[name]
    assert_shards_close(value, np.full(4, expected), rtol=1e-6)
    assert_shards_close(gradient, expected_gradient, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(
  "axis_type", [AxisType.Auto, AxisType.Explicit], ids=lambda t: t.name
)
def test_global_losses_only_sum(axis_type):
  """In the global view nothing but the sums over ranks is communicated."""
  mesh = make_mesh({"dp": 2, "ep": 2}, (axis_type,) * 2)
  args = [to_global(x, mesh, P("dp", "ep")) for x in batch()]
  with jax.set_mesh(mesh):
    program = jax.jit(all_with_gradients).lower(*args).compile()
    got = program(*args)
  ep.assert_no_hidden_collectives(program, allow=["all-reduce"])
  for name, (value, gradient) in got.items():
    assert_shards_close(value, _whole()[name][0], rtol=1e-5)
    assert_shards_close(gradient, _whole()[name][1], rtol=1e-5, atol=1e-7)
