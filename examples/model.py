# SPDX-License-Identifier: Apache-2.0
"""A one-layer mixture-of-experts language model, expert-parallel.

It predicts each next byte of a text from one byte: it embeds, routes, applies
the experts, adds their outputs and unembeds. Each function is the program of
one rank, and `shard_map` runs it on all. A rank holds its tokens, its experts,
and a copy of everything else.
"""

from collections.abc import Callable

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
import numpy as np

import ep
from text import VOCABULARY

RANKS = ("dp", "ep")  # the mesh axes
TOKENS = PartitionSpec(RANKS)
EXPERTS = PartitionSpec("ep")
REPLICATED = PartitionSpec()
SHARDING = {
  "embed": REPLICATED,
  "router": REPLICATED,
  "w_gate": EXPERTS,
  "w_up": EXPERTS,
  "w_down": EXPERTS,
  "unembed": REPLICATED,
}


def init(
  num_experts: int, hidden: int, dtype: jnp.dtype
) -> dict[str, np.ndarray]:
  """Returns whole parameters, the same on every process."""
  inner = 2 * hidden
  shapes = {
    "embed": (VOCABULARY, hidden),
    "router": (hidden, num_experts),
    "w_gate": (num_experts, hidden, inner),
    "w_up": (num_experts, hidden, inner),
    "w_down": (num_experts, inner, hidden),
    "unembed": (hidden, VOCABULARY),
  }
  rng = np.random.default_rng(0)
  params = {}
  for name, shape in shapes.items():
    scale = 1.0 if name == "embed" else shape[-2] ** -0.5
    # The router stays in float32, as is usual, so that rounding cannot change
    # a choice.
    params[name] = (scale * rng.standard_normal(shape)).astype(
      np.float32 if name == "router" else dtype
    )
  return params


def embed_and_route(params, layer: ep.EpLayerConfig, inputs):
  """Maps `[T]` bytes to `[T, H]` tokens, `[T, K]` experts and weights."""
  # The lookup is in float32, because its gradient sums over all tokens of the
  # same byte.
  tokens = params["embed"].astype(jnp.float32)[inputs]
  logits = tokens @ params["router"]
  tokens = tokens.astype(params["embed"].dtype)
  return tokens, *ep.route_topk(logits, layer.top_k)


def loss_and_output(params, layer: ep.EpLayerConfig, inputs, targets):
  """Returns a rank's share of the mean cross-entropy, and outputs `[T, H]`."""
  tokens, topk_idx, topk_weights = embed_and_route(params, layer, inputs)
  output = tokens + ep.moe_layer(
    layer,
    tokens,
    topk_idx,
    topk_weights,
    w_gate=params["w_gate"],
    w_up=params["w_up"],
    w_down=params["w_down"],
  )
  logits = (output @ params["unembed"]).astype(jnp.float32)
  log_probs = jnp.take_along_axis(
    jax.nn.log_softmax(logits), targets[:, None], axis=-1
  )
  return -log_probs.mean() / lax.axis_size(RANKS), output


def make_step(mesh: Mesh, layer: ep.EpLayerConfig) -> Callable:
  """Builds `step(params, inputs, targets) -> loss, output, gradients`.

  Inputs and targets are int32 `[N]`, sharded over all ranks. The loss is the
  mean over all ranks.
  """

  def step(params, inputs, targets):
    (loss, output), grads = jax.value_and_grad(loss_and_output, has_aux=True)(
      params, layer, inputs, targets
    )
    grads = {
      # An expert's gradient has the tokens of its own EP domain already.
      name: ep.ordered_psum(grad, "dp" if SHARDING[name] == EXPERTS else RANKS)
      for name, grad in grads.items()
    }
    return ep.ordered_psum(loss, RANKS), output, grads

  return jax.jit(
    jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(SHARDING, TOKENS, TOKENS),
      out_specs=(REPLICATED, TOKENS, SHARDING),
      check_vma=False,  # so each rank has the gradient of its own tokens
    )
  )
