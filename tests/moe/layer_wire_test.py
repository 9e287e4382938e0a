# SPDX-License-Identifier: Apache-2.0
"""A layer with a wire is the layer without one, of rounded tokens.

In the backward pass it is the layer without one, of a rounded gradient. So
both have the same bits, matmuls included.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from cases import Case, exchanges
from conftest import assert_alike, to_global
import ep
from groups import BACKEND, E, group, K, T

HIDDEN, INNER = 128, 8
WIRES = pytest.mark.parametrize("wire", ["mxfp8", "fp8_block128"])


def rounded(wire, x):
  parts = ep.quant.quantize(x, wire)
  return np.asarray(ep.quant.dequantize(*parts, x.dtype))


def matrices(case, dtype):
  """Returns random matrices, placed on their ranks."""
  config = case.layer
  rng = np.random.default_rng(1)
  shapes = dict(
    w_up=(E, HIDDEN, INNER),
    w_gate=(E, HIDDEN, INNER),
    w_down=(E, INNER, HIDDEN),
  )
  experts = PartitionSpec(config.group.axis_name)
  return {
    name: to_global(
      rng.normal(size=shape).astype(dtype), config.group.mesh, experts
    )
    for name, shape in shapes.items()
  }


def output_and_gradients(case, tokens, weights, g):
  def run(topk_idx, tokens, weights, matrices, g):
    def of_floats(tokens, weights, matrices):
      return ep.moe_layer(case.layer, tokens, topk_idx, weights, **matrices)

    out, vjp = jax.vjp(of_floats, tokens, weights, matrices)
    return out, vjp(g)

  placed = [case.put(x) for x in (case.topk_idx, tokens, weights)]
  return jax.jit(run)(*placed, matrices(case, tokens.dtype), case.put(g))


@WIRES
@pytest.mark.parametrize(
  "options",
  [
    dict(mesh="ep4"),
    dict(mesh="dp2_ep2", alignment=8),
    dict(mesh="ep4", overflow="chunk", recv_capacity_per_rank=24),
    dict(mesh="ep4", overflow="drop", recv_capacity_per_rank=8),
  ],
  ids=str,
)
def test_output_and_all_gradients(wire, options):
  options = dict(options)
  wide = group(options.pop("mesh"), hidden_dim=HIDDEN)

  def case_of(wire):
    config = ep.EpLayerConfig(wide, wire=wire, **options)
    return Case(config, "skewed", hidden=HIDDEN)

  case = case_of(wire)
  x, g = case.tokens(jnp.bfloat16), case.tokens(jnp.bfloat16)
  weights = case.weights()
  actual = output_and_gradients(case, x, weights, g)
  args = rounded(wire, x), weights, rounded(wire, g)
  assert_alike(actual, output_and_gradients(case_of(None), *args))
  exact, _ = output_and_gradients(case_of(None), x, weights, g)
  assert not np.array_equal(*(_local(a) for a in (actual[0], exact)))


def _local(array):
  return np.stack([np.asarray(s.data) for s in array.addressable_shards])


def moe(wire, **options):
  config = ep.MoEConfig(
    hidden=HIDDEN,
    inner=INNER,
    num_experts=E,
    top_k=K,
    wire=wire,
    **options,
  )
  return ep.MoE(config, group("ep4", hidden_dim=HIDDEN), name="wire")


@WIRES
@pytest.mark.parametrize(
  "options",
  [
    dict(deterministic=BACKEND != "nccl"),
    dict(token_chunks=T),
    dict(overflow="drop", drop_by="slot"),
    dict(overflow="drop", drop_by="weight", num_candidates=K + 2),
    dict(overflow="drop", drop_by="fair", num_candidates=K + 2),
  ],
  ids=str,
)
def test_a_whole_layer(wire, options):
  """It is that without a wire if tokens, -1, 0 and 1, travel exactly."""
  if "overflow" in options:
    options = options | dict(capacity_factor=0.75)
  x = np.random.default_rng(0).integers(-1, 2, (4 * T, HIDDEN))
  outs = []
  for name in wire, None:
    layer = moe(name, **options)
    assert layer.ep_layer.wire == name
    params = layer.init(jax.random.key(0))
    placed = Case(layer.ep_layer).put(x.astype(jnp.bfloat16))
    outs.append(jax.jit(layer)(params, placed))
  assert_alike(*outs)
  assert bool(outs[0][1].dropped) == ("overflow" in options)


def test_vmap_makes_one_exchange():
  """No scale is of several examples: a batch has the bits of its tokens."""
  layer = moe("mxfp8")
  params = layer.init(jax.random.key(0))
  x = np.random.default_rng(0).normal(size=(4, T, HIDDEN))
  x = Case(layer.ep_layer).put(x.astype(np.float32))

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
