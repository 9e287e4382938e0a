# SPDX-License-Identifier: Apache-2.0
"""Runs the object under test, and its derivatives, for one setting.

A `Trial` compiles a function, and a program for each of its derivatives. The
function takes `(route, inputs)`, global arrays whose leading axis is split over
the mesh, and returns `(tokens, received)`. An `Oracle` computes the expected
results for one routing, as NumPy arrays.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
import functools
from typing import Any, ClassVar

import jax
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from ep.testing import _numbers
from ep.testing._compare import Expected
from ep.testing._declarations import Setting, Subject
from ep.testing._routings import Routing


class Oracle(abc.ABC):
  """The expected results for one routing of a setting.

  Attributes:
    numbers: kinds of inputs with known derivatives. "whole" are small whole
      numbers, whose sums are exact in any order, so that results have the
      expected bits for any tolerance.
    result: what the function returns, in an error message.
  """

  numbers: ClassVar[tuple[str, ...]]
  result: ClassVar[str] = "tokens"

  def __init__(self, subject: Subject, setting: Setting, *route: np.ndarray):
    self._subject: Any = subject
    self._setting = setting
    self.route = route  # topk_idx [P * T, K], and further arrays

  @abc.abstractmethod
  def inputs(self, rng: np.random.Generator, numbers: str) -> tuple[Any, ...]:
    """Draws tokens and weights; returns them with the parameters, if any."""

  def cotangent(self, rng: np.random.Generator, numbers: str) -> Any:
    """Draws a cotangent of the result, which has the type of the tokens."""
    return self.inputs(rng, numbers)[0]

  def by_name(self, grads: Any) -> dict[str, Any]:
    """Returns the gradients by the names of inputs in `pullback`."""
    tokens, weights, *params = grads
    named = {"tokens": tokens, "weights": weights}
    for path, leaf in jax.tree.leaves_with_path(params):
      named["params" + jax.tree_util.keystr(path[1:])] = leaf
    return named

  def planned(self, inputs: Any) -> Oracle:
    """Returns the oracle for inputs whose weights decide about dropped rows."""
    return self

  def observed(self, received: Any, inputs: Any) -> Oracle:
    """Returns the oracle for the order of the received rows, if any allowed."""
    return self

  @abc.abstractmethod
  def output(self, inputs: Any) -> Expected:
    """Returns the tokens that the function under test should return."""

  @abc.abstractmethod
  def pullback(self, inputs: Any, g: np.ndarray) -> dict[str, Expected]:
    """Returns the specified cotangents of the inputs, by name."""

  @abc.abstractmethod
  def pushforward(self, inputs: Any, tangents: Any) -> Expected:
    """Returns the tangent that the tokens should have."""

  @abc.abstractmethod
  def second_pullback(
    self, inputs: Any, g: np.ndarray, cotangents: Any
  ) -> dict[str, Expected]:
    """Returns the cotangents of the arguments of a pullback, by name."""

  def _limit(self, *inputs: Any, least: float = 0) -> float:
    """Returns the limit of a sum's error: 0 if all inputs are whole numbers."""
    if all(map(_numbers.are_whole, jax.tree.leaves(inputs))):
      return 0
    limit: float = self._subject.tolerance.limit(self._setting)
    return max(least, limit)

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


def derivatives(
  function: Callable[[Any, Any], tuple[Any, Any]],
) -> tuple[Callable[..., Any], ...]:
  """Returns pullback, pushforward and second pullback of `function`.

  `function(route, inputs)` returns an output, which is differentiated, and
  auxiliary results, which the first two also return.
  """

  def pullback(route: Any, inputs: Any, g: Any) -> tuple[Any, Any]:
    _, vjp, received = jax.vjp(
      lambda *x: function(route, x), *inputs, has_aux=True
    )
    return vjp(g), received

  def pushforward(route: Any, inputs: Any, tangents: Any) -> tuple[Any, Any]:
    _, tangent, received = jax.jvp(
      lambda *x: function(route, x), inputs, tangents, has_aux=True
    )
    return tangent, received

  def second_pullback(route: Any, inputs: Any, g: Any, cotangents: Any) -> Any:
    _, vjp = jax.vjp(lambda *x: pullback(route, *x)[0], inputs, g)
    return vjp(cotangents)

  return pullback, pushforward, second_pullback


class Trial(abc.ABC):
  """The object under test, built for one setting."""

  def __init__(
    self,
    subject: Subject,
    setting: Setting,
    function: Callable[[Any, Any], tuple[Any, Any]],
  ):
    self.subject: Any = subject
    self.setting = setting
    functions = function, *derivatives(function)
    programs = [jax.jit(self._program(f)) for f in functions]
    self._function = programs[0]
    # Each function takes an oracle, inputs, and more arguments; see `_run`.
    self.forward, self.pullback, self.pushforward, self.second_pullback = (
      functools.partial(self._run, program) for program in programs
    )
    self._replicate = jax.jit(
      _as_integers, out_shardings=NamedSharding(setting.mesh, PartitionSpec())
    )

  def _program(self, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the program for `fn(route, *args)`."""
    return fn

  @abc.abstractmethod
  def oracle(self, topk_idx: np.ndarray) -> Oracle:
    """Returns the oracle for choices `[P * T, K]`."""

  def routed(self, routing: Routing, rng: np.random.Generator) -> Oracle:
    """Draws a routing, and returns its oracle."""
    experts = self.setting.num_experts
    shape = self.setting.ep_size * self.setting.tokens, self.setting.top_k
    return self.oracle(routing(rng, shape, experts).astype(np.int32))

  def start(self, oracle: Oracle, inputs: Any) -> Any:
    """Starts `forward`; pass the returned arrays to `finish`."""
    return self._function(*self._place(oracle.route, inputs))

  def _run(
    self, program: Callable[..., Any], oracle: Oracle, *args: Any
  ) -> Any:
    """Returns the results of a program: its values, and the received rows."""
    return self.finish(program(*self._place(oracle.route, *args)))

  def finish(self, arrays: Any) -> Any:
    """Waits for arrays; returns whole NumPy arrays on every process."""
    if jax.process_count() == 1:
      return jax.tree.map(np.asarray, arrays)
    whole = self._replicate(arrays)
    return jax.tree.map(
      lambda bits, x: np.asarray(bits).view(x.dtype), whole, arrays
    )

  def _place(self, *args: Any) -> list[Any]:
    """Splits arrays, or the first two arrays of tuples, over the ranks.

    Later entries of a tuple are parameters, which are equal on every process.
    """
    spec = NamedSharding(self.setting.mesh, PartitionSpec("ep"))

    def split(x: Any) -> jax.Array:
      return jax.make_array_from_callback(x.shape, spec, x.__getitem__)

    return [
      (*map(split, x[:2]), *x[2:]) if isinstance(x, tuple) else split(x)
      for x in args
    ]


def _as_integers(arrays: Any) -> Any:
  """Returns the bits of arrays as integers, which no collective alters."""
  return jax.tree.map(lambda x: x.view(f"uint{8 * x.dtype.itemsize}"), arrays)
