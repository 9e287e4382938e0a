# SPDX-License-Identifier: Apache-2.0
"""Runs a layer, and computes the same by applying every expert to every token.

The oracle uses float32 arrays on one device, and derivatives of JAX.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ep.testing._compare import Expected
from ep.testing._declarations import Layer, Setting
from ep.testing._round_trip import where_choice, where_token
from ep.testing._trial import Oracle, Trial


class LayerTrial(Trial):
  """A layer, built for one setting."""

  def __init__(self, layer: Layer, setting: Setting):
    apply, params = layer.build(setting)
    self.params = jax.tree.map(np.asarray, params)

    def function(route, inputs):
      (topk_idx,), (tokens, weights, params) = route, inputs
      return apply(params, tokens, topk_idx, weights), ()

    def dense(topk_idx, tokens, weights, params):
      experts = range(setting.num_experts)
      rows = jnp.stack([layer.expert(params, e, tokens) for e in experts])
      E = setting.num_experts
      chosen = jax.nn.one_hot(topk_idx, E, dtype=jnp.float32)
      return jnp.einsum("nke,nk,enh->nh", chosen, weights, rows)

    def dense_pullback(topk_idx, inputs, g):
      return jax.vjp(functools.partial(dense, topk_idx), *inputs)[1](g)

    def dense_pushforward(topk_idx, inputs, tangents):
      return jax.jvp(functools.partial(dense, topk_idx), inputs, tangents)[1]

    def dense_second_pullback(topk_idx, inputs, g, cotangents):
      pullback = functools.partial(dense_pullback, topk_idx)
      return jax.vjp(pullback, inputs, g)[1](cotangents)

    self.dense = jax.jit(dense)
    self.dense_pullback = jax.jit(dense_pullback)
    self.dense_pushforward = jax.jit(dense_pushforward)
    self.dense_second_pullback = jax.jit(dense_second_pullback)
    super().__init__(setting, function)

  def oracle(self, topk_idx: np.ndarray) -> DenseOracle:
    return DenseOracle(self, topk_idx)


class DenseOracle(Oracle):
  """The expected results for one routing."""

  numbers = ("normal",)

  def __init__(self, trial: LayerTrial, topk_idx: np.ndarray):
    self._trial = trial
    self.route = (topk_idx,)

  def inputs(
    self, rng: np.random.Generator, numbers: str
  ) -> tuple[np.ndarray, np.ndarray, Any]:
    """Draws tokens and weights, and returns them with the parameters."""
    setting = self._trial.setting
    n = setting.ep_size * setting.tokens
    tokens = rng.standard_normal((n, setting.hidden)).astype(setting.dtype)
    weights = rng.random((n, setting.top_k), np.float32)
    return tokens, weights, self._trial.params

  def output(self, inputs: Any) -> Expected:
    out = _precisely(self._trial.dense, *self.route, *_float32(inputs))
    return self._tokens(out)

  def pullback(self, inputs: Any, g: np.ndarray) -> dict[str, Expected]:
    grads = _precisely(
      self._trial.dense_pullback, *self.route, _float32(inputs), _float32(g)
    )
    return self._like_inputs(grads, inputs)

  def _like_inputs(self, grads, inputs):
    tokens, weights, params = grads
    expected = {
      "tokens": self._tokens(tokens),
      "weights": self._expected(
        weights, np.dtype("float32"), self._where_choice
      ),
    }
    leaves, _ = jax.tree.flatten_with_path(params)
    given = jax.tree.leaves(inputs[2])
    for (path, leaf), like in zip(leaves, given, strict=True):
      name = "params" + jax.tree_util.keystr(path)
      expected[name] = self._expected(
        leaf, like.dtype, lambda at: f"index {at}"
      )
    return expected

  def pushforward(self, inputs: Any, tangents: Any) -> Expected:
    arrays = _float32(inputs), _float32(tangents)
    return self._tokens(
      _precisely(self._trial.dense_pushforward, *self.route, *arrays)
    )

  def second_pullback(
    self, inputs: Any, g: np.ndarray, cotangents: Any
  ) -> dict[str, Expected]:
    grads, g_g = _precisely(
      self._trial.dense_second_pullback,
      *self.route,
      *map(_float32, (inputs, g, cotangents)),
    )
    return self._like_inputs(grads, inputs) | {"g": self._tokens(g_g)}

  def _tokens(self, x):
    setting = self._trial.setting
    return self._expected(
      x,
      setting.dtype,
      lambda at: f"{where_token(setting, self.route[0], at)}, column {at[1]}",
    )

  def _expected(self, x, dtype, where):
    x = np.asarray(x)
    eps = float(jnp.finfo(self._trial.setting.dtype).eps)
    unit = eps * abs(x).max(initial=0)
    return Expected(x.astype(dtype), lambda: unit, where)

  def _where_choice(self, at):
    return where_choice(self._trial.setting, self.route[0], at)


def _float32(tree):
  return jax.tree.map(lambda x: np.asarray(x, np.float32), tree)


def _precisely(fn, *args):
  """Calls `fn` without TF32 and the like."""
  with jax.default_matmul_precision("highest"):
    return fn(*args)
