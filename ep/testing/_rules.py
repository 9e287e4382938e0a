# SPDX-License-Identifier: Apache-2.0
"""The rules, each of which tests one property of the object under test.

A rule is a function of a `Trial`, an `Oracle` and a random generator. It yields
errors in units of a `Tolerance`, or raises an `AssertionError` that names the
rank, the expert, the row and both values. A report prints the rule's docstring.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import itertools
import math
import operator
import sys
from typing import Any, NamedTuple

import jax
import numpy as np

from ep._src.ops.quantizers import ROW_DTYPES, SCALE_DTYPES
from ep.testing._compare import at_index, compare, Expected
from ep.testing._declarations import (
  GroupedMatmul,
  Layer,
  Subject,
  Transport,
)
from ep.testing._footprint import Footprint
from ep.testing._routings import draw, ROUTINGS
from ep.testing._trial import Oracle
from ep.testing._variants import Draw, Variant

_Rng = np.random.Generator
_Errors = Iterator[float]
_Check = Callable[[Any, Any, _Rng], _Errors]


class Rule(NamedTuple):
  """One rule of the kit.

  Attributes:
    check: the function of the rule.
    variants: returns the variants for a seed.
    of: the classes that the rule is for.
    declared: the values that the rule needs; `...` is any but the default.
  """

  check: _Check
  variants: Callable[[Any, int], Iterable[Variant]]
  of: Any
  declared: dict[str, Any]

  def left_out(self, subject: Subject) -> str:
    """Returns why the rule does not apply, or ""."""
    if not isinstance(subject, self.of):
      return f"not for a {type(subject).__name__}"
    for name, value in self.declared.items():
      found, default = getattr(subject, name), getattr(type(subject), name)
      if found == default if value is ... else found != value:
        return f"not declared: {name}=" + f"{value!r}" * (value is not ...)
    return ""


RULES: dict[str, Rule] = {}


def _everywhere(subject: Subject, seed: int) -> list[Variant]:
  return Draw(subject, seed).every_kind()


def _each_alignment(subject: Subject, seed: int) -> list[Variant]:
  """Returns for each alignment the variant with the smallest arrays."""
  sizes = operator.attrgetter("tokens", "hidden", "top_k")
  variants = _everywhere(subject, seed)
  variants.sort(key=lambda x: -math.prod(sizes(x.setting)))
  return [*{x.setting.alignment: x for x in variants}.values()]


def _rule(
  variants: Callable[[Any, int], Iterable[Variant]] = _everywhere,
  *,
  of: Any = Subject,
  **declared: Any,
) -> Callable[[_Check], _Check]:
  """Returns a decorator that adds a rule; see `Rule`."""

  def add(check: _Check) -> _Check:
    RULES[check.__name__] = Rule(check, variants, of, declared)
    return check

  return add


def _receive(
  trial: Any, oracle: Any, rng: _Rng, numbers: str = "free"
) -> tuple[Any, dict[str, Expected], Any]:
  """Returns the received rows, the expected rows, and the oracle."""
  inputs = oracle.inputs(rng, numbers)
  _, got = trial.forward(oracle, inputs)
  oracle = oracle.observed(got, inputs)
  return got, oracle.received(inputs), oracle


def _compare_sizes(got: Any, want: dict[str, Expected]) -> _Errors:
  sizes = {"group_sizes": got.group_sizes} | (got.counts or {})
  for name, array in sizes.items():
    yield compare(name, array, want[name])


def _compare_rows(
  got: Any, want: dict[str, Expected], **options: Any
) -> _Errors:
  yield compare("rows", got.rows, want["rows"], **options)
  yield compare("weights", got.weights, want["weights"], **options)


@_rule(of=Transport)
def sizes(trial: Any, oracle: Any, rng: _Rng) -> _Errors:
  """Each expert segment has a row for each choice, and padding."""
  got, want, _ = _receive(trial, oracle, rng)
  yield from _compare_sizes(got, want)


@_rule(of=Transport)
def rows(trial: Any, oracle: Any, rng: _Rng) -> _Errors:
  """Each row equals its token bit for bit, in the declared order."""
  got, want, oracle = _receive(trial, oracle, rng)
  yield compare("rows", got.rows, want["rows"], only=oracle.holds_token)


@_rule(of=Transport)
def weights(trial: Any, oracle: Any, rng: _Rng) -> _Errors:
  """Each row has the float32 weight of its choice, for tokens of any dtype."""
  got, want, oracle = _receive(trial, oracle, rng)
  only = oracle.holds_token
  yield compare("weights", got.weights, want["weights"], only=only)


@_rule(of=Transport, alignments=...)
def padding(trial: Any, oracle: Any, rng: _Rng) -> _Errors:
  """Segments are padded to the alignment by rows and weights of zero."""
  got, want, oracle = _receive(trial, oracle, rng)
  yield from _compare_sizes(got, want)
  yield from _compare_rows(got, want, only=~oracle.in_tail)


@_rule(of=Transport, tail="zero")
def tail(trial: Any, oracle: Any, rng: _Rng) -> _Errors:
  """Rows and weights after the last segment are zero."""
  got, want, oracle = _receive(trial, oracle, rng)
  yield from _compare_rows(got, want, only=oracle.in_tail)


@_rule(of=Transport, scales=True)
def scales(trial: Any, oracle: Any, rng: _Rng) -> _Errors:
  """fp8 and int8 rows keep their bits and scales; padding has zeros."""
  for dtypes in zip(ROW_DTYPES, itertools.cycle(SCALE_DTYPES)):
    inputs = oracle.scaled_inputs(rng, *dtypes)
    got = trial.with_scales(oracle, inputs)
    want = oracle.observed(got, inputs).received(inputs)
    is_zero = trial.subject.tail == "zero"
    options = dict(only=is_zero | ~oracle.in_tail, nan_bits=True)
    yield from _compare_sizes(got, want)
    yield from _compare_rows(got, want, **options)
    yield compare("scales", got.scales, want["scales"], **options)


@_rule(of=Transport, special_values=True)
def special_values(trial: Any, oracle: Any, rng: _Rng) -> _Errors:
  """NaNs, infinities, denormal numbers and -0 are sent and summed right."""
  got, want, observed = _receive(trial, oracle, rng, "special")
  yield from _compare_rows(got, want, only=observed.holds_token, nan_bits=True)
  numbers = ["special tokens"]
  with np.errstate(all="ignore"):
    yield from _check_output(trial, oracle, rng, numbers)
    if trial.subject.gradients:
      yield from _check_pullback(trial, oracle, rng, numbers, ["tokens"])


def _check_output(
  trial: Any, oracle: Any, rng: _Rng, kinds: Sequence[str] = ()
) -> _Errors:
  """Checks results for kinds of inputs."""
  is_weighted = getattr(trial.subject, "weighted", False)
  every = oracle.numbers + ("free",) * is_weighted  # whose products round
  for numbers in kinds or every:
    inputs = oracle.inputs(rng, numbers)
    planned = oracle.planned(inputs)
    got, _ = trial.forward(planned, inputs)
    yield compare(oracle.result, got, planned.output(inputs))


@_rule()
def output(trial: Any, oracle: Any, rng: _Rng) -> _Errors:
  """Each token gets the sum of its experts' outputs; each row, its product."""
  yield from _check_output(trial, oracle, rng)


