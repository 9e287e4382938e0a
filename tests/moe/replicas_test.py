# SPDX-License-Identifier: Apache-2.0
"""Expert copies change no output; the order in which gradients add is fixed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from options_test import HIDDEN, layer_of, PLAIN, R
import pytest

from conftest import make_mesh, to_global
import ep
from ep._src.moe.replicas import divide
from groups import bootstrap, E, failing, group, H, K, T
from layer_steps import draw_params, put, run_forward, run_step, whole

_E = np.arange(E)

# Logits of eight routings, from an even load to a single busy rank.
LOGITS = {
  "even": 0.0 * _E,
  "noise": np.random.default_rng(1).normal(size=E) / 4,
  "zipf_half": -np.log(_E + 1) / 2,
  "zipf": -np.log(_E + 1),
  "halves": -np.log(2) * _E,
  "one_expert": 9.0 * (_E == 5),
  "one_rank": 9.0 * (_E < 2),
  "idle_rank": -9.0 * (_E > 5),
}


def arrays(name, config=PLAIN):
  rng = np.random.default_rng(0)
  size = 1 if config.hidden == H else 2
  params = draw_params(config, lambda shape: rng.normal(size=shape) / size)
  x, ct = rng.normal(size=(2, R * T, config.hidden)).astype(np.float32)
  x[:, 0], params["router"][0] = 1, 4 * LOGITS[name]
  return params, x, ct


def vose(rows, capacity, num_slots):
  """Returns all expert copies, as {(expert, rank): (slot, first, end)}.

  The copy takes the rows at positions first..end of its expert's queue. The
  loop fills one rank after another with rows of the fullest ranks.
  """
  P, L = rows.shape
  load, has = rows.sum(1), rows.sum(1)
  queue = sorted(range(P), key=lambda r: load[r])
  takers = [r for r in queue if load[r] <= capacity]
  donors = [r for r in reversed(queue) if load[r] > capacity]
  left, given = sum(load[donors] - capacity), np.zeros(P, int)
  copies = {}
  while donors and takers:
    taker, donor = takers.pop(0), donors[0]
    takes = capacity - has[taker]
    if load[taker] <= capacity:
      takes = min(takes, left)
      left -= takes
    start, given[donor] = given[donor], given[donor] + takes
    has[taker], has[donor] = has[taker] + takes, has[donor] - takes
    pieces, first = [], 0
    for j in np.argsort(-rows[donor], kind="stable"):
      span = np.clip([start - first, given[donor] - first], 0, rows[donor, j])
      if span[0] < span[1]:
        pieces.append((span[0] - span[1], j, span))
      first += rows[donor, j]
    for slot, (_, j, span) in enumerate(sorted(pieces, key=lambda p: p[:2])):
      if slot < num_slots:
        copies[donor * L + j, taker] = slot, *span
    if has[donor] <= capacity:
      takers = [r for r in donors[:1] if has[r] < capacity] + takers
      donors.pop(0)
  return copies


def slots_of(idx, copies, num_slots, ranks):
  """Returns the slots [N, K] for the choices [N, K] of a domain's tokens."""
  L, positions, slots = E // ranks, np.zeros(E, int), np.zeros_like(idx)
  for t, k in np.ndindex(idx.shape):
    e = idx[t, k]
    slots[t, k] = e // L * (L + num_slots) + e % L
    for (expert, rank), (slot, first, end) in copies.items():
      if expert == e and first <= positions[e] < end:
        slots[t, k] = rank * (L + num_slots) + L + slot
    positions[e] += 1
  return slots


def without_rows(metrics):
  return metrics._replace(max_rank_rows=None)


