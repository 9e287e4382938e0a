# SPDX-License-Identifier: Apache-2.0
"""A layer gives the same bits for every placement of its experts."""

import dataclasses
import functools

import jax
from jax import lax
import numpy as np
import pytest

from conftest import to_global
import ep
from groups import E, failing, group, H, K, T
from layer_steps import draw_params, in_slots, put, run_step, step_of, whole

F, S, R = 6, 3, 4  # inner sizes, and ranks
PLAIN = ep.MoEConfig(
  H, F, E, K, biases=True, router_bias=True, shared_inner=S, score="sigmoid"
)
DETERMINISTIC = dataclasses.replace(PLAIN, deterministic=True)
PLACEMENTS = [
  ep.Placement(range(E)),
  ep.Placement(np.roll(np.arange(E), 3)),
  ep.Placement(np.random.default_rng(7).permutation(E)),
]
STATE = ep.moe.State(np.linspace(-0.3, 0.3, E, dtype=np.float32))


def arrays(config):
  """Draws whole parameters, tokens and a cotangent."""
  rng = np.random.default_rng(0)
  params = draw_params(config, lambda shape: rng.normal(size=shape))
  return params, *rng.normal(size=(2, R * T, H)).astype(np.float32)


@pytest.mark.parametrize(
  "config, mesh, view",
  [
    pytest.param(PLAIN, "ep4", "global", id="global"),
    pytest.param(DETERMINISTIC, "dp2_ep2", "local", id="deterministic"),
  ],
)
def test_outputs_metrics_and_gradients_have_the_same_bits(config, mesh, view):
  """One program serves all placements; a call without placement agrees."""
  layer = ep.MoE(config, group(mesh))
  params, *tokens = arrays(config)

  def run(placement, params):
    y, metrics, *grads = run_step(
      layer, params, *tokens, view=view, state=STATE, placement=placement
    )
    return y, metrics._replace(max_rank_rows=None), *grads

  results = []
  for placement in PLACEMENTS:
    *others, grads, grad_x = run(placement, in_slots(placement, params))
    by_expert = in_slots(ep.Placement(placement.slots), grads)
    results.append((*others, by_expert, grad_x))
  assert step_of(layer, view)._cache_size() == 1
  if config is PLAIN:
    results.append(run(None, params))
  for got in results[1:]:
    jax.tree.map(np.testing.assert_array_equal, got, results[0])
  assert all(np.any(leaf) for leaf in jax.tree.leaves(results[0][2]))


def test_stacked_layers_are_scanned_with_their_placements():
  layer = ep.MoE(PLAIN, group("ep4"))
  params, x, _ = arrays(PLAIN)
  mesh = layer.group.mesh
  stack = functools.partial(jax.tree.map, lambda *a: np.stack(a))
  placements = stack(*PLACEMENTS)
  assert placements.experts.shape == (len(PLACEMENTS), E)

  @jax.jit
  def run(params, x, placements):
    def block(x, of_layer):
      params, placement = of_layer
      return x + layer(params, x, placement=placement)[0], None

    return lax.scan(block, x, (params, placements))[0]

  def placed(placements):
    stacked = stack(*(in_slots(p, params) for p in placements))
    specs = layer.specs(lead=1)
    stacked = {n: to_global(p, mesh, specs[n]) for n, p in stacked.items()}
    (x_of_ranks,) = put(layer, {}, x)[1:]
    return whole(run(stacked, x_of_ranks, stack(*placements)))

  alike = placed([PLACEMENTS[0]] * len(PLACEMENTS))
  np.testing.assert_array_equal(placed(PLACEMENTS), alike)


