# SPDX-License-Identifier: Apache-2.0
"""A layer has the same bits wherever its experts are."""

import dataclasses
import functools

import jax
from jax import lax
import numpy as np
import pytest

from conftest import to_global
import ep
from ep._src.ops import reference
from groups import E, failing, group, H, K, T
from layer_steps import in_slots, put, step_of, whole

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
  """Returns whole parameters, tokens and a cotangent, all of normal floats."""
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(lambda: ep.moe.init(jax.random.key(0), config))
  params = {
    n: rng.normal(size=s.shape).astype(np.float32) for n, s in shapes.items()
  }
  x, ct = rng.normal(size=(2, R * T, H)).astype(np.float32)
  return params, x, ct


def by_expert(placement, params):
  return in_slots(ep.Placement(placement.slots), params)


@pytest.mark.parametrize(
  "config, mesh, view",
  [
    pytest.param(PLAIN, "ep4", "global", id="global"),
    pytest.param(PLAIN, "dp2_ep2", "local", id="local"),
    pytest.param(DETERMINISTIC, "dp2_ep2", "global", id="deterministic"),
  ],
)
def test_outputs_metrics_and_gradients_have_the_same_bits(config, mesh, view):
  """One program serves all placements; no placement has the same bits, too."""
  layer = ep.MoE(config, group(mesh))
  params, *tokens = arrays(config)
  step = step_of(layer, view)

  def run(placement, params):
    args = put(layer, params, *tokens), STATE, placement
    y, metrics, grads, grad_x = whole(step(*args[0], *args[1:]))
    return y, metrics._replace(max_rank_rows=None), grads, grad_x

  results = []
  for placement in PLACEMENTS:
    *others, grads, grad_x = run(placement, in_slots(placement, params))
    results.append((*others, by_expert(placement, grads), grad_x))
  assert step._cache_size() == 1
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


def test_moe_layer_takes_slots():
  layer = ep.MoE(ep.MoEConfig(H, F, E, K), group("ep4"))
  params, x, _ = arrays(layer.config)
  idx, weights = ep.route_topk(x @ params["router"], K)
  idx = np.where(np.arange(R * T)[:, None] % 3 == 0, -1, idx).astype(np.int32)

  @jax.jit
  def run(params, x, idx, weights, placement):
    del params["router"]
    ids = placement.slots_of(idx)
    return ep.moe_layer(layer.ep_layer, x, ids, weights, **params)

  first, *others = (
    whole(run(*put(layer, in_slots(p, params), x, idx, weights), p))
    for p in PLACEMENTS
  )
  for got in others:
    np.testing.assert_array_equal(got, first)
  assert (first[::3] == 0).all() and first[1::3].all()


def test_drops_are_of_experts():
  config = dataclasses.replace(PLAIN, capacity_factor=1.0, overflow="drop")
  layer = ep.MoE(config, group("ep4"))
  params, x, ct = arrays(config)
  params["router"][:, 1:] = 0  # all tokens of one sign choose expert 0
  placement = PLACEMENTS[2]
  args = put(layer, in_slots(placement, params), x, ct)
  metrics = whole(step_of(layer)(*args, None, placement)[1])
  rows = metrics.load[placement.experts].reshape(R, -1).sum(axis=1)
  assert metrics.max_rank_rows == rows.max() > T * K
  drops = metrics.drops[placement.experts].reshape(R, -1).sum(axis=1)
  np.testing.assert_array_equal(drops, np.maximum(rows - T * K, 0))
  assert (metrics.drops <= metrics.load).all()


def test_a_choice_that_moves_has_the_weight_of_its_expert():
  """The layer is the one in which those experts were chosen at first."""
  config = dataclasses.replace(
    PLAIN, capacity_factor=1.4, overflow="drop", num_candidates=E
  )
  params, x, _ = arrays(config)
  placement, bias = PLACEMENTS[2], np.float32(0.8) * (np.arange(E) < K)
  layer = ep.MoE(config, group("ep4"))
  candidates, weights = ep.route_topk(
    x @ params["router"] + params["router_bias"],
    K,
    num_candidates=E,
    score="sigmoid",
    selection_bias=bias,
  )
  candidates = np.asarray(candidates)
  assigned = reference.assign(
    placement.slots[candidates].reshape(R, T, E),
    np.asarray(weights).reshape(R, T, E),
    top_k=K,
    num_experts=E,
    capacity=layer.ep_layer.capacity,
    drop_by="fair",
  ).reshape(-1, K)
  used = np.take_along_axis(candidates, assigned, axis=1)
  wide = ep.MoE(PLAIN, group("ep4"))
  state = ep.moe.State(bias)

  @jax.jit
  def moved(params, x, placement):
    return layer(params, x, state, placement=placement)

  got, metrics = whole(
    moved(*put(layer, in_slots(placement, params), x), placement)
  )
  assert metrics.moved == (assigned >= K).sum() > 0 == metrics.drops.sum()

  @jax.jit
  def forced(params, x, idx):
    return wide(params, x, state, forced_idx=idx)[0]

  expected = whole(forced(*put(wide, params, x, used)))
  np.testing.assert_allclose(got, expected, 1e-5, 1e-6)


def test_an_id_that_is_no_expert_is_refused():
  layer = ep.MoE(PLAIN, group("ep4"))
  params, x, _ = arrays(PLAIN)
  idx = np.tile(np.arange(K, dtype=np.int32), (R * T, 1))
  idx[3, 1] = E
  args = put(layer, params, x, idx)

  @jax.jit
  def run(params, x, idx):
    return layer(params, x, forced_idx=idx, placement=PLACEMENTS[1])

  with failing(layer.group) as error:
    jax.block_until_ready(run(*args))
  assert f"= {E}" in str(error.value)


@pytest.mark.parametrize(
  "experts",
  [3, [0, 2], [0, 2**60], [-1, 0], [[0, 1], [1, 1]], np.zeros((0, 4), int)],
)
def test_a_placement_of_no_experts(experts):
  with pytest.raises(ValueError, match="ep.Placement: experts have shape"):
    ep.Placement(experts)


def test_a_placement_that_does_not_fit():
  with pytest.raises(TypeError, match="float64, but integers are expected"):
    ep.Placement([0.5, 1.5])
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


def test_a_placement_is_a_pytree_of_its_experts():
  (leaf,), tree = jax.tree.flatten(PLACEMENTS[1])
  assert leaf is PLACEMENTS[1].experts
  assert jax.tree.unflatten(tree, [None]).experts is None
  np.testing.assert_array_equal(leaf[PLACEMENTS[1].slots], np.arange(E))
  of_bytes = ep.Placement(np.arange(128, dtype=np.int8))  # 128 is none of int8
  assert of_bytes.experts.dtype == np.int32
  assert "Placement(array([5, 6" in repr(PLACEMENTS[1])