@pytest.mark.parametrize("name", LOGITS)
def test_no_rank_exceeds_the_mean_and_outputs_have_the_same_bits(name):
  params, *tokens = arrays(name)
  y, metrics, grads, grad_x = run_step(layer_of(), params, *tokens)
  got, got_metrics, got_grads, got_x = run_step(
    layer_of(replica_slots=E // R), params, *tokens
  )
  assert got_metrics.max_rank_rows == T * K <= metrics.max_rank_rows
  jax.tree.map(
    np.testing.assert_array_equal,
    (got, without_rows(got_metrics), got_x),
    (y, without_rows(metrics), grad_x),
  )
  for n, grad in got_grads.items():
    np.testing.assert_allclose(grad, grads[n], 1e-4, 1e-4, err_msg=n)


@functools.cache
def slot_gradients(layer):
  """Returns a program that computes a matrix gradient for each slot."""

  @jax.jit
  def gradients(params, x, ct, ids, weights):
    def loss(params):
      y = ep.moe_layer(
        layer, x, ids, weights, activation=PLAIN.activation, **params
      )
      return (y * ct).sum()

    return jax.grad(loss)(params)

  return gradients


@pytest.mark.parametrize("name", ["zipf", "one_expert", "one_rank"])
def test_gradients_add_the_home_slot_and_then_its_copies(name):
  """A plain layer computes a gradient per slot, and NumPy adds the gradients.

  The plain layer has no biases, so the biases here are zeros.
  """
  num_slots = E // R
  layer = layer_of(replica_slots=num_slots)
  params, x, ct = arrays(name)
  params |= {n: 0 * p for n, p in params.items() if n.startswith("b_")}
  _, metrics, grads, _ = run_step(layer, params, x, ct)
  # One matmul of all tokens may round differently than one matmul per rank.
  logits = [
    jnp.matmul(part, params["router"], precision="highest")
    for part in np.split(x, R)
  ]
  route = functools.partial(ep.route_topk, normalize=False)
  idx, weights = map(np.asarray, route(np.concatenate(logits), K))
  L, slots = E // R, E // R + num_slots
  rows = np.bincount(idx.ravel(), minlength=E).reshape(R, L)
  copies = vose(rows, T * K, num_slots)
  assert copies
  held = np.zeros((R, slots), np.int32)  # the expert of each slot
  held[:, :L] = np.arange(E).reshape(R, L)
  for (expert, rank), (slot, *_) in copies.items():
    held[rank, L + slot] = expert
  ids = slots_of(idx, copies, num_slots, R)
  load = np.bincount(ids.ravel() // slots, minlength=R)
  assert metrics.max_rank_rows == load.max()

  of_slots = slot_gradients(ep.EpLayerConfig(layer.group, top_k=K))
  wide, mesh, specs = {}, layer.group.mesh, layer.specs()
  for n, p in params.items():
    if n.startswith("w_"):
      wide[n] = to_global(p[held.ravel()], mesh, specs[n])
  put_x = put(layer, {}, x, ct, ids, weights)[1:]
  for n, grad in whole(of_slots(wide, *put_x)).items():
    grad = grad.reshape(R, slots, *grad.shape[1:])
    sums = np.zeros_like(params[n])
    for (expert, rank), (slot, *_) in sorted(copies.items()):
      sums[expert] += grad[rank, L + slot]
    expected = grad[:, :L].reshape(sums.shape) + sums
    np.testing.assert_array_equal(grads[n], expected)


def test_drops_are_counted_by_expert_and_wrong_ids_are_refused():
  """Rows that fit into no copy stay with the expert, which may drop them."""
  layer = layer_of(replica_slots=1, capacity_factor=1.0, overflow="drop")
  params, x, _ = arrays("one_rank")
  idx = np.argsort(-x @ params["router"])[:, :K].astype(np.int32)
  _, metrics = run_forward(layer, params, x, idx)
  rows = metrics.load.reshape(R, -1).sum(1)
  copies = vose(metrics.load.astype(int).reshape(R, -1), T * K, 1)
  change = np.zeros(R, int)
  for (expert, rank), (_, first, end) in copies.items():
    change[expert // (E // R)] -= end - first
    change[rank] += end - first
  drops = metrics.drops.reshape(R, -1).sum(1)
  np.testing.assert_array_equal(drops, (rows + change - T * K).clip(0))
  assert drops.any()
  idx[3, 1] = E
  with failing(layer.group) as error:
    run_forward(layer, params, x, idx)
  assert "topk_idx[3, 1]" in str(error.value)


@pytest.mark.parametrize("P, L", [(1, 3), (2, 1), (8, 4)])
def test_no_rank_has_more_than_the_mean(P, L):
  rng = np.random.default_rng(0)
  of = jax.jit(divide, static_argnums=2)
  for i in range(60):
    spread = rng.pareto(0.5, (P, L)) * 10, rng.poisson(99, (P, L))
    rows = np.clip(spread[i % 2], 0, 1e5).astype(np.int32)
    rows *= rng.random((P, L)) < 0.7
    capacity = -(-rows.sum() // P) + 7 * (i % 3)
    division = jax.tree.map(np.asarray, of(rows, capacity, L))
    load, copies = rows.sum(1), vose(rows, capacity, L)
    for (expert, rank), (slot, first, end) in copies.items():
      donor, j = divmod(expert, L)
      assert (division.donor[rank], division.slots[rank, j]) == (donor, slot)
      positions = division.start[rank], division.end[rank]
      positions = (np.array(positions) - division.first[donor, j]).clip(
        0, rows[donor, j]
      )
      np.testing.assert_array_equal(positions, [first, end])
      load[[donor, rank]] += [first - end, end - first]
    assert (division.slots >= 0).sum() == len(copies) and load.max() <= capacity


def test_derivatives_of_all_orders():
  """Copies change no derivative, in reverse over forward mode."""
  config = ep.MoEConfig(H, 5, E, K)
  params, *tokens = arrays("one_expert", config)

  def curvature(num_slots):
    of_layer = dataclasses.replace(config, replica_slots=num_slots)
    layer = ep.MoE(of_layer, group("ep4", num_experts=E + R * num_slots))

    @jax.jit
    def of(params, x, ct):
      router = {"router": params.pop("router")}

      def slope(params):
        y, dy = jax.jvp(lambda p: layer(router | p, x)[0], (params,), (params,))
        return (y * ct).sum() + (dy * ct).sum()

      return jax.grad(slope)(params)

    args, *others = put(layer, params, *tokens)
    return whole(of(args, *others))

  expected = curvature(0)
  for n, got in curvature(2).items():
    np.testing.assert_allclose(got, expected[n], 1e-3, 1e-2, err_msg=n)


def test_replicas_refuse():
  for options in (dict(deterministic=True), dict(token_chunks=2)):
    with pytest.raises(ValueError, match="replica_slots = 1 and"):
      dataclasses.replace(PLAIN, replica_slots=1, **options)
  config = dataclasses.replace(PLAIN, replica_slots=1)
  with pytest.raises(ValueError, match="replica_slots = 1 needs 12, but the"):
    ep.MoE(config, layer_of().group)
  with (
    bootstrap(
      make_mesh({"ep": 4}),
      num_experts=E + 4,
      hidden_dim=HIDDEN,
      max_tokens_per_rank=1,
    ) as wide,
    pytest.raises(ValueError, match="max_tokens_per_rank = 1, but a copy"),
  ):
    ep.MoE(config, wide)


def test_masked_tokens_need_no_rows():
  params, *tokens = arrays("one_expert")
  y, *_ = run_step(layer_of(), params, *tokens)
  layer = layer_of(replica_slots=E // R)
  for mask in np.arange(R * T) % 3 > 0, np.zeros(R * T, bool):
    got, metrics = run_forward(layer, params, tokens[0], mask=mask)
    np.testing.assert_array_equal(got, np.where(mask[:, None], y, 0))
    assert metrics.max_rank_rows == -(-mask.sum() * K // R)


@pytest.mark.parametrize(
  "mesh, ranks, options",
  [("ep4", 4, dict(alignment=4)), ("dp4_ep1", 1, dict(max_tokens_per_rank=E))],
  ids=["aligned", "alone"],
)
def test_the_capacity_includes_the_padding_of_slots(mesh, ranks, options):
  num_slots = E // ranks
  params, *tokens = arrays("one_rank")
  config = dataclasses.replace(PLAIN, replica_slots=num_slots)
  options = dict(hidden_dim=HIDDEN, num_experts=2 * E) | options
  layer = ep.MoE(config, group(mesh, **options))
  y, metrics = run_forward(layer, params, tokens[0])
  padding = 2 * num_slots * (options.get("alignment", 1) - 1)
  assert metrics.max_rank_rows <= T * K + padding
  expected = run_step(layer_of(), params, *tokens)
  np.testing.assert_array_equal(y, expected[0])


def test_copies_of_tensor_parallel_experts():
  """Ranks that split a matrix choose the same copies; each copies its shard."""
  params, x, ct = arrays("one_rank")
  _, metrics, expected, _ = run_step(layer_of(), params, x, ct)
  rows = metrics.load.reshape(2, -1).sum(1)
  config = dataclasses.replace(PLAIN, tp_axis="tp", replica_slots=E // 2)
  with bootstrap(
    make_mesh({"ep": 2, "tp": 2}),
    num_experts=2 * E,
    hidden_dim=HIDDEN,
    max_tokens_per_rank=2 * T,
    data_axes=(),
  ) as wide:
    layer = ep.MoE(config, wide)
    _, metrics, grads, _ = run_step(layer, params, x, ct, view="local")
  assert metrics.max_rank_rows == rows.mean() < rows.max()
  for name, grad in grads.items():
    np.testing.assert_allclose(grad, expected[name], 1e-4, 1e-4, err_msg=name)
