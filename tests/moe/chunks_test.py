# SPDX-License-Identifier: Apache-2.0
"""Layers that send tokens in chunks give the results of a single exchange.

`overflow="chunk"` gives the results of a capacity that fits any routing.
`token_chunks` gives the same results in less memory. Most tests use small whole
numbers: float32 adds them exactly in any order, so all results have the same
bits.
"""

import dataclasses
import functools
import re

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from cases import Case
from conftest import to_global
import ep
from groups import E, group, H, has_no_limits, K, layer, T
from layer_steps import (
  assert_close,
  assert_same_bits,
  draw_params,
  moe_step_of,
  put,
  put_moe,
  run_forward,
  run_moe_step,
  run_step,
  step_of,
  whole,
)

F = 9  # inner size of an expert
R = 4  # ranks
TANH = ep.MoEConfig(
  H, 6, E, K, activation=jnp.tanh, gated=False, shared_inner=3
)

# Capacities, in rows, with which a rank needs 3 (ep4) or 2 (dp2_ep2) chunks.
CAPACITIES = {"ep4": 16, "dp2_ep2": 24}


def make_layers(mesh, **options):
  """Returns a layer that may send chunks, and a layer that never needs chunks.

  The second layer always has one EP domain, so XLA compiles it once.
  """
  rows = CAPACITIES[mesh]
  return (
    layer(mesh, overflow="chunk", recv_capacity_per_rank=rows, **options),
    layer(),
  )


def make_routings(mesh):
  """Returns routings for which no domain, some and all domains need chunks.

  For the second routing, only the second domain of "dp2_ep2" needs chunks. In
  the third routing, one token has no choices.
  """
  tokens = np.arange(4 * T)[:, None]
  even = (tokens * K + np.arange(K)) % E
  busy = np.broadcast_to(np.arange(K), even.shape)
  last = tokens >= 2 * T
  unused = np.where(tokens == 7, -1, busy)
  return [
    x.astype(np.int32) for x in (even, np.where(last, busy, even), unused)
  ]


def make_arrays(case):
  rng = np.random.default_rng(1)

  def matrix(*shape):
    return rng.integers(-1, 2, shape).astype(np.float32)

  matrices = {
    "w_up": matrix(E, H, F),
    "w_gate": matrix(E, H, F),
    "w_down": matrix(E, F, H),
  }
  weights = rng.integers(1, 4, case.topk_idx.shape).astype(np.float32)
  return case.tokens(), weights, matrices


moe_layer = functools.partial(ep.moe_layer, activation=jax.nn.relu)


def arrays_and_cotangent(case):
  tokens, weights, matrices = make_arrays(case)
  ct = np.broadcast_to(np.float32(1 + np.arange(H) % 3), tokens.shape)
  return case.topk_idx, tokens, weights, matrices, ct


run = functools.partial(run_moe_step, activation=jax.nn.relu)


@pytest.mark.parametrize(
  "mesh, view, alignment",
  [("dp2_ep2", "global", 4), ("ep4", "local_unchecked", 1)],
)
def test_chunks_equal_a_capacity_that_fits_any_routing(mesh, view, alignment):
  chunked, plain = make_layers(mesh, alignment=alignment)
  branches = []
  for topk_idx in make_routings(mesh):
    case = Case(chunked, topk_idx, whole=True)
    branches.append(needs_chunks(case))
    arrays = arrays_and_cotangent(case)
    assert_same_bits(run(chunked, *arrays, view=view), run(plain, *arrays))
  assert not branches[0].any() and branches[2].all()
  assert (branches[1].any() and not branches[1].all()) or mesh == "ep4"


def needs_chunks(case):
  """Returns, for each rank, whether its domain needs chunks."""
  rows = np.asarray(case.oracle.sizes().max_recv_tokens)
  return rows > case.layer.capacity


def test_layers_of_a_model_in_a_scan():
  """In a scan, one layer needs chunks, one does not, and none drops."""
  config = ep.MoEConfig(H, F, E, K, capacity_factor=1.5)
  chunked, plain = (
    ep.MoE(dataclasses.replace(config, **options), group("ep4"))
    for options in (dict(overflow="chunk"), dict(capacity_factor=None))
  )
  rng = np.random.default_rng(0)
  params = draw_params(config, lambda shape: rng.normal(size=(2, *shape)) / 3)
  # The router of the second layer prefers the experts of one rank.
  params["router"][1, :, :K] += 9
  mesh, specs = plain.group.mesh, plain.specs(lead=1)
  params = {n: to_global(p, mesh, specs[n]) for n, p in params.items()}
  x = np.abs(rng.normal(size=(4 * T, H)))
  x = to_global(x.astype(np.float32), mesh, PartitionSpec("ep"))

  def of_layers(layer):
    @jax.checkpoint
    def block(x, params):
      y, metrics = layer(params, x)
      return jnp.abs(x + y), metrics

    def loss(params, x):
      y, metrics = lax.scan(block, x, params)
      return jnp.sum(y * y), (y, metrics)

    grads, (y, metrics) = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(
      params, x
    )
    return whole(((y, grads), metrics))

  (got, metrics), (expected, _) = of_layers(chunked), of_layers(plain)
  rows = metrics.max_rank_rows
  assert rows[0] <= chunked.ep_layer.capacity < rows[1]
  assert not metrics.dropped.any()
  assert_close(got, expected, 1e-5, 1e-5)


