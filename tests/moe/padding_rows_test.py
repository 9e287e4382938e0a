# SPDX-License-Identifier: Apache-2.0
"""Rows that hold no token add nothing to a gradient, even if they give NaNs.

The functions here are not finite at 0, the value of rows that pad a segment.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import Case
import ep
from groups import E, group, H, K, layer, T
from layer_steps import (
  assert_close,
  draw_params,
  put,
  put_moe,
  run_moe_step,
  run_step,
  whole,
)

F, R = 9, 4
SHAPES = {"up": (E, H, F), "down": (E, F, H), "bias": (E, H)}


def log(x):
  return jnp.log(jnp.abs(x))


def unit(x):
  return x * jax.lax.rsqrt((x * x).sum(axis=-1, keepdims=True))


def inverse(x):
  return 1 / jnp.abs(x[:, 0])


def of_map(segments, params, rows):
  hidden = segments.map(unit, segments.matmul(rows, params["up"]))
  return segments.matmul(hidden, params["down"])


def of_checkpoint(segments, params, rows):
  hidden = segments.matmul(rows, params["up"])
  return jax.checkpoint(
    lambda x: segments.matmul(segments.map(log, x), params["down"])
  )(hidden)


def of_spread(segments, params, rows):
  """The weights of the first bias are from JAX; of the second, from `map`."""
  rows = segments.map(
    jnp.add, rows, segments.spread(params["bias"], inverse(rows))
  )
  weights = segments.map(inverse, rows)
  return segments.map(jnp.add, rows, segments.spread(params["bias"], weights))


@pytest.mark.parametrize("experts", [of_map, of_checkpoint, of_spread])
def test_experts_of_ones_own(experts):
  rng = np.random.default_rng(1)
  params = {n: np.float32(rng.normal(size=s)) for n, s in SHAPES.items()}

  def step(alignment):
    case = Case(layer("dp2_ep2", alignment=alignment), "idle_rank")
    arrays = case.topk_idx, case.tokens(), case.weights(), params
    return run_moe_step(case.layer, *arrays, case.tokens(), experts=experts)

  expected = step(1)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(expected))
  assert_close(step(4), expected, 1e-4, 1e-4)


@pytest.mark.parametrize(
  "options",
  [
    dict(activation=log),
    dict(activation=log, gated=False, biases=True),
    dict(up_activation=log, weigh="early"),
    dict(activation=unit, up_activation=log, weigh="input", biases=True),
    dict(up_activation=log, capacity_factor=1.0, overflow="chunk"),
  ],
  ids=str,
)
def test_layers(options):
  config = ep.MoEConfig(H, F, E, K, **options)
  rng = np.random.default_rng(0)
  params = draw_params(config, lambda shape: rng.normal(size=shape))
  tokens = rng.normal(size=(2, R * T, H)).astype(np.float32)

  def step(alignment):
    here = group("ep4", alignment=alignment)
    y, _, *grads = run_step(ep.MoE(config, here), params, *tokens)
    return y, *grads

  expected = step(1)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(expected))
  assert_close(step(4), expected, 1e-3, 1e-3)


@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("routing", ["idle_rank", "with_unused_choices"])
def test_a_learned_parameter_of_an_activation(alignment, routing):
  """The gradient of the parameter is a sum over all rows of the capacity."""
  case = Case(layer("ep4", alignment=alignment), routing)
  rng = np.random.default_rng(1)
  up, down = (np.float32(rng.normal(size=SHAPES[n])) for n in ("up", "down"))
  arrays = case.topk_idx, case.tokens(), case.weights()

  def loss(factor, idx, tokens, weights, matrices):
    return ep.moe_layer(
      case.layer,
      tokens,
      idx,
      weights,
      **matrices,
      activation=lambda x: log(factor * x),
    ).sum()

  def dense(factor, idx, tokens, weights):
    hidden = log(factor * jnp.einsum("th,ehf->tef", tokens, up))
    out = jnp.einsum("tef,efh->teh", hidden, down)
    chosen = jax.nn.one_hot(idx, E)
    return jnp.einsum("tk,tke,teh->", weights, chosen, out)

  placed = put_moe(case.layer, *arrays, dict(w_up=up, w_down=down))
  got = jax.jit(jax.grad(loss))(2.0, *placed)
  expected = jax.grad(dense)(2.0, *arrays)
  np.testing.assert_allclose(whole(got), expected, 1e-4)


@pytest.mark.parametrize("overlap", [True, False])
def test_masked_tokens_of_a_shared_expert(overlap):
  """The shared expert reads zeros from masked tokens."""
  config = ep.MoEConfig(
    *(H, F, E, K),
    shared_inner=5,
    activation=unit,
    up_activation=log,
    overlap=overlap,
  )
  rng = np.random.default_rng(0)
  params = draw_params(config, lambda shape: rng.normal(size=shape))
  x, ct = rng.normal(size=(2, R * T, H)).astype(np.float32)
  mask = np.arange(R * T) % 3 > 0
  layer_of_all = ep.MoE(config, group("ep4"))

  @jax.jit
  def gradients(params, x, ct, mask):
    def loss(params):
      return (layer_of_all(params, x, mask=mask)[0] * ct).sum()

    return jax.grad(loss)(params)

  def shared(gate, up, down):
    hidden = unit(x[mask] @ gate) * log(x[mask] @ up)
    return (hidden @ down * ct[mask]).sum()

  got = whole(gradients(*put(layer_of_all, params, x, ct, mask)))
  names = "shared_gate", "shared_up", "shared_down"
  expected = jax.grad(shared, (0, 1, 2))(*(params[n] for n in names))
  assert_close(tuple(got[n] for n in names), expected, 1e-4, 1e-4)