def test_moe_layer_takes_slots_and_refuses_other_ids():
  """The tokens of an expert alternate between its copies."""
  placement = ep.Placement([0, 7, 1, 0, 6, 2, 1, 5, 3, 0, 4, 0])
  held = np.bincount(placement.experts)
  assert (placement.num_experts, held.size, held.max()) == (E, E, 4)
  params, x, _ = arrays(PLAIN)
  params = {n: p for n, p in params.items() if n in ("w_up", "w_down")}
  idx = (np.arange(K) + np.arange(R * T)[:, None] // 2) % E
  idx = np.where(np.arange(R * T)[:, None] % 5 == 0, -1, idx).astype(np.int32)
  weights = np.ones((R * T, K), np.float32)

  def run(num_slots, placement):
    group_of_slots = group("ep4", num_experts=num_slots)
    layer = ep.MoE(ep.MoEConfig(H, F, num_slots, K), group_of_slots)

    @jax.jit
    def of(params, x, idx, weights, placement):
      ids = idx if placement is None else placement.slots_of(idx)
      return ids, ep.moe_layer(layer.ep_layer, x, ids, weights, **params)

    placed = params if placement is None else in_slots(placement, params)
    args = put(layer, placed, x, idx, weights)
    return *whole(of(*args, placement)), group_of_slots

  _, expected, _ = run(E, None)
  np.testing.assert_array_equal(run(E, PLACEMENTS[2])[1], expected)
  slots, y, of_slots = run(E + R, placement)
  np.testing.assert_array_equal(y, expected)
  is_used = idx >= 0
  np.testing.assert_array_equal(slots < 0, ~is_used)
  np.testing.assert_array_equal(placement.experts[slots[is_used]], idx[is_used])
  hottest = placement.slots_of(np.zeros((10, 1), np.int32)).ravel()
  assert sorted(np.bincount(hottest))[-4:] == [2, 2, 3, 3]
  idx[4, 1] = E  # the id of a slot, but not of an expert
  with failing(of_slots) as error:
    run(E + R, placement)
  assert f"topk_idx[4, 1] = {E + R}" in str(error.value)


@pytest.mark.parametrize(
  "experts",
  [
    *(3, [0, 2], [0, 2**60], [-1, 0]),
    *([[0, 1], [1, 1]], [[0, 1, 1], [0, 1, 2]], np.zeros((0, 4), int)),
  ],
)
def test_arrays_that_are_no_placement(experts):
  with pytest.raises(ValueError, match="ep.Placement: experts have shape"):
    ep.Placement(experts)


def test_a_placement_that_does_not_fit():
  with pytest.raises(TypeError, match="float64, but integers are expected"):
    ep.Placement([0.5, 1.5])
  with pytest.raises(TypeError, match="float32, but integers are expected"):
    ep.Placement(jax.numpy.arange(2.0))
  with pytest.raises(ValueError, match=r"experts have shape \(\), but they"):
    ep.Placement(jax.numpy.int32(0))
  layer = ep.MoE(PLAIN, group("ep4"))
  params, x, _ = arrays(PLAIN)
  with pytest.raises(TypeError, match="placement is a list, but an ep.Pla"):
    layer(params, x, placement=[1, 0])
  for experts, words in [
    ([*range(E), 0], r"placement has slots \(9,\) and not one for each of 8"),
    ([0, *range(E - 1)], "not one for each of 8 experts"),
    ([range(E)], "placement is of several layers"),
  ]:
    with pytest.raises(ValueError, match=words):
      layer(params, x, placement=ep.Placement(experts))
    with pytest.raises(ValueError, match=words):  # also if traced
      jax.eval_shape(
        lambda p: layer(params, x, placement=p), ep.Placement(experts)
      )
  with pytest.raises(ValueError, match="9 slots hold 8 experts, .* slots_of"):
    _ = ep.Placement([*range(E), 0]).slots
  with pytest.raises(ValueError, match=r"slots_of: .* \(1, 8\) are of several"):
    ep.Placement([range(E)]).slots_of(np.zeros((1, K), np.int32))


def test_a_placement_is_a_pytree_of_its_experts():
  (leaf,), tree = jax.tree.flatten(PLACEMENTS[1])
  assert leaf is PLACEMENTS[1].experts
  assert jax.tree.unflatten(tree, [None]).experts is None
  np.testing.assert_array_equal(leaf[PLACEMENTS[1].slots], np.arange(E))
  of_bytes = ep.Placement(np.arange(128, dtype=np.int8))  # int8 has no 128
  assert of_bytes.experts.dtype == np.int32
  assert "Placement(array([5, 6" in repr(PLACEMENTS[1])