@_rule(of=Transport | GroupedMatmul)
def unread(trial: Any, oracle: Any, rng: _Rng) -> _Errors:
  """Rows without a token, or after the last group, are not read: even NaNs."""
  yield from _check_both(trial, oracle.poisoned(), rng)


def _check_both(trial: Any, oracle: Any, rng: _Rng) -> _Errors:
  """Checks results and, if they are declared, gradients."""
  yield from _check_output(trial, oracle, rng)
  if trial.subject.gradients:
    yield from _check_pullback(trial, oracle, rng)


@_rule(of=GroupedMatmul)
def neighbours(trial: Any, oracle: Any, rng: _Rng) -> _Errors:
  """A NaN in a row or matrix affects no result of other rows or groups."""
  yield from _check_both(trial, oracle.with_nans(), rng)


@_rule(_each_alignment, of=Transport)
def interleaved(trial: Any, oracle: Any, rng: _Rng) -> _Errors:
  """In one program, two dispatches precede their combines, which run twice."""
  oracles = oracle, trial.routed(ROUTINGS["uniform"], rng)
  calls = [(x, x.inputs(rng, "normal")) for x in oracles]
  expected = [oracle.output(inputs) for oracle, inputs in calls]
  expected += [x._replace(value=0 - x.value) for x in expected]
  results = trial.interleaved(*calls)
  for want, (got, _) in zip(expected, results, strict=True):
    yield compare("tokens", got, want)


