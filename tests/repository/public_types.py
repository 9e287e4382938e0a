# SPDX-License-Identifier: Apache-2.0
"""Typical uses of every public name, which mypy checks in strict mode.

//release:wheel_test runs mypy against the installed package. Nothing runs this
file.
"""

from collections.abc import Callable
import contextlib
import math
from typing import assert_type

import jax
import jax.numpy as jnp
import numpy as np

import ep
from ep import launch, lax, moe, presets, quant, testing


def groups_and_layers(mesh: jax.sharding.Mesh) -> ep.EpLayerConfig:
  with ep.ep_bootstrap(
    mesh,
    num_experts=8,
    max_tokens_per_rank=16,
    hidden_dim=None,
    top_k=2,
    max_token_dtype=jnp.bfloat16,
  ) as group:
    assert_type(group, ep.EpGroup)
    group.raise_failures()
    assert_type(group.ep_size, int)
  ep.ep_finalize(group)
  layer = ep.EpLayerConfig(group, alignment=8, overflow="drop", name="first")
  assert_type(layer.capacity, int)
  assert_type(layer.capacity_for(16), int)
  assert_type(ep.ep_resize(group, max_tokens_per_rank=32), ep.EpGroup)
  return layer


def ops(
  layer: ep.EpLayerConfig, tokens: jax.Array, logits: jax.Array
) -> jax.Array:
  topk_idx, topk_weights = ep.route_topk(logits, 2, score="sigmoid")
  assert_type(topk_idx, jax.Array)
  handle = ep.ep_prepare(layer, topk_idx)
  assert_type(handle, ep.EpHandle)
  assert_type(handle.group_sizes, jax.Array)
  assert_type(handle.kept, jax.Array)
  assert_type(handle.layer, ep.EpLayerConfig)
  assert_type(handle.capacity, int)
  fair = ep.EpLayerConfig(layer.group, overflow="drop", drop_by="fair")
  weighted = ep.ep_prepare(fair, topk_idx, topk_weights)
  ep.check(weighted)
  assert_type(weighted.dropped_counts, jax.Array)
  assert_type(weighted.max_recv_tokens, jax.Array)
  rows, row_weights = ep.ep_dispatch(handle, tokens, topk_weights)
  assert_type(rows, jax.Array)
  matrices = jnp.ones((4, 32, 32))
  sizes = handle.group_sizes
  for by in (None, "tiles", jax.lax.ragged_dot):
    out = ep.grouped_matmul(rows, matrices, sizes, implementation=by)
    assert_type(out, jax.Array)
  assert_type(ep.ep_combine(handle, rows, weights=row_weights), jax.Array)
  assert_type(ep.ordered_psum(tokens, "dp"), jax.Array)
  with ep.checked():
    return ep.ep_combine(handle, rows)


def dense_routing(
  layer: ep.EpLayerConfig, routing_map: jax.Array, probs: jax.Array
) -> ep.EpHandle:
  topk_idx, topk_weights = ep.topk_from_map(routing_map, probs, top_k=2)
  assert_type(topk_weights, jax.Array)
  return ep.ep_prepare(layer, topk_idx)


def placements(metrics: moe.Metrics) -> None:
  placement = ep.place(metrics.load, 4, nodes=2)
  assert_type(placement, ep.Placement)
  assert_type(placement.slots_of(jnp.ones(2, int)), jax.Array)
  ep.place(np.ones((2, 3, 8)), 4, old=placement, move_cost=1e-3)


def losses(logits: jax.Array, topk_idx: jax.Array) -> jax.Array:
  loss = ep.load_balancing_loss(logits, topk_idx, axis_name=("dp", "ep"))
  assert_type(loss, jax.Array)
  loss += ep.sequence_balancing_loss(logits, topk_idx, score="sigmoid")
  return loss + ep.router_z_loss(logits)


