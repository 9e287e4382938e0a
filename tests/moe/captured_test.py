# SPDX-License-Identifier: Apache-2.0
"""Captured ids choose the experts of their tokens; the router of the others.

The expected values are loops over tokens and choices in NumPy, in float64.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from conftest import make_mesh, to_global
import ep
import groups
from groups import bootstrap, E, failing, group, H, K, of_one_process, T
from layer_steps import assert_close, draw_params, in_slots, put, whole
from oracle import make_oracle

R, F = 4, 6  # ranks, and the inner size of an expert
PLACEMENT = ep.Placement(np.roll(np.arange(E), 3))
BIAS = np.linspace(0.5, -0.5, E, dtype=np.float32)
SHORT = dict(capacity_factor=0.75, overflow="drop")

# Tokens 0, 10 and 19 are padding. All tokens of rank 1 and some tokens of the
# other ranks were not captured; the engine captured a part of token 13. Tunix
# stores ids as int16.
MASK = ~np.isin(np.arange(R * T), [0, 10, 19])
CAPTURED = np.random.default_rng(3).random((R * T, E)).argsort(axis=-1)
CAPTURED = CAPTURED[:, :K].astype(np.int16)
CAPTURED[[0, 2, 5, 6, 7, 8, 9, 12, 19]] = CAPTURED[13, 1] = -1


def make_layer(mesh="ep4", **options):
  """Returns a layer, whole parameters, tokens and a cotangent."""
  config = ep.MoEConfig(H, F, E, K, gated=False, activation=jnp.tanh, **options)
  rng = np.random.default_rng(0)
  params = draw_params(config, lambda shape: rng.normal(size=shape) / 2)
  layer = ep.MoE(config, group(mesh))
  return layer, params, *rng.normal(size=(2, R * T, H)).astype(np.float32)


def choose(layer, logits):
  """Returns ids [N, K], their weights, and whether the capacity holds them."""
  ids, weights = np.full((R * T, K), -1), np.zeros((R * T, K))
  for t in np.flatnonzero(MASK):
    ids[t] = CAPTURED[t]
    if -1 in CAPTURED[t]:
      scores = np.exp(logits[t]) / np.exp(logits[t]).sum()
      ids[t] = np.argsort(-(scores + BIAS), kind="stable")[:K]
    e = np.exp(logits[t, ids[t]])
    weights[t] = e / e.sum()
  args = ids.astype(np.int32), weights.astype(np.float32)
  kept = [r.kept.reshape(-1, K) for r in make_oracle(layer, *args).routings]
  return ids, weights, np.concatenate(kept)


def logit_gradients(ids, weights, g):
  """Returns gradients of logits [N, E], for `g` of the weights [N, K]."""
  grad = np.zeros((R * T, E))
  for t in np.flatnonzero(MASK):
    grad[t, ids[t]] = weights[t] * (g[t] - weights[t] @ g[t])
  return grad


def reference(layer, params, x, ct):
  """Returns y, the load, and the gradients of params and x, for `ct`."""
  params = {n: np.float64(p) for n, p in params.items()}
  up, down, router = (params[n] for n in ("w_up", "w_down", "router"))
  ids, weights, kept = choose(layer, x @ router)
  y, grad_x, grad_w = (np.zeros(a.shape) for a in (x, x, ids))
  grads = {n: np.zeros(p.shape) for n, p in params.items()}
  for t, k in np.argwhere(kept):
    e, w = ids[t, k], weights[t, k]
    h = np.tanh(x[t] @ up[e])
    y[t] += w * h @ down[e]
    grad_w[t, k] = ct[t] @ (h @ down[e])
    g = w * down[e] @ ct[t] * (1 - h**2)
    grads["w_down"][e] += np.outer(h, w * ct[t])
    grads["w_up"][e] += np.outer(x[t], g)
    grad_x[t] += up[e] @ g
  g = logit_gradients(ids, weights, grad_w)
  grads["router"] = x.T @ g
  load = np.bincount(ids[MASK].ravel(), minlength=E)
  return y, load, grads, grad_x + g @ router.T


def run_in(view, layer, step, in_specs, out_specs):
  if view == "local":
    specs = dict(in_specs=in_specs, out_specs=out_specs)
    step = jax.shard_map(step, mesh=layer.group.mesh, **specs)
  return jax.jit(step)


@pytest.mark.parametrize(
  "row, placement, message",
  [
    ([0, 0, 0], None, "[2, 1] = 0 repeats an expert of token 2"),
    ([0, 0, 0], PLACEMENT, "[2, 1] = 0 repeats an expert of token 2"),
    ([3, 1, -2], None, "[2, 2] = -2, but"),
  ],
)
def test_other_marks_of_uncaptured_tokens_are_refused(row, placement, message):
  """Engines clear their buffers to 0, an expert's id, before they capture."""
  layer, params, x, _ = make_layer()
  layer = ep.MoE(layer.config, bootstrap(make_mesh({"ep": R})))
  ids = CAPTURED.copy()
  ids[T + 2] = row
  run = jax.jit(functools.partial(layer, placement=placement))
  params, x, ids = put(layer, params, x, ids)
  with failing(layer.group) as error:
    jax.block_until_ready(run(params, x, captured_idx=ids))
  assert f"topk_idx{message}" in str(error.value)


