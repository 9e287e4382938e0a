# SPDX-License-Identifier: Apache-2.0
"""Runs the object under test in one setting, with its derivatives.

A `Trial` compiles a function, and a program for each of its derivatives. The
function takes `(route, inputs)`, global arrays whose leading axis is split over
the mesh, and returns `(tokens, received)`. An `Oracle` computes the expected
results for one routing, as NumPy arrays.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, ClassVar

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from ep.testing._compare import Expected
from ep.testing._declarations import Setting


class Oracle(abc.ABC):
  """The expected results for one routing of a setting.

  Attributes:
    numbers: kinds of inputs with known derivatives. "whole" are small whole
      numbers, whose sums are exact in any order, so that results have the
      expected bits for any tolerance.
  """

  numbers: ClassVar[tuple[str, ...]]

  def __init__(self, setting: Setting, *route: np.ndarray):
    self._setting = setting
    self.route = route  # topk_idx [P * T, K], and more arrays of the function

  @abc.abstractmethod
  def inputs(self, rng: np.random.Generator, numbers: str) -> tuple[Any, ...]:
    """Draws tokens and weights; returns them with the parameters, if any."""

  @abc.abstractmethod
  def output(self, inputs: Any) -> Expected:
    """Returns the tokens that the function returns."""

  @abc.abstractmethod
  def pullback(self, inputs: Any, g: np.ndarray) -> dict[str, Expected]:
    """Returns the specified cotangents of the inputs, by name."""

  @abc.abstractmethod
  def pushforward(self, inputs: Any, tangents: Any) -> Expected:
    """Returns the tangent of the tokens that the function returns."""

  @abc.abstractmethod
  def second_pullback(
    self, inputs: Any, g: np.ndarray, cotangents: Any
  ) -> dict[str, Expected]:
    """Returns the cotangents of the arguments of a pullback, by name."""

  def _where_token(self, at: tuple[int, ...]) -> str:
    """Describes an index of an array `[P * T, H]`."""
    return f"{self._token(at[0])}, column {at[1]}"

  def _where_choice(self, at: tuple[int, ...]) -> str:
    """Describes an index of an array `[P * T, K]`."""
    return f"{self._token(at[0])}, choice {at[1]}"

  def _token(self, index: int) -> str:
    rank, t = divmod(index, self._setting.tokens)
    experts = ", ".join(map(str, self.route[0][index]))
    return f"rank {rank}, token {t} (of experts {experts})"


class Trial(abc.ABC):
  """The object under test, built for one setting."""

  def __init__(
    self, setting: Setting, function: Callable[[Any, Any], tuple[Any, Any]]
  ):
    self.setting = setting

    def pullback(route, inputs, g):
      _, vjp, received = jax.vjp(
        lambda *x: function(route, x), *inputs, has_aux=True
      )
      return vjp(g), received

    def pushforward(route, inputs, tangents):
      _, tangent, received = jax.jvp(
        lambda *x: function(route, x), inputs, tangents, has_aux=True
      )
      return tangent, received

    def second_pullback(route, inputs, g, cotangents):
      _, vjp = jax.vjp(lambda *x: pullback(route, *x)[0], inputs, g)
      return vjp(cotangents)

    self._function = jax.jit(function)
    self._pullback = jax.jit(pullback)
    self._pushforward = jax.jit(pushforward)
    self._second_pullback = jax.jit(second_pullback)
    self._replicate = jax.jit(
      _as_integers, out_shardings=NamedSharding(setting.mesh, PartitionSpec())
    )

  @abc.abstractmethod
  def oracle(self, topk_idx: np.ndarray) -> Oracle:
    """Returns the oracle for choices `[P * T, K]`."""

  def forward(self, oracle: Oracle, inputs: Any) -> tuple[Any, Any]:
    """Returns the tokens and the received rows."""
    return self.finish(self.start(oracle, inputs))

  def start(self, oracle: Oracle, inputs: Any) -> Any:
    """Starts `forward`; pass the returned arrays to `finish`."""
    return self._function(*self._place(oracle.route, inputs))

  def pullback(self, oracle: Oracle, inputs: Any, g: Any) -> tuple[Any, Any]:
    """Returns the cotangents of the inputs, and the received rows."""
    route, inputs, (g,) = self._place(oracle.route, inputs, (g,))
    return self.finish(self._pullback(route, inputs, g))

  def pushforward(
    self, oracle: Oracle, inputs: Any, tangents: Any
  ) -> tuple[Any, Any]:
    """Returns the tangent of the tokens, and the received rows."""
    args = self._place(oracle.route, inputs, tangents)
    return self.finish(self._pushforward(*args))

  def second_pullback(
    self, oracle: Oracle, inputs: Any, g: Any, cotangents: Any
  ) -> tuple[Any, Any]:
    """Returns the cotangents of the arguments of `pullback`."""
    route, inputs, (g,), cotangents = self._place(
      oracle.route, inputs, (g,), cotangents
    )
    return self.finish(self._second_pullback(route, inputs, g, cotangents))

  def finish(self, arrays: Any) -> Any:
    """Waits for arrays; returns whole NumPy arrays on every process."""
    if jax.process_count() == 1:
      return jax.tree.map(np.asarray, arrays)
    whole = self._replicate(arrays)
    return jax.tree.map(
      lambda bits, x: np.asarray(bits).view(x.dtype), whole, arrays
    )

  def _place(self, *groups: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Splits the first two arrays of each group over the ranks.

    Later entries are parameters, which are equal on every process.
    """
    spec = NamedSharding(self.setting.mesh, PartitionSpec("ep"))

    def split(x):
      return jax.make_array_from_callback(x.shape, spec, x.__getitem__)

    return [(*map(split, x[:2]), *x[2:]) for x in groups]


def _as_integers(arrays):
  """Returns the bits of arrays as integers, which no collective changes."""
  return jax.tree.map(
    lambda x: lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}"),
    arrays,
  )
