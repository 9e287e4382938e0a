# SPDX-License-Identifier: Apache-2.0
"""A layer whose ranks do not divide its experts has the bits of other layers.

Tests compare meshes of equally many ranks, because the shapes of a rank's
arrays decide how XLA rounds. Five experts have the slots 01 23 4- -- on 4
ranks, 01 23 4- on 3 ranks, and 012 34- on 2 ranks.
"""

import contextlib
import dataclasses
import math

import jax
from jax.sharding import AxisType, PartitionSpec
import numpy as np
import pytest

from conftest import make_mesh, to_global
import ep
from groups import BACKEND, failing, H, K, of_one_process
from layer_steps import (
  assert_same_bits,
  draw_params,
  put,
  put_moe,
  run_forward,
  run_step,
  whole,
)

E, F, TOKENS = 5, 6, 24
PLAIN = ep.MoEConfig(
  H, F, E, K, biases=True, router_bias=True, shared_inner=3, score="sigmoid"
)
DETERMINISTIC = dataclasses.replace(PLAIN, deterministic=True)
SPECS = ep.moe.partition_specs(PLAIN)
EP4, EP3, EP2 = {"ep": 4}, {"ep": 3}, {"dp": 2, "ep": 2}
# The empty slots 5, 6 and 7 are not the last ones.
SPREAD = ep.Placement([5, 3, 0, 6, 4, 1, 7, 2])


@contextlib.contextmanager
def layer_on(axes, config=PLAIN, **options):
  layer = ep.MoE(config, make_mesh(axes), backend=BACKEND, **options)
  with layer.group:
    yield layer


def arrays():
  """Draws whole parameters of 5 experts, tokens and a cotangent."""
  rng = np.random.default_rng(0)
  params = draw_params(PLAIN, lambda shape: rng.normal(size=shape) / 2)
  return params, *rng.normal(size=(2, TOKENS, H)).astype(np.float32)


def cut(params):
  """Returns the parameters of 5 experts; the others must be zero."""
  for name, spec in SPECS.items():
    assert "ep" not in spec or not params[name][E:].any(), name
  return ep.moe.with_slots(params, SPECS, E)


def step_on(axes, config=PLAIN, placement=None):
  """Returns outputs, metrics and gradients, in the order of expert ids."""
  params, *tokens = arrays()
  with layer_on(axes, config) as layer:
    params = ep.moe.with_slots(params, SPECS, layer.num_expert_slots)

    def by_slot(params, order):
      return {n: p[order] if "ep" in SPECS[n] else p for n, p in params.items()}

    if placement is not None:
      params = by_slot(params, placement.experts)
    y, metrics, grads, grad_x = run_step(
      layer, params, *tokens, placement=placement
    )
  if placement is not None:
    grads = by_slot(grads, placement.slots)
  return y, metrics._replace(max_rank_rows=None), cut(grads), grad_x


def without_ep(axes):
  return {"dp": math.prod(axes.values()), "ep": 1}


def check_same(got, expected):
  jax.tree.map(np.testing.assert_array_equal, got, expected)


@of_one_process
@pytest.mark.parametrize("axes", [EP4, EP2, EP3], ids=str)
def test_a_deterministic_layer_has_the_same_bits_on_every_mesh(axes):
  expected = step_on(without_ep(axes), DETERMINISTIC)
  assert all(np.any(leaf) for leaf in jax.tree.leaves(expected[2]))
  check_same(step_on(axes, DETERMINISTIC), expected)


@pytest.mark.parametrize("config", [PLAIN, DETERMINISTIC], ids=["", "fixed"])
def test_a_placement_chooses_the_empty_slots(config):
  check_same(step_on(EP4, config, SPREAD), step_on(EP4, config))


@of_one_process
@pytest.mark.parametrize(
  "axes, options",
  [
    (EP3, dict(token_chunks=3)),
    (EP4, dict(capacity_factor=1.5, overflow="chunk")),
  ],
  ids=str,
)
def test_options_change_no_output(axes, options):
  params, x, _ = arrays()

  def outputs(axes, config):
    with layer_on(axes, config) as layer:
      slots = ep.moe.with_slots(params, SPECS, layer.num_expert_slots)
      y, metrics = run_forward(layer, slots, x)
    return y, metrics.load, metrics.drops

  config = dataclasses.replace(PLAIN, **options)
  check_same(outputs(axes, config), outputs(without_ep(axes), PLAIN))


def test_init_appends_zeros_to_the_experts():
  def params_on(axes):
    with layer_on(axes) as layer:
      params = whole(layer.init(jax.random.key(0)))
      assert params["w_up"].shape == (layer.num_expert_slots, H, F)
    return params

  assert_same_bits(cut(params_on(EP4)), params_on(without_ep(EP4)))


