# SPDX-License-Identifier: Apache-2.0
"""Under `jax.checkpoint`, the backward pass reuses the forward routing."""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import pytest

import ep
from groups import group

H, E, K, T, LAYERS = 32, 32, 4, 16, 2


def whole_layer(layer, params, x):
  y, metrics = layer(params, x)
  return x + y, metrics.aux_loss


def with_route(route, layer, params, x):
  topk_idx, weights = route(x @ params["router"])
  matrices = {n: params[n] for n in ("w_up", "w_gate", "w_down")}
  y = ep.moe_layer(layer.ep_layer, x, topk_idx, weights, **matrices)
  return x + y, weights.sum()


def own_route(logits):
  topk_idx = ep.keep_routing(lax.top_k(logits, K)[1])
  return topk_idx, jax.nn.softmax(
    jnp.take_along_axis(logits, topk_idx, axis=-1)
  )


route_topk = functools.partial(ep.route_topk, top_k=K)


@pytest.mark.parametrize(
  "block, unroll, options",
  [
    (whole_layer, False, {}),
    (whole_layer, True, {}),
    (whole_layer, False, dict(token_chunks=2)),
    (whole_layer, True, dict(overflow="chunk", capacity_factor=1.0)),
    (whole_layer, False, dict(overflow="drop", capacity_factor=1.0)),
    (whole_layer, True, dict(num_groups=4, top_groups=2, score="sigmoid")),
    (functools.partial(with_route, route_topk), False, {}),
    (functools.partial(with_route, own_route), True, {}),
  ],
)
def test_experts_are_chosen_once(block, unroll, options):
  """A second routing could differ: XLA may round bfloat16 in another way."""
  config = ep.MoEConfig(H, 16, E, K, **options)
  layer = ep.MoE(
    config,
    group(
      "ep4",
      hidden_dim=H,
      num_experts=E,
      top_k=K,
      max_tokens_per_rank=T,
    ),
  )
  block = functools.partial(block, layer)

  def choices(block):
    """Counts the top-k and `ep_prepare` calls of a step with gradients."""

    def loss(params, x):
      def body(x, p):
        return block(p, x)

      x, aux = lax.scan(body, x, params, unroll=unroll)
      return jnp.mean(x**2) + aux.sum()

    init = jax.vmap(lambda key: ep.moe.init(key, config))
    params = jax.eval_shape(init, jax.random.split(jax.random.key(0), LAYERS))
    x = jax.ShapeDtypeStruct((4 * T, H), jnp.float32)
    jaxpr = str(jax.make_jaxpr(jax.grad(loss))(params, x))
    return jaxpr.count("top_k["), jaxpr.count("ep_prepare[")

  assert choices(jax.checkpoint(block)) == choices(block)