def test_eager_calls_and_their_handle():
  """The returned handle describes a single exchange, which would drop rows."""
  chunked, plain = make_layers("ep4")
  case = Case(chunked, make_routings("ep4")[1], whole=True)
  topk_idx, tokens, weights, matrices, _ = arrays = arrays_and_cotangent(case)
  out, handle = moe_layer(
    chunked, tokens, topk_idx, weights, **matrices, return_handle=True
  )
  assert_same_bits(whole(out), run(plain, *arrays)[0])
  assert handle.layer == chunked
  assert handle.max_recv_tokens[0, 0] > chunked.capacity
  assert np.asarray(handle.dropped_counts).any()


def test_gradients_of_gradients():
  """The loss is a quadratic form of each token while no gate changes sign."""
  chunked, _ = make_layers("ep4")
  case = Case(chunked, make_routings("ep4")[1], whole=True)
  tokens, weights, matrices = make_arrays(case)
  slope = 1 + np.arange(H) % 3

  @jax.jit
  def product(topk_idx, tokens, weights, matrices):
    """Returns Hessian times gradient of the loss, both by the tokens."""

    def loss(tokens):
      out = moe_layer(chunked, tokens, topk_idx, weights, **matrices)
      return jnp.sum(out * slope)

    out, vjp = jax.vjp(jax.grad(loss), tokens)
    return vjp(out)

  gates, ups = matrices["w_gate"], matrices["w_up"]
  chosen = np.einsum("tk,tke->te", weights, np.eye(E)[case.topk_idx])
  factors = chosen[..., None] * (matrices["w_down"] @ slope)
  factors *= np.einsum("th,ehf->tef", tokens, gates) > 0

  def hessian_times(x):
    """Returns Hessian times x, which is the loss's gradient for x = tokens."""
    return sum(
      np.einsum("tef,th,ehf,egf->tg", factors, x, a, b)
      for a, b in [(gates, ups), (ups, gates)]
    )

  arrays = case.topk_idx, tokens, weights, matrices
  got = product(*put_moe(chunked, *arrays))
  assert_close(whole(got), (hessian_times(hessian_times(tokens)),), 1e-5, 1e-5)


def test_memory_follows_the_capacity():
  """The program has no array with rows for the worst case."""
  chunked, plain = make_layers("ep4")
  case = Case(chunked, make_routings("ep4")[1], whole=True)
  arrays = put_moe(chunked, *arrays_and_cotangent(case))
  shapes = []
  for config in (chunked, plain):
    text = moe_step_of(config, activation=jax.nn.relu).lower(*arrays).as_text()
    found = re.findall(rf"tensor<(\d+)x(?:{H}|{F})xf32>", text)
    shapes.append(set(map(int, found)))
  assert chunked.capacity in shapes[0] and plain.capacity not in shapes[0]
  assert plain.capacity in shapes[1]


def test_chunks_refuse():
  chunked, _ = make_layers("ep4", name="moe_3")
  case = Case(chunked, make_routings("ep4")[1], whole=True)
  tokens, weights, matrices = make_arrays(case)

  def call(layer=chunked, activation=jax.nn.relu):
    args = layer, tokens, case.topk_idx, weights
    return ep.moe_layer(*args, **matrices, activation=activation).sum()

  needs_more = '"moe_3".*capacity is 2 rows.* may need 8; raise capacity_factor'
  with pytest.raises(ValueError, match=needs_more):
    call(chunked.replace(recv_capacity_per_rank=2))
  closes = '"moe_3".*closes over values that are traced'
  with pytest.raises(ValueError, match=closes):
    jax.grad(lambda slope: call(activation=lambda x: slope * x))(1.0)

  config = ep.MoEConfig(
    H, F, E, K, deterministic=True, capacity_factor=1.0, overflow="chunk"
  )
  layer = ep.MoE(config, group("ep4", max_tokens_per_rank=None), name="moe_3")
  many = np.zeros((4 * 200, H), np.float32)
  with pytest.raises(ValueError, match='"moe_3".*deterministic = True'):
    layer(draw_params(config, np.zeros), many)


def test_forward_mode_is_refused():
  """ep raises an error, because JAX's error would only name `custom_vjp`."""
  case = Case(make_layers("ep4")[0], whole=True)
  tokens, weights, matrices = make_arrays(case)

  def of_tokens(x):
    return moe_layer(case.layer, x, case.topk_idx, weights, **matrices)

  def jvp(tokens):
    return jax.jvp(of_tokens, (tokens,), (tokens,))

  def linearize(tokens):
    _, linear = jax.linearize(of_tokens, tokens)
    return linear(tokens)

  words = 'overflow="chunk" .layer "moe".: the layer has reverse mode alone'
  for call in jax.jit(jvp), jax.jit(linearize), jvp:
    with pytest.raises(TypeError, match=words):
      call(tokens)


