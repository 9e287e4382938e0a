# SPDX-License-Identifier: Apache-2.0
"""The bytes of ep.plan equal the bytes that the host engine counts."""

import jax
import numpy as np
import pytest

from cases import Case
from conftest import make_mesh
import ep
from ep._tools.trace import trace
from groups import bootstrap, E, H, K, not_with_xla, T
from op_functions import Ops


def step_of(layer):
  @jax.jit
  def step(topk_idx, tokens, weights):
    def loss(tokens, weights):
      handle = ep.ep_prepare(layer, topk_idx, topk_weights=weights)
      out = Ops(handle).combine(*Ops(handle).dispatch(tokens, weights))
      return out.sum(), handle.dropped_counts.sum()

    return jax.value_and_grad(loss, (0, 1), has_aux=True)(tokens, weights)

  return step


def exchanges(step, case, path):
  """Returns the bytes of each op and domain, and the number of drops."""
  group = case.layer.group
  args = [case.put(x) for x in (case.topk_idx, case.tokens(), case.weights())]
  with jax.set_mesh(group.mesh), ep.trace(group, path):
    (_, dropped), _ = jax.block_until_ready(step(*args))
  moved = {
    (e["op"], e["domain"]): e["bytes"] for e in trace.load(path)["exchanges"]
  }
  return moved, int(dropped)


@not_with_xla("its trace has no bytes")
@pytest.mark.parametrize(
  "domains, alignment, factor, drop_by",
  [
    (1, 1, None, None),
    (2, 4, None, None),
    (2, 1, 0.6, "fair"),
    (1, 4, 0.6, "slot"),
  ],
)
def test_the_bytes_of_all_four_ops(
  tmp_path, domains, alignment, factor, drop_by
):
  ranks = jax.device_count()
  ep_size = ranks // domains
  mesh = make_mesh({"dp": domains, "ep": ep_size})
  policy = dict(overflow="drop", drop_by=drop_by) if drop_by else {}
  cfg = ep.MoEConfig(
    hidden=H, inner=1, num_experts=E, top_k=K, capacity_factor=factor, **policy
  )
  with bootstrap(mesh, alignment=alignment) as group:
    layer = ep.EpLayerConfig(group, capacity_factor=factor, **policy)
    step = step_of(layer)
    for seed in range(3):
      rng = np.random.default_rng(seed)
      ids = rng.permuted(np.tile(np.arange(E), (ranks * T, 1)), axis=1)[:, :K]
      ids[rng.random(ids.shape) < 0.2] = -1
      case = Case(layer, ids.astype(np.int32))
      moved, dropped = exchanges(step, case, tmp_path / "steps.json")
      plan = ep.plan(
        cfg,
        ep.Cluster.named("dgx_h100", num_nodes=2, gpus_per_node=ranks // 2),
        ids,
        ep_sizes=[ep_size],
        alignment=alignment,
        dtype="float32",
        transport="direct",
      )
      (forecast,) = plan.forecasts
      assert layer.capacity == forecast.capacity
      for op in forecast.sent:
        got = np.concatenate([moved[op, domain] for domain in range(domains)])
        np.testing.assert_array_equal(got, forecast.bytes)
        if alignment == 1 and not dropped:  # One row per choice, no padding.
          to_experts = op in ("ep_dispatch", "ep_combine_bwd")
          links = forecast.received if to_experts else forecast.sent
          np.testing.assert_array_equal(got, sum(links[op].values()))
      assert forecast.dropped == dropped / (ids >= 0).sum()
      assert (dropped > 0) == (factor is not None)
