# SPDX-License-Identifier: Apache-2.0
"""Computes the model of ep_moe.py densely: every expert for every token.

ep_moe.py checks its results against this file, so the two share no code. This
file computes in one process and in float64, so that its rounding is negligible.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def loss_output_and_grads(params, inputs, targets, top_k: int):
  """Computes the loss, output and gradients of a step, from whole arrays."""
  loss_fn = functools.partial(_loss, top_k=top_k)
  with jax.enable_x64(True):
    params = {name: x.astype(np.float64) for name, x in params.items()}
    (loss, output), grads = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(
      params, inputs, targets
    )
    return jax.tree.map(np.asarray, (loss, output, grads))


def _loss(params, inputs, targets, top_k):
  x = params["embed"][inputs]
  scores = jax.nn.softmax(x @ params["router"])
  order = jnp.argsort(-scores, axis=1, stable=True)
  chosen = (order.argsort(axis=1) < top_k) * scores  # [N, E], else 0
  shares = chosen / chosen.sum(axis=1, keepdims=True)

  def add_expert(total, expert):
    w_gate, w_up, w_down, share = expert
    hidden = jax.nn.silu(x @ w_gate) * (x @ w_up)
    return total + share[:, None] * (hidden @ w_down), None

  experts = params["w_gate"], params["w_up"], params["w_down"], shares.T
  total, _ = jax.lax.scan(add_expert, jnp.zeros_like(x), experts)
  output = x + total
  log_probs = jax.nn.log_softmax(output @ params["unembed"])
  loss = -log_probs[jnp.arange(targets.size), targets].mean()
  return loss, output