@pytest.mark.parametrize("kind", [np.asarray, jax.numpy.asarray])
def test_with_slots_cuts_and_extends_stacked_experts(kind):
  stacked = {n: kind(np.stack([p, -p])) for n, p in arrays()[0].items()}
  specs = ep.moe.partition_specs(PLAIN, lead=1)
  more = ep.moe.with_slots(stacked, specs, 7)
  assert more["w_up"].shape == (2, 7, H, F) and type(more["b_up"]) is type(
    stacked["b_up"]
  )
  assert not more["w_up"][:, E:].any() and more["router"] is stacked["router"]
  with_others = PartitionSpec(None, ("dp", "ep"))
  assert ep.moe.with_slots(stacked["b_up"], with_others, 7).shape == (2, 7, F)
  assert_same_bits(ep.moe.with_slots(more, specs, E), stacked)


def test_with_slots_of_explicit_axes():
  mesh = make_mesh({"ep": 4}, (AxisType.Explicit,))
  x = np.arange(16.0).reshape(8, 2)
  spec = PartitionSpec("ep")
  cut = jax.jit(lambda x: ep.moe.with_slots(x, spec, E))
  got = cut(to_global(x, mesh, spec))
  np.testing.assert_array_equal(whole(got), x[:E])
  kept = to_global(x, mesh, spec)
  assert ep.moe.with_slots(kept, spec, 8) is kept


def test_the_id_of_an_empty_slot_is_refused():
  params, x, _ = arrays()
  ids = np.tile(np.arange(K), (TOKENS, 1))
  ids[7, 1] = E
  with layer_on(EP4, name="uneven") as layer:
    params = ep.moe.with_slots(params, SPECS, 8)
    with failing(layer.group) as error:
      run_forward(layer, params, x, forced_idx=ids)
  assert 'ep_prepare(layer "uneven"), rank 1: topk_idx[1, 1] = 5' in str(
    error.value
  )
  assert "num_experts = 5; valid ids are -1..4" in str(error.value)


def test_a_placement_needs_a_group_that_counts_slots():
  params, x, _ = arrays()
  mesh = make_mesh(EP4)
  with ep.ep_bootstrap(mesh, num_experts=E, backend=BACKEND) as group:
    layer = ep.MoE(PLAIN, group)
    params, x = put(layer, ep.moe.with_slots(params, SPECS, 8), x)
    with pytest.raises(ValueError, match="uses all 8 slots.*num_experts = 5"):
      layer(params, x, placement=SPREAD)
    y, _ = layer(params, x)
  check_same(whole(y), step_on(EP4)[0])


def test_move_reorders_empty_slots_with_the_experts():
  params, *_ = arrays()
  with layer_on(EP4) as layer:
    slots = ep.moe.with_slots(params, SPECS, 8)
    (here,) = put(layer, slots)
    moved = ep.moe.move(layer.group, here, SPECS, old=None, new=SPREAD)
    np.testing.assert_array_equal(
      whole(moved["w_up"]), slots["w_up"][SPREAD.experts]
    )
    back = ep.moe.move(layer.group, moved, SPECS, old=SPREAD, new=None)
    assert_same_bits(cut(whole(back)), params)


def two_products(segments, params, rows):
  return segments.matmul(
    segments.matmul(rows, params["w_up"]), params["w_down"]
  )


def test_moe_layer_reads_no_matrix_of_an_empty_slot():
  params, x, _ = arrays()
  rng = np.random.default_rng(1)
  idx = rng.permuted(np.tile(np.arange(E), (TOKENS, 1)), axis=1)[:, :K]
  weights = rng.random((TOKENS, K), np.float32)

  def outputs(axes):
    with ep.ep_bootstrap(
      make_mesh(axes), num_experts=E, backend=BACKEND
    ) as group:
      layer = ep.EpLayerConfig(group, top_k=K)
      nan = np.full((group.num_expert_slots - E, H, F), np.nan, np.float32)
      up = np.concatenate([params["w_up"], nan])
      matrices = dict(w_up=up, w_down=up.swapaxes(1, 2))
      ids, *args, matrices = put_moe(layer, idx, x, weights, matrices)
      run = jax.jit(ep.moe_layer, static_argnums=0, static_argnames="experts")
      args = layer, args[0], ids, args[1]
      own = run(*args, experts=two_products, params=matrices)
      return whole((run(*args, **matrices), own))

  check_same(outputs(EP4), outputs(without_ep(EP4)))
