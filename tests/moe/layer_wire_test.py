# SPDX-License-Identifier: Apache-2.0
"""A layer with a wire is the layer without one, of rounded tokens.

In the backward pass it is the layer without one, of a rounded gradient. So
both have the same bits, matmuls included.
"""


import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import Case, exchanges, rounded
from conftest import assert_alike
import ep
from groups import E, GPU, group, K, T
from layer_steps import (
  assert_same_bits,
  draw_params,
  put,
  run_forward,
  run_moe_step,
  whole,
)

HIDDEN, INNER = 128, 8
MANY = 200  # tokens, of which each rank has several blocks of rows


@pytest.mark.parametrize(
  "wire, mesh, options",
  [
    ("fp8_block128", "dp2_ep2", dict(alignment=8)),
    ("mxfp8", "ep4", dict(overflow="chunk", recv_capacity_per_rank=24)),
  ],
)
def test_output_and_all_gradients(wire, mesh, options):
  """The backward pass of chunks exchanges rows as the forward pass does."""
  plain = ep.EpLayerConfig(group(mesh, hidden_dim=HIDDEN), **options)
  case = Case(plain, "skewed", hidden=HIDDEN)
  x, g = case.tokens(jnp.bfloat16), case.tokens(jnp.bfloat16)
  weights, rng = case.weights(), np.random.default_rng(1)
  up, down = (E, HIDDEN, INNER), (E, INNER, HIDDEN)
  matrices = {
    name: rng.normal(size=shape).astype(x.dtype)
    for name, shape in dict(w_up=up, w_gate=up, w_down=down).items()
  }

  def run(layer, x, g):
    if layer.overflow != "chunk":
      return run_moe_step(layer, case.topk_idx, x, weights, matrices, g)
    out = ep.moe_layer(layer, x, case.topk_idx, weights, **matrices)
    return [whole(out)]

  actual = run(plain.replace(wire=wire), x, g)
  assert_same_bits(actual, run(plain, rounded(wire, x), rounded(wire, g)))
  assert not np.array_equal(actual[0], run(plain, x, g)[0])


def moe(wire, max_tokens_per_rank=T, **options):
  config = ep.MoEConfig(
    hidden=HIDDEN,
    inner=INNER,
    num_experts=E,
    top_k=K,
    wire=wire,
    **options,
  )
  sizes = dict(hidden_dim=HIDDEN, max_tokens_per_rank=max_tokens_per_rank)
  return ep.MoE(config, group("ep4", **sizes), name="wire")


def draw(layer):
  """Draws whole parameters."""
  rng = np.random.default_rng(1)
  return draw_params(layer.config, lambda shape: rng.normal(size=shape) / 9)


def test_a_deterministic_layer_that_drops():
  """It is that without a wire if tokens, -1, 0 and 1, travel exactly."""
  options = dict(
    deterministic=not GPU,
    overflow="drop",
    capacity_factor=0.75,
  )
  rng = np.random.default_rng(0)
  x = rng.integers(-1, 2, (4 * MANY, HIDDEN)).astype(jnp.bfloat16)
  outs = []
  for name in "mxfp8", None:
    layer = moe(name, MANY, **options)
    assert layer.ep_layer.wire == name
    outs.append(run_forward(layer, draw(layer), x))
  assert_same_bits(*outs)
  assert outs[0][1].dropped


def test_vmap_makes_one_exchange():
  """No scale is of several examples: a batch has the bits of its tokens."""
  layer = moe("mxfp8")
  x = np.random.default_rng(0).normal(size=(4, T, HIDDEN))
  params, x = put(layer, draw(layer), x.astype(np.float32))

  def output(params, x):
    return layer(params, x)[0]

  mapped = jax.jit(jax.vmap(output, in_axes=(None, 0)))
  compiled = mapped.lower(params, x).compile()
  assert exchanges(compiled).count("ep_dispatch") == 1
  assert_alike(compiled(params, x), jax.jit(output)(params, x))


def test_errors():
  with pytest.raises(ValueError, match="wire = 'fp8'"):
    moe("fp8")
  sizes = dict(inner=INNER, num_experts=E, top_k=K)
  for wire, hidden in ("mxfp8", 48), ("fp8_block128", 64):
    with pytest.raises(ValueError, match=f"rows have {hidden} elements"):
      ep.MoEConfig(hidden=hidden, wire=wire, **sizes)
