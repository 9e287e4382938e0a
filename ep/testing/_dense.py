# SPDX-License-Identifier: Apache-2.0
"""Tests a layer against an oracle that applies every expert to every token.

The oracle uses float64 arrays on one device, and JAX's derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from ep.testing._compare import at_index, Expected, Where
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

    def expected(route: Any, inputs: Any) -> tuple[jax.Array, tuple[()]]:
      (topk_idx,), (tokens, weights, params) = route, inputs
      outs = [layer.expert(params, e, tokens) for e in experts]
      return dense(jnp.stack(outs), topk_idx, weights), ()

    (
      self.dense,
      self.dense_pullback,
      self.dense_pushforward,
      self.dense_second_pullback,
    ) = map(in_float64, (expected, *derivatives(expected)))
    super().__init__(layer, setting, function)

  def oracle(self, topk_idx: np.ndarray) -> DenseOracle:
    return DenseOracle(self, topk_idx)


class DenseOracle(Oracle):
  """The expected results of a layer for one routing."""

  numbers = ("normal",)

  def __init__(self, trial: LayerTrial, topk_idx: np.ndarray):
    super().__init__(trial.subject, trial.setting, topk_idx)
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
    return self._gradients(inputs, grads)

  def pushforward(self, inputs: Any, tangents: Any) -> Expected:
    tangent, _ = self._trial.dense_pushforward(self.route, inputs, tangents)
    return self._tokens(tangent)

  def second_pullback(
    self, inputs: Any, g: np.ndarray, cotangents: Any
  ) -> dict[str, Expected]:
    grads, g_g = self._trial.dense_second_pullback(
      self.route, inputs, g, cotangents
    )
    return self._gradients(inputs, grads) | {"g": self._tokens(g_g)}

  def _gradients(self, inputs: Any, grads: Any) -> dict[str, Expected]:
    given = self.by_name(inputs)
    where = {"tokens": self._where_token, "weights": self._where_choice}
    return {
      name: self._expected(x, given[name].dtype, where.get(name, at_index))
      for name, x in self.by_name(grads).items()
    }

  def _tokens(self, x: jax.Array) -> Expected:
    return self._expected(x, self._setting.dtype, self._where_token)

  def _expected(
    self, of: jax.Array, dtype: DTypeLike, where: Where
  ) -> Expected:
    x = np.asarray(of)
    eps = float(jnp.finfo(self._setting.dtype).eps)
    unit = eps * abs(x).max(initial=0)
    limit = self._subject.tolerance.limit(self._setting)
    return Expected(x.astype(dtype), lambda: unit, where, limit)


def dense(
  outs: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array
) -> jax.Array:
  """Returns the weighted sum [N, H] of the outputs of each token's experts.

  Args:
    outs: [E, N, H], the outputs of every expert for every token.
    topk_idx: int [N, K]; -1 chooses no expert.
    topk_weights: [N, K].
  """
  chosen = jax.nn.one_hot(topk_idx, len(outs), dtype=outs.dtype)
  return jnp.einsum("nke,nk,enh->nh", chosen, topk_weights, outs)


def in_float64(fn: Callable[..., Any]) -> Callable[..., Any]:
  """Jits `fn`; the result converts floats to float64, and returns NumPy."""
  compiled = jax.jit(fn)

  def widen(x: Any) -> Any:
    x = np.asarray(x)
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return x.astype(np.float64) if is_float else x

  def call(*args: Any) -> Any:
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
      return jax.tree.map(np.asarray, compiled(*jax.tree.map(widen, args)))

  return call