def moe_arrays(config, *lead):
  """Draws parameters and tokens of small whole numbers."""
  rng = np.random.default_rng(0)
  params = draw_params(config, lambda shape: rng.integers(-1, 2, shape))
  x = rng.integers(-1, 2, (R * lead[0], *lead[1:], config.hidden))
  return params, x.astype(np.float32)


def test_each_chunk_has_its_own_capacity():
  """The layer drops as many rows as a layer that gets one chunk per call."""
  config = dataclasses.replace(TANH, overflow="drop", shared_inner=0)
  mesh_group = group(
    "dp2_ep2", recv_capacity_per_rank=11, max_tokens_per_rank=8
  )
  params, x = moe_arrays(config, 8)
  chunked = ep.MoE(dataclasses.replace(config, token_chunks=2), mesh_group)
  y, metrics = run_forward(chunked, params, x)
  assert metrics.dropped > 0

  alone = ep.MoE(config, mesh_group)
  of_ranks = x.reshape(R, 2, 4, H)
  halves = [
    run_forward(alone, params, of_ranks[:, i].reshape(-1, H)) for i in range(2)
  ]
  ys = [y.reshape(R, 4, H) for y, _ in halves]
  np.testing.assert_array_equal(y, np.stack(ys, axis=1).reshape(x.shape))
  first, second = (metrics for _, metrics in halves)
  np.testing.assert_array_equal(metrics.drops, first.drops + second.drops)


@has_no_limits
def test_token_chunks_need_less_memory():
  """XLA plans less than half of the temporary memory for 8 chunks."""
  config = ep.MoEConfig(hidden=64, inner=64, num_experts=E, top_k=K)
  limited, unlimited = (
    group("ep4", max_tokens_per_rank=limit, hidden_dim=64)
    for limit in (64, None)
  )
  params, x = moe_arrays(config, 64)
  peaks = []
  for num in 1, 8:
    in_chunks = dataclasses.replace(config, token_chunks=num)
    for mesh_group in limited, unlimited:
      layer = ep.MoE(in_chunks, mesh_group)
      assert layer.ep_layer.capacity_for(64 // num) == 64 * 2 * R // num
    args = *put(layer, params, x, x), None, None
    compiled = step_of(layer).lower(*args).compile()
    peaks.append(compiled.memory_analysis().temp_size_in_bytes)
  assert peaks[1] < 0.49 * peaks[0]


@pytest.mark.parametrize(
  "options",
  [dict(token_chunks=9), dict(overflow="chunk", capacity_factor=0.44)],
)
def test_gradients_of_matrices_are_added_in_float32(options):
  """A sum in bfloat16 would lose each 1 that is added to 256."""
  config = ep.MoEConfig(
    H, 6, E, 1, gated=False, activation=jax.nn.relu, score="sigmoid", scale=2.0
  )
  config = dataclasses.replace(config, normalize=False, **options)
  layer = ep.MoE(config, group("ep4", max_tokens_per_rank=9))
  params = draw_params(config, np.zeros)
  params["w_up"][:, 0, 0] = 1
  params = {n: p.astype(jnp.bfloat16) for n, p in params.items()}
  x = np.zeros((R * 9, H), jnp.bfloat16)
  x[:9, 0] = [1, 1, 1, 1, 256, 1, 1, 1, 1]
  _, _, grads, _ = run_step(layer, params, x, np.ones_like(x))
  assert (grads["w_down"][0, 0] == 264).all()


def test_transformations_of_token_chunks():
  """vmap and derivatives of gradients agree with the layer without chunks."""
  params, x = moe_arrays(TANH, 2, 2)

  def run(num):
    config = dataclasses.replace(TANH, token_chunks=num)
    layer = ep.MoE(config, group("ep4"))

    def output(params, x):
      return layer(params, x)[0]

    def both(params, x):
      grad = jax.grad(lambda x: (output(params, x) ** 2).sum())
      mapped = jax.vmap(output, (None, 0)) if num > 1 else output
      return mapped(params, x), jax.jvp(grad, (x,), (jnp.ones_like(x),))

    return whole(jax.jit(both)(*put(layer, params, x)))

  for got, expected in zip(
    *map(jax.tree.leaves, (run(3), run(1))), strict=True
  ):
    tolerance = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(got, expected, 1e-5, tolerance)


def test_token_chunks_refuse():
  with pytest.raises(ValueError, match="token_chunks = 0, but it must be at"):
    dataclasses.replace(TANH, token_chunks=0)
  with pytest.raises(ValueError, match="token_chunks = 2, but deterministic"):
    dataclasses.replace(TANH, token_chunks=2, deterministic=True)
  config = dataclasses.replace(
    TANH, token_chunks=2, capacity_factor=1.5, overflow="chunk"
  )
  with pytest.raises(ValueError, match="token_chunks = 2 splits the tokens of"):
    ep.MoE(config, group("ep4"))
