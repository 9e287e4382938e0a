# SPDX-License-Identifier: Apache-2.0
"""Tests Levanter's `moe_mlp` with ep's exchange.

Like Levanter's test of its backends, compares values and gradients with a dense
computation, and checks the counts of drops and padding. CI does not run this
test, because it needs `marin-levanter`; see docs/howto/other_frameworks.md.
"""

import math

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import ep

grug_moe = pytest.importorskip("levanter.grug.grug_moe")

T, H, F, E, K = 32, 8, 12, 8, 2


def _through(group):
  """Returns a replacement of `_moe_mlp_ep_ragged_a2a_local` that uses ep."""

  def of_rank(
    x,
    topk_idx,
    topk_weights,
    is_valid,
    w_gate_up,
    w_down,
    *,
    activation_fn,
    num_experts,
    capacity_factor,
    token_sharding_axes,
  ):
    assert num_experts == group.num_experts
    layer = ep.EpLayerConfig(
      group,
      recv_capacity_per_rank=math.ceil(capacity_factor * topk_idx.size),
      overflow="drop",
    )
    handle = ep.ep_prepare(layer, jnp.where(is_valid[:, None], topk_idx, -1))
    rows, row_weights = ep.ep_dispatch(handle, x, topk_weights)

    def gmm(rows, matrices):
      return ep.grouped_matmul(rows, matrices, handle.group_sizes)

    w_gate, w_up = jnp.split(w_gate_up, 2, axis=-1)
    hidden = activation_fn(gmm(rows, w_gate)) * gmm(rows, w_up)
    y = ep.ep_combine(handle, gmm(hidden, w_down), weights=row_weights)
    dropped = jax.lax.psum(handle.dropped_counts.sum(), token_sharding_axes)
    return y, grug_moe.CapacityDrops(jnp.zeros_like(dropped), dropped)

  return of_rank


@pytest.mark.parametrize("factor, drops", [(4.0, False), (0.5, True)])
def test_moe_mlp_is_a_dense_computation(monkeypatch, factor, drops):
  mesh = jax.make_mesh(
    (2, 2, 1),
    ("data", "expert", "model"),
    axis_types=(AxisType.Explicit,) * 3,
  )
  rng = np.random.default_rng(0)
  idx = np.argsort(rng.random((T, E)), axis=1)[:, :K].astype(np.int32)
  weights = rng.random((T, K), np.float32)
  is_valid = np.arange(T) % 4 != 1
  shapes = (T, H), (E, H, 2 * F), (E, F, H), (T, H)
  *args, cotangent = (rng.standard_normal(s, np.float32) for s in shapes)

  def dense(x, w_gate_up, w_down):
    both = jnp.einsum("th,tkhf->tkf", x, w_gate_up[idx])
    gate, up = jnp.split(both, 2, axis=-1)
    out = jnp.einsum("tkf,tkfh->tkh", jax.nn.silu(gate) * up, w_down[idx])
    return jnp.einsum("tkh,tk->th", out, weights * is_valid[:, None])

  def on_mesh(spec, *arrays):
    return [jax.device_put(a, NamedSharding(mesh, spec)) for a in arrays]

  ranks = P(("data", "expert"))
  x, *routing = on_mesh(ranks, args[0], idx, weights, is_valid)
  matrices = on_mesh(P("expert"), *args[1:])

  def through_ep(x, *matrices):
    return grug_moe.moe_mlp(
      x,
      *routing[:2],
      *matrices,
      token_valid=routing[2],
      implementation="ragged_all_to_all",
      mesh=mesh,
      capacity_factor=factor,
      report_capacity_overflow=True,
    )

  with (
    jax.set_mesh(mesh),
    ep.ep_bootstrap(
      mesh, num_experts=E, top_k=K, axis_name="expert", data_axes=("data",)
    ) as group,
  ):
    monkeypatch.setattr(
      grug_moe, "_moe_mlp_ep_ragged_a2a_local", _through(group)
    )
    y, back, counts = jax.vjp(through_ep, x, *matrices, has_aux=True)
    grads = jax.block_until_ready(back(*on_mesh(ranks, cotangent)))
  assert (counts.dropped > 0) == drops
  assert counts.padding_skipped == K * np.sum(~is_valid)
  if not drops:
    value, back = jax.vjp(dense, *args)
    for got, want in zip((y, *grads), (value, *back(cotangent)), strict=True):
      bound = 1e-5 * np.abs(want).max()
      np.testing.assert_allclose(got, want, rtol=0, atol=bound)