def _compare_gradients(
  got: dict[str, Any], expected: dict[str, Expected]
) -> _Errors:
  for name, want in expected.items():
    yield compare(f"the gradient of {name}", got[name], want)


def _check_pullback(
  trial: Any,
  oracle: Any,
  rng: _Rng,
  kinds: Sequence[str] = (),
  names: Sequence[str] = (),
) -> _Errors:
  """Checks the gradients of `names`, or of all inputs."""
  for numbers in kinds or oracle.numbers:
    inputs = oracle.inputs(rng, numbers)
    g = oracle.cotangent(rng, numbers)
    planned = oracle.planned(inputs)
    grads, received = trial.pullback(planned, inputs, g)
    want = planned.observed(received, inputs).pullback(inputs, g)
    want = {name: want[name] for name in names or want}
    yield from _compare_gradients(oracle.by_name(grads), want)


@_rule(gradients=True)
def gradients(trial: Any, oracle: Any, rng: _Rng) -> _Errors:
  """Reverse mode gives the gradients of all inputs."""
  yield from _check_pullback(trial, oracle, rng)


@_rule(_each_alignment, jvp=True)
def jvp(trial: Any, oracle: Any, rng: _Rng) -> _Errors:
  """Forward mode gives the derivative along all inputs."""
  what = f"the tangent of {oracle.result}"
  for numbers in oracle.numbers:
    inputs, tangents = (oracle.inputs(rng, numbers) for _ in range(2))
    got, _ = trial.pushforward(oracle, inputs, tangents)
    yield compare(what, got, oracle.pushforward(inputs, tangents))


@_rule(_each_alignment, second_order=True)
def second_order(trial: Any, oracle: Any, rng: _Rng) -> _Errors:
  """Reverse mode gives the gradients of the gradients."""
  for numbers in oracle.numbers:
    inputs, cotangents = (oracle.inputs(rng, numbers) for _ in range(2))
    g = oracle.cotangent(rng, numbers)
    grads, g_g = trial.second_pullback(oracle, inputs, g, cotangents)
    want = oracle.second_pullback(inputs, g, cotangents)
    yield from _compare_gradients(oracle.by_name(grads) | {"g": g_g}, want)


@_rule(repeatable=True)
def repeatable(trial: Any, oracle: Any, rng: _Rng) -> _Errors:
  """The same inputs give the same bits in each run, whatever the tolerance."""
  inputs = oracle.inputs(rng, "normal")
  g = oracle.cotangent(rng, "normal")

  def call() -> dict[str, Any]:
    got = {"output": trial.forward(oracle, inputs)[0]}
    if trial.subject.gradients:
      got |= oracle.by_name(trial.pullback(oracle, inputs, g)[0])
    return got

  first = {
    name: Expected(value, lambda: 0.0, at_index, source="the first call")
    for name, value in call().items()
  }
  for _ in range(3):
    yield from _compare_gradients(call(), first)