@pytest.mark.parametrize("view", ["global", "local"])
@pytest.mark.parametrize(
  "options", [{}, dict(recv_capacity_per_rank=11, overflow="drop")]
)
def test_ops_on_captured_ids(view, options):
  """The output is the sum of the weights of kept choices, times the token."""
  layer = groups.layer("dp2_ep2", **options)
  _, _, x, ct = make_layer()
  logits = np.random.default_rng(1).normal(size=(R * T, E)).astype(np.float32)

  def step(logits, x, ct, mask, captured):
    def ops(logits):
      idx, weights = ep.route_topk(
        logits, K, selection_bias=BIAS, mask=mask, captured_idx=captured
      )
      handle = ep.ep_prepare(layer, idx, weights)
      rows, weights = ep.ep_dispatch(handle, x, weights)
      return ep.ep_combine(handle, rows, weights=weights), idx

    out, vjp, idx = jax.vjp(ops, logits, has_aux=True)
    return out, idx, *vjp(ct)

  spec, arrays = groups.spec(layer), (logits, x, ct, MASK, CAPTURED)
  args = (to_global(a, layer.group.mesh, spec) for a in arrays)
  out, idx, grad = whole(run_in(view, layer, step, spec, spec)(*args))
  ids, weights, kept = choose(layer, np.float64(logits))
  assert kept[MASK].all() == (not options)
  np.testing.assert_array_equal(idx, ids)
  g = logit_gradients(ids, weights, kept * (ct * x).sum(-1, keepdims=True))
  sums = (weights * kept).sum(axis=-1, keepdims=True)
  assert_close((out, grad), (sums * x, g), 1e-4, 1e-5)


@pytest.mark.parametrize(
  "mesh, view, options, placement",
  [
    ("ep4", "global", {}, None),
    ("dp2_ep2", "local", {}, None),
    ("ep4", "local", {}, PLACEMENT),
    ("dp2_ep2", "global", {}, PLACEMENT),
    ("ep4", "global", dict(token_chunks=2), None),
    ("ep4", "local", dict(capacity_factor=0.5, overflow="chunk"), None),
    ("ep4", "global", SHORT, None),
  ],
)
def test_a_layer_on_captured_ids(mesh, view, options, placement):
  layer, params, x, ct = make_layer(mesh, **options)

  def step(params, x, ct, mask, captured, state, placement):
    options = dict(mask=mask, captured_idx=captured, placement=placement)
    y, vjp, metrics = jax.vjp(
      lambda *args: layer(*args, state, **options), params, x, has_aux=True
    )
    return y, metrics.load, metrics.dropped, *vjp(ct)

  specs, spec = layer.specs(), P(layer.group.token_axes)
  in_specs = specs, *[spec] * 4, P(), P()
  run = run_in(view, layer, step, in_specs, (spec, P(), P(), specs, spec))
  slots = params if placement is None else in_slots(placement, params)
  args = put(layer, slots, x, ct, MASK, CAPTURED)
  results = whole(run(*args, ep.moe.State(BIAS), placement))
  *got, dropped, grads, grad_x = results
  if placement is not None:
    grads = in_slots(ep.Placement(placement.slots), grads)
  held = layer.ep_layer if options is SHORT else groups.layer(mesh)
  assert (dropped > 0) == (options is SHORT)
  expected = reference(held, params, x, ct)
  assert_close((*got, grads, grad_x), expected, 1e-4, 1e-4)


@of_one_process
def test_padded_batches_take_ids_of_unsigned_dtypes():
  """vLLM stores ids in the narrowest unsigned dtype, which has no -1."""
  layer, params, x, _ = make_layer("dp2_ep2")
  ids, x = np.tile(np.array([6, 1, 3], np.uint8), (2, 3, 1)), x[:6]
  run = functools.partial(layer, put(layer, params)[0], x.reshape(2, 3, H))
  y, metrics = run(pad=True, captured_idx=ids)
  np.testing.assert_array_equal(metrics.load, np.isin(range(E), ids) * 6)
  np.testing.assert_array_equal(y, run(pad=True, forced_idx=ids)[0])
