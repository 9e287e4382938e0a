# SPDX-License-Identifier: Apache-2.0
"""Tests Levanter's `moe_mlp` with ep's exchange.

Like Levanter's test of its backends, compares values and gradients with a dense
computation, and checks the counts of drops and padding. CI does not run this
test, because it needs `marin-levanter`; see docs/howto/replace.md.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import ep

grug_moe = pytest.importorskip("levanter.grug.grug_moe")
levanter_moe = pytest.importorskip("recipes.levanter_moe")

T, H, F, E, K = 32, 8, 12, 8, 2
DATA, EP = 2, 2


def _kept(idx, is_valid, factor):
  """Returns the choices that Levanter keeps, bool [T, K], by one loop.

  A receiver has a capacity of its valid assignments times `factor`, at least
  its experts. It accepts choices by expert, then by source rank, then by token.
  """
  kept = np.zeros(idx.shape, bool)
  tokens = T // (DATA * EP)  # of a rank
  for data in range(DATA):
    domain = range(data * EP * tokens, (data + 1) * EP * tokens)
    valid = [t for t in domain if is_valid[t]]
    capacity = np.ceil(factor * len(valid) * K / EP)
    capacity = np.clip(capacity, E // EP, np.ceil(factor * tokens * K))
    for first in range(0, E, E // EP):
      choices = [
        (t, k)
        for expert in range(first, first + E // EP)
        for t in valid
        for k in range(K)
        if idx[t, k] == expert
      ]
      for t, k in choices[: int(capacity)]:
        kept[t, k] = True
  return kept


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("factor", [4.0, 1.0, 0.5])
def test_moe_mlp_is_a_dense_computation(monkeypatch, factor, padded):
  mesh = jax.make_mesh(
    (DATA, EP, 1),
    ("data", "expert", "model"),
    axis_types=(AxisType.Explicit,) * 3,
  )
  rng = np.random.default_rng(0)
  idx = rng.integers(E, size=(T, K), dtype=np.int32)  # some twice in a token
  weights = rng.random((T, K), np.float32)
  is_valid = np.arange(T) % 4 != 1 if padded else np.ones(T, bool)
  kept = _kept(idx, is_valid, factor)
  shapes = (T, H), (E, H, 2 * F), (E, F, H), (T, H)
  *args, cotangent = (rng.standard_normal(s, np.float32) for s in shapes)
  args.append(weights)

  def dense(x, w_gate_up, w_down, weights):
    both = jnp.einsum("th,tkhf->tkf", x, w_gate_up[idx])
    gate, up = jnp.split(both, 2, axis=-1)
    out = jnp.einsum("tkf,tkfh->tkh", jax.nn.silu(gate) * up, w_down[idx])
    return jnp.einsum("tkh,tk->th", out, weights * kept)

  def on_mesh(spec, *arrays):
    return [jax.device_put(a, NamedSharding(mesh, spec)) for a in arrays]

  ranks = P(("data", "expert"))
  x, weights, cotangent_, ids, valid = on_mesh(
    ranks, args[0], weights, cotangent, idx, is_valid
  )
  matrices = on_mesh(P("expert"), *args[1:3])

  def through_ep(x, w_gate_up, w_down, weights):
    return grug_moe.moe_mlp(
      x,
      ids,
      weights,
      w_gate_up,
      w_down,
      token_valid=valid,
      implementation="ragged_all_to_all",
      mesh=mesh,
      capacity_factor=factor,
      report_capacity_overflow=True,
    )

  with (
    jax.set_mesh(mesh),
    ep.ep_bootstrap(
      mesh, num_experts=E, axis_name="expert", data_axes=("data",)
    ) as group,
  ):
    monkeypatch.setattr(
      grug_moe, "_moe_mlp_ep_ragged_a2a_local", levanter_moe.replacement(group)
    )
    y, back, counts = jax.vjp(through_ep, x, *matrices, weights, has_aux=True)
    grads = jax.block_until_ready(back(cotangent_))
  assert counts.sender_dropped == K * is_valid.sum() - kept.sum()
  assert counts.receiver_dropped == 0  # as Levanter's backend counts
  assert (counts.dropped > 0) == (factor < 4)
  assert counts.padding_skipped == K * np.sum(~is_valid)
  value, back = jax.vjp(dense, *args)
  for got, want in zip((y, *grads), (value, *back(cotangent)), strict=True):
    bound = 1e-5 * np.abs(want).max()
    np.testing.assert_allclose(got, want, rtol=0, atol=bound)


def test_replacement_refuses_other_arguments(monkeypatch):
  function = levanter_moe.ragged._accepted_assignments
  monkeypatch.setitem(levanter_moe._ARGUMENTS, function, "flat_selected")
  with pytest.raises(TypeError, match="_accepted_assignments has the arg"):
    levanter_moe.replacement(None)