def _too_small(transport: Transport, seed: int) -> list[Variant]:
  draw = Draw(transport, seed)
  return [
    dataclasses.replace(variant, routing=routing)
    for _ in transport.alignments
    for variant in draw.one(too_small=True)
    for routing in ("uniform", "to_one_expert")
  ]


@_rule(_too_small, of=Transport, overflow=...)
def overflow(trial: Any, oracle: Any, rng: _Rng) -> _Errors:
  """A rank can receive C rows; more rows are an error, or are dropped."""
  capacity = trial.setting.capacity
  filling = np.full_like(oracle.route[0], -1)
  filling[:capacity, 0] = 0
  yield from _check_output(trial, trial.oracle(filling), rng)
  inputs = oracle.inputs(rng, "normal")
  if trial.subject.overflow == "error":
    try:
      trial.forward(oracle, inputs)
    except Exception:
      return
    raise AssertionError(
      "overflow: no error came, though the routing needs more rows on a rank"
      f" than its capacity of {capacity}."
    )
  planned = oracle.planned(inputs)
  got, received = trial.forward(planned, inputs)
  planned = planned.observed(received, inputs)
  want = planned.received(inputs)
  yield from _compare_sizes(received, want)
  yield from _compare_rows(received, want, only=planned.holds_token)
  yield compare("tokens", got, planned.output(inputs))
  if trial.subject.gradients:
    yield from _check_pullback(trial, oracle, rng)


def _fewer_ranks(subject: Subject, seed: int) -> list[Variant]:
  """Returns variants with smaller EP sizes than in all other rules.

  With several processes it returns none, since every process must take part.
  """
  devices, draw = jax.device_count(), Draw(subject, seed)
  smaller = range(1, devices if jax.process_count() == 1 else 1)
  sizes = [size for size in smaller if devices % size == 0]
  return [x for size in sizes for x in draw.one(ep_size=size)]


@_rule(_fewer_ranks, of=Transport | Layer)
def ep_sizes(trial: Any, oracle: Any, rng: _Rng) -> _Errors:
  """Fewer ranks with more experts each also match the oracle."""
  if isinstance(trial.subject, Transport):
    for check in (sizes, rows, weights):
      yield from check(trial, oracle, rng)
  yield from _check_both(trial, oracle, rng)


SOAK_STEPS, IN_FLIGHT = 120, 4
# Allowed growth of resources from a third of the steps until the last step. JAX
# may need a worker thread for each step in flight.
GROWTH = Footprint(memory=64 << 10, heap=4 << 10, descriptors=0, threads=64)


def _any_odds(rng: _Rng, shape: tuple[int, int], experts: int) -> np.ndarray:
  return draw(rng, shape, rng.choice([0, 1, 8], experts))  # odds 0: no rows


@_rule(lambda subject, seed: _everywhere(subject, seed)[:1])
def soak(trial: Any, oracle: Any, rng: _Rng) -> _Errors:
  """Many steps with changing routings are right and, on Linux, do not leak."""
  pending: collections.deque[tuple[int, Oracle, Any, Any]] = collections.deque()

  def finish(most: int) -> _Errors:
    while len(pending) > most:
      step, oracle, inputs, running = pending.popleft()
      got, _ = trial.finish(running)
      what = f"{oracle.result} of step {step}"
      yield compare(what, got, oracle.output(inputs))

  before = None
  for step in range(SOAK_STEPS):
    if step == SOAK_STEPS // 3 and sys.platform == "linux":
      yield from finish(0)
      before = Footprint.now()
    oracle = trial.routed(_any_odds, rng)
    inputs = oracle.inputs(rng, "normal")
    pending.append((step, oracle, inputs, trial.start(oracle, inputs)))
    yield from finish(IN_FLIGHT)
  yield from finish(0)
  if before:
    before.check_now(GROWTH)
