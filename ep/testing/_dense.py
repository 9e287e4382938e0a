# SPDX-License-Identifier: Apache-2.0
"""Tests a layer against an oracle that applies every expert to every token.

The oracle uses float32 arrays on one device, and JAX's derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from ep.testing._compare import Expected, Where
from ep.testing._declarations import Layer, Setting
from ep.testing._trial import derivatives, Oracle, Trial


class LayerTrial(Trial):
  """A layer, built for one setting."""

  def __init__(self, layer: Layer, setting: Setting):
    apply, params = layer.build(setting)
    self.params = jax.tree.map(np.asarray, params)
    experts = range(setting.num_experts)

    def function(route: Any, inputs: Any) -> tuple[jax.Array, tuple[()]]:
      (topk_idx,), (tokens, weights, params) = route, inputs
      return apply(params, tokens, topk_idx, weights), ()

    def dense(route: Any, inputs: Any) -> tuple[jax.Array, tuple[()]]:
      (topk_idx,), (tokens, weights, params) = route, inputs
      rows = jnp.stack([layer.expert(params, e, tokens) for e in experts])
      chosen = jax.nn.one_hot(topk_idx, len(experts), dtype=jnp.float32)
      return jnp.einsum("nke,nk,enh->nh", chosen, weights, rows), ()

    (
      self.dense,
      self.dense_pullback,
      self.dense_pushforward,
      self.dense_second_pullback,
    ) = map(_precisely, (dense, *derivatives(dense)))
    super().__init__(setting, function)

  def oracle(self, topk_idx: np.ndarray) -> DenseOracle:
    return DenseOracle(self, topk_idx)


class DenseOracle(Oracle):
  """The expected results of a layer for one routing."""

  numbers = ("normal",)

  def __init__(self, trial: LayerTrial, topk_idx: np.ndarray):
    super().__init__(trial.setting, topk_idx)
    self._trial = trial

  def inputs(
    self, rng: np.random.Generator, numbers: str
  ) -> tuple[np.ndarray, np.ndarray, Any]:
    setting = self._setting
    n = setting.ep_size * setting.tokens
    tokens = rng.standard_normal((n, setting.hidden)).astype(setting.dtype)
    weights = rng.random((n, setting.top_k), np.float32)
    return tokens, weights, self._trial.params

  def output(self, inputs: Any) -> Expected:
    out, _ = self._trial.dense(self.route, inputs)
    return self._tokens(out)

  def pullback(self, inputs: Any, g: np.ndarray) -> dict[str, Expected]:
    grads, _ = self._trial.dense_pullback(self.route, inputs, g)
    return self._by_name(grads)

  def pushforward(self, inputs: Any, tangents: Any) -> Expected:
    tangent, _ = self._trial.dense_pushforward(self.route, inputs, tangents)
    return self._tokens(tangent)

  def second_pullback(
    self, inputs: Any, g: np.ndarray, cotangents: Any
  ) -> dict[str, Expected]:
    grads, g_g = self._trial.dense_second_pullback(
      self.route, inputs, g, cotangents
    )
    return self._by_name(grads) | {"g": self._tokens(g_g)}

  def _by_name(self, grads: Any) -> dict[str, Expected]:
    tokens, weights, params = grads
    expected = {
      "tokens": self._tokens(tokens),
      "weights": self._expected(weights, np.float32, self._where_choice),
    }
    leaves, _ = jax.tree.flatten_with_path(params)
    given = jax.tree.leaves(self._trial.params)
    for (path, leaf), like in zip(leaves, given, strict=True):
      name = "params" + jax.tree_util.keystr(path)
      expected[name] = self._expected(
        leaf, like.dtype, lambda at: f"index {at}"
      )
    return expected

  def _tokens(self, x: jax.Array) -> Expected:
    return self._expected(x, self._setting.dtype, self._where_token)

  def _expected(
    self, of: jax.Array, dtype: DTypeLike, where: Where
  ) -> Expected:
    x = np.asarray(of)
    eps = float(jnp.finfo(self._setting.dtype).eps)
    unit = eps * abs(x).max(initial=0)
    return Expected(x.astype(dtype), lambda: unit, where)


def _precisely(fn: Callable[..., Any]) -> Callable[..., Any]:
  """Compiles `fn(route, *args)` for float32 arguments, without TF32."""
  compiled = jax.jit(fn)

  def call(route: Any, *args: Any) -> Any:
    args = jax.tree.map(lambda x: np.asarray(x, np.float32), args)
    with jax.default_matmul_precision("highest"):
      return compiled(route, *args)

  return call