def layers(
  layer: ep.EpLayerConfig, x: jax.Array, topk: tuple[jax.Array, jax.Array]
) -> None:
  matrices = jnp.ones((4, 32, 32))
  out = ep.moe_layer(layer, x, *topk, w_up=matrices, w_down=matrices)
  assert_type(out, jax.Array)
  out, handle = ep.moe_layer(
    layer, x, *topk, w_up=matrices, w_down=matrices, return_handle=True
  )
  assert_type(handle, ep.EpHandle)

  def experts(
    segments: ep.moe.Segments, params: jax.Array, rows: jax.Array
  ) -> jax.Array:
    product: jax.Array = segments.matmul(rows, params)
    return product

  out = ep.moe_layer(layer, x, *topk, experts=experts, params=matrices)
  assert_type(out, jax.Array)
  config = ep.MoEConfig(hidden=32, inner=64, num_experts=8, top_k=2)
  whole = ep.MoE(config, layer.group.mesh, name="first", backend="xla")
  whole = ep.MoE(config, whole.group)
  assert_type(whole.ep_layer, ep.EpLayerConfig)
  params = moe.init(jax.random.key(0), config, jnp.bfloat16)
  params, state = whole.init(jax.random.key(0)), whole.init_state()
  assert_type(params, dict[str, jax.Array])
  assert_type(whole.specs(), dict[str, jax.sharding.PartitionSpec])
  assert_type(
    moe.partition_specs(config), dict[str, jax.sharding.PartitionSpec]
  )
  y, metrics = whole(
    params, x, state, mask=None, placement=ep.Placement(range(8))
  )
  assert_type(y, jax.Array)
  assert_type(metrics, moe.Metrics)
  moe.move(whole.group, params, whole.specs(), old=None, new=ep.Placement([0]))
  slots = moe.with_slots(params, whole.specs(), whole.num_expert_slots)
  assert_type(slots, dict[str, jax.Array])
  assert_type(state.after(metrics.load), moe.State)
  assert_type(presets.scaled(presets.OLMOE_1B_7B, 8), ep.MoEConfig)


def quantizers(
  handle: ep.EpHandle, x: jax.Array, topk_weights: jax.Array
) -> jax.Array:
  rows, scales = quant.quantize(x, "mxfp8")
  recv = ep.ep_dispatch(handle, rows, topk_weights, scales=scales)
  assert_type(recv, tuple[jax.Array, jax.Array, jax.Array])
  return quant.dequantize(recv[0], recv[2], jnp.bfloat16)


def inspection(handle: ep.EpHandle, compiled: jax.stages.Compiled) -> None:
  summary = ep.describe(handle)
  assert_type(summary, ep.RoutingSummary)
  ep.assert_no_hidden_collectives(compiled, allow=["all-reduce"])
  ep.assert_ordered_collectives(compiled)
  assert_type(ep.keep_routing(jnp.zeros((8, 2), jnp.int32)), jax.Array)
  with contextlib.suppress(*ep.EpError):
    handle.group_sizes.block_until_ready()


def ragged(rows: jax.Array, slices: jax.Array) -> None:
  with lax.install():
    out = lax.ragged_all_to_all(
      rows, rows, slices, slices, slices, slices, axis_name=("dp", "ep")
    )
  assert_type(out, jax.Array)


def ranks() -> int:
  if launch.inside_launcher():
    launch.initialize()
    return 0
  return launch.launch(["train.py"], num_processes=4, timeout_s=60.0)


def watch(state: ep.moe.State) -> None:
  with ep.watch(stall_s=300, exit_after_s=math.inf) as watched:
    assert_type(watched, ep.watch)
    with ep.watch.step("train") as launched:
      assert_type(launched(state), ep.moe.State)


def conformance(
  setting: testing.Setting,
  exchange: tuple[Callable[..., testing.Received], Callable[..., jax.Array]],
  layer: tuple[Callable[..., jax.Array], jax.Array],
) -> None:
  assert_type(setting.num_local_experts, int)
  transport = testing.Transport(
    name="mine",
    build=lambda setting: exchange,
    tolerance=testing.Tolerance(1),
    tail="zero",
  )

  def expert(params: jax.Array, e: int, rows: jax.Array) -> jax.Array:
    return params[e] * rows

  whole = testing.Layer(name="mine", build=lambda _: layer, expert=expert)
  subjects: list[testing.Subject] = [transport, whole]
  testing.check(testing.GroupedMatmul(name="ours", matmul=ep.grouped_matmul))
  for subject in subjects:
    report = testing.check(subject, ["output"])
    assert_type(report, testing.Report)
    assert_type(report.failures, dict[str, str])
    assert_type(report.lines, tuple[testing.Line, ...])
  case: testing.Case = testing.cases(transport)[0].values[0]
  assert_type(case.check(), float)
