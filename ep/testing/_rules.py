# SPDX-License-Identifier: Apache-2.0
"""The rules, each of which tests one property of the object under test.

A rule is a function of a `Bench` and a `Variant`, the sizes and the routing of
a case. It returns the largest error in units of a `Tolerance`, or raises an
`AssertionError` that names the rank, the expert, the row and both values. A
report prints the rule's docstring.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
import dataclasses
import itertools
import sys
from typing import Any, TypeVar

import jax
import numpy as np

from ep._src.ops.quantizers import ROW_DTYPES, SCALE_DTYPES
from ep.testing._compare import compare, Expected
from ep.testing._declarations import (
  GroupedMatmul,
  Layer,
  Subject,
  Transport,
)
from ep.testing._footprint import Footprint
from ep.testing._round_trip import RoundTripOracle, Rows
from ep.testing._routings import draw
from ep.testing._trial import Oracle
from ep.testing._variants import Bench, Draw, Variant


@dataclasses.dataclass(frozen=True)
class Rule:
  """One rule of the kit.

  Attributes:
    sentence: the docstring of `check`.
    variants: returns the variants for a seed.
    left_out: returns why the rule does not apply, or "".
  """

  name: str
  sentence: str
  check: Callable[[Bench[Any], Variant], float]
  variants: Callable[[Any, int], Iterable[Variant]]
  left_out: Callable[[Any], str]


_Check = TypeVar("_Check", bound=Callable[[Any, Variant], float])
RULES: dict[str, Rule] = {}


def _everywhere(subject: Subject, seed: int) -> list[Variant]:
  return Draw(subject, seed).every_kind()


def _each_alignment(subject: Subject, seed: int) -> list[Variant]:
  """Returns for each alignment the variant with the smallest arrays."""

  def numbers(variant: Variant) -> int:
    return variant.tokens * variant.hidden * variant.top_k

  variants = sorted(_everywhere(subject, seed), key=numbers, reverse=True)
  return [*{x.alignment: x for x in variants}.values()]


def _once(subject: Subject, seed: int) -> list[Variant]:
  return _everywhere(subject, seed)[:1]


def _rule(
  variants: Callable[[Any, int], Iterable[Variant]] = _everywhere,
  *,
  of: Any = Subject,
  **declared: Any,
) -> Callable[[_Check], _Check]:
  """Returns a decorator that adds a rule for the classes `of`.

  The rule needs all values in `declared`; `...` is any value but the default.
  """

  def is_declared(subject: Subject, name: str, value: Any) -> bool:
    found = getattr(subject, name)
    if value is ...:
      return bool(found != subject.__dataclass_fields__[name].default)
    return bool(found == value)

  def left_out(subject: Subject) -> str:
    if not isinstance(subject, of):
      return f"not for a {type(subject).__name__}"
    if all(is_declared(subject, *item) for item in declared.items()):
      return ""
    words = (f"{k}=" + f"{v!r}" * (v is not ...) for k, v in declared.items())
    return f"not declared: {' and '.join(words)}"

  def add(check: _Check) -> _Check:
    name, sentence = check.__name__, check.__doc__ or ""
    RULES[name] = Rule(name, sentence, check, variants, left_out)
    return check

  return add


def _observed(
  subject: Transport, oracle: Any, received: Any, inputs: Any
) -> Any:
  """Returns the oracle, with the order of the received rows if order="any"."""
  if subject.order == "any":
    return oracle.observed(received.rows, inputs[0])
  return oracle


def _receive(
  bench: Bench[Transport], variant: Variant, numbers: str = "free"
) -> tuple[Rows, Rows, RoundTripOracle]:
  """Returns the received rows, the expected rows, and the oracle."""
  trial, oracle, rng = bench.begin(variant)
  inputs = oracle.inputs(rng, numbers)
  _, got = trial.forward(oracle, inputs)
  oracle = _observed(bench.subject, oracle, got, inputs)
  return got, oracle.received(inputs), oracle


def _compare_sizes(got: Rows, want: Rows) -> float:
  for name, count in (got.counts or {}).items():
    compare(name, count, want.counts[name])
  return compare("group_sizes", got.group_sizes, want.group_sizes)


def _compare_rows(got: Rows, want: Rows, **options: Any) -> float:
  compare("rows", got.rows, want.rows, **options)
  return compare("weights", got.weights, want.weights, **options)


@_rule(of=Transport)
def sizes(bench: Bench[Any], variant: Variant) -> float:
  """Each expert segment has a row for each choice, and padding."""
  got, want, _ = _receive(bench, variant)
  return _compare_sizes(got, want)


@_rule(of=Transport)
def rows(bench: Bench[Any], variant: Variant) -> float:
  """Each row equals its token bit for bit, in the declared order."""
  got, want, oracle = _receive(bench, variant)
  return compare("rows", got.rows, want.rows, only=oracle.holds_token)


@_rule(of=Transport)
def weights(bench: Bench[Any], variant: Variant) -> float:
  """Each row has the float32 weight of its choice, for tokens of any dtype."""
  got, want, oracle = _receive(bench, variant)
  return compare("weights", got.weights, want.weights, only=oracle.holds_token)


def _aligned(transport: Transport, seed: int) -> list[Variant]:
  return [x for x in _everywhere(transport, seed) if x.alignment > 1]


@_rule(_aligned, of=Transport, alignments=...)
def padding(bench: Bench[Any], variant: Variant) -> float:
  """Segments are padded to the alignment by rows and weights of zero."""
  got, want, oracle = _receive(bench, variant)
  _compare_sizes(got, want)
  return _compare_rows(got, want, only=~oracle.in_tail)


@_rule(of=Transport, tail="zero")
def tail(bench: Bench[Any], variant: Variant) -> float:
  """Rows and weights after the last segment are zero."""
  got, want, oracle = _receive(bench, variant)
  return _compare_rows(got, want, only=oracle.in_tail)


def _side_by_side(rows: np.ndarray, scales: np.ndarray) -> np.ndarray:
  return np.concatenate([x.view(np.uint8) for x in (rows, scales)], axis=1)


@_rule(of=Transport, scales=True)
def scales(bench: Bench[Transport], variant: Variant) -> float:
  """fp8 and int8 rows keep their bits and scales; padding has zeros."""
  trial, oracle, rng = bench.begin(variant)
  for dtypes in zip(ROW_DTYPES, itertools.cycle(SCALE_DTYPES)):
    inputs = rows, _, scales = oracle.scaled_inputs(rng, *dtypes)
    got = trial.with_scales(oracle, inputs)
    of_dtypes = oracle
    if bench.subject.order == "any":
      both = _side_by_side(got.rows, got.scales), _side_by_side(rows, scales)
      of_dtypes = oracle.observed(*both)
    want = of_dtypes.received(inputs)
    written = np.ones_like(oracle.in_tail)
    if bench.subject.tail != "zero":
      written = ~oracle.in_tail
    _compare_sizes(got, want)
    _compare_rows(got, want, only=written, nan_bits=True)
    compare("scales", got.scales, want.scales, only=written, nan_bits=True)
  return 0.0


@_rule(of=Transport, special_values=True)
def special_values(bench: Bench[Any], variant: Variant) -> float:
  """NaNs, infinities, denormal numbers and -0 are sent and summed right."""
  got, want, oracle = _receive(bench, variant, "special")
  _compare_rows(got, want, only=oracle.holds_token, nan_bits=True)
  begun, numbers = bench.begin(variant), ["special tokens"]
  with np.errstate(all="ignore"):
    worst = _check_output(bench, *begun, numbers)
    if bench.subject.gradients:
      names = ["tokens"]
      worst = max(worst, _check_pullback(bench, *begun, numbers, names))
  return worst


def _worst(
  check: Callable[[str, float], float], bench: Any, trial: Any, kinds: Any
) -> float:
  """Returns the largest error of `check(numbers, limit)` over input kinds."""
  return max(check(x, bench.limit(trial.setting, x)) for x in kinds)


def _check_output(
  bench: Bench[Any],
  trial: Any,
  oracle: Any,
  rng: np.random.Generator,
  kinds: Sequence[str] = (),
) -> float:
  def check(numbers: str, limit: float) -> float:
    inputs = oracle.inputs(rng, numbers)
    planned = oracle.planned(inputs)
    got, _ = trial.forward(planned, inputs)
    return compare(oracle.result, got, planned.output(inputs), limit=limit)

  return _worst(check, bench, trial, kinds or oracle.numbers)


@_rule()
def output(bench: Bench[Any], variant: Variant) -> float:
  """Each token gets the sum of its experts' outputs; each row, its product."""
  trial, oracle, rng = bench.begin(variant)
  kinds = oracle.numbers
  if getattr(bench.subject, "weighted", False):
    kinds += ("free",)  # whose products round
  return _check_output(bench, trial, oracle, rng, kinds)


@_rule(of=Transport | GroupedMatmul)
def unread(bench: Bench[Any], variant: Variant) -> float:
  """Rows without a token, or after the last group, are not read: even NaNs."""
  trial, oracle, rng = bench.begin(variant)
  return _check_both(bench, trial, oracle.poisoned(), rng)


def _check_both(
  bench: Bench[Any], trial: Any, oracle: Any, rng: np.random.Generator
) -> float:
  """Checks results and, if they are declared, gradients."""
  worst = _check_output(bench, trial, oracle, rng)
  if bench.subject.gradients:
    worst = max(worst, _check_pullback(bench, trial, oracle, rng))
  return worst


@_rule(of=GroupedMatmul)
def neighbours(bench: Bench[Any], variant: Variant) -> float:
  """A NaN in a row or matrix affects no result of other rows or groups."""
  trial, oracle, rng = bench.begin(variant)
  return _check_both(bench, trial, oracle.with_nans(), rng)


@_rule(_each_alignment, of=Transport)
def interleaved(bench: Bench[Any], variant: Variant) -> float:
  """In one program, two dispatches precede their combines, which run twice."""
  trial, first, rng = bench.begin(variant)
  second = bench.begin(dataclasses.replace(variant, routing="uniform"))[1]
  calls = [(x, x.inputs(rng, "normal")) for x in (first, second)]
  limit = bench.limit(trial.setting, "normal")
  expected = [oracle.output(inputs) for oracle, inputs in calls]
  expected += [x._replace(value=0 - x.value) for x in expected]
  return max(
    compare("tokens", got, want, limit=limit)
    for want, (got, _) in zip(expected, trial.interleaved(*calls), strict=True)
  )


def _compare_gradients(
  got: dict[str, Any], expected: dict[str, Expected], **options: Any
) -> float:
  return max(
    compare(f"the gradient of {name}", got[name], want, **options)
    for name, want in expected.items()
  )


def _check_pullback(
  bench: Bench[Any],
  trial: Any,
  oracle: Any,
  rng: np.random.Generator,
  kinds: Sequence[str] = (),
  names: Sequence[str] = (),
) -> float:
  def check(numbers: str, limit: float) -> float:
    inputs = oracle.inputs(rng, numbers)
    g = oracle.cotangent(rng, numbers)
    expected = oracle.planned(inputs)
    grads, received = trial.pullback(expected, inputs, g)
    if received:
      expected = _observed(bench.subject, expected, received, inputs)
    want = expected.pullback(inputs, g)
    want = {name: want[name] for name in names or want}
    return _compare_gradients(oracle.by_name(grads), want, limit=limit)

  return _worst(check, bench, trial, kinds or oracle.numbers)


@_rule(gradients=True)
def gradients(bench: Bench[Any], variant: Variant) -> float:
  """Reverse mode gives the gradients of all inputs."""
  return _check_pullback(bench, *bench.begin(variant))


@_rule(_each_alignment, jvp=True)
def jvp(bench: Bench[Any], variant: Variant) -> float:
  """Forward mode gives the derivative along all inputs."""
  trial, oracle, rng = bench.begin(variant)

  def check(numbers: str, limit: float) -> float:
    inputs, tangents = (oracle.inputs(rng, numbers) for _ in range(2))
    got, _ = trial.pushforward(oracle, inputs, tangents)
    want = oracle.pushforward(inputs, tangents)
    return compare(f"the tangent of {oracle.result}", got, want, limit=limit)

  return _worst(check, bench, trial, oracle.numbers)


@_rule(_each_alignment, second_order=True)
def second_order(bench: Bench[Any], variant: Variant) -> float:
  """Reverse mode gives the gradients of the gradients."""
  trial, oracle, rng = bench.begin(variant)

  def check(numbers: str, limit: float) -> float:
    inputs, cotangents = (oracle.inputs(rng, numbers) for _ in range(2))
    g = oracle.cotangent(rng, numbers)
    grads, g_g = trial.second_pullback(oracle, inputs, g, cotangents)
    want = oracle.second_pullback(inputs, g, cotangents)
    return _compare_gradients(
      oracle.by_name(grads) | {"g": g_g}, want, limit=limit
    )

  return _worst(check, bench, trial, oracle.numbers)


@_rule(repeatable=True)
def repeatable(bench: Bench[Any], variant: Variant) -> float:
  """The same inputs give the same bits in each run, whatever the tolerance."""
  trial, oracle, rng = bench.begin(variant)
  inputs = oracle.inputs(rng, "normal")
  g = oracle.cotangent(rng, "normal")

  def call() -> dict[str, Any]:
    got = {"output": trial.forward(oracle, inputs)[0]}
    if bench.subject.gradients:
      got |= oracle.by_name(trial.pullback(oracle, inputs, g)[0])
    return got

  first = {
    name: Expected(
      value, lambda: 0.0, lambda at: f"index {at}", source="the first call"
    )
    for name, value in call().items()
  }
  return max(_compare_gradients(call(), first) for _ in range(3))


def _too_small(transport: Transport, seed: int) -> list[Variant]:
  draw = Draw(transport, seed)
  return [
    dataclasses.replace(variant, routing=routing)
    for _ in transport.alignments
    for variant in draw.one(too_small=True)
    for routing in ("uniform", "to_one_expert")
  ]


@_rule(_too_small, of=Transport, overflow=...)
def overflow(bench: Bench[Transport], variant: Variant) -> float:
  """A rank can receive C rows; more rows are an error, or are dropped."""
  trial, oracle, rng = bench.begin(variant)
  filling = np.full_like(oracle.route[0], -1)
  filling[: trial.setting.capacity, 0] = 0
  full = _check_output(bench, trial, trial.oracle(filling), rng)
  inputs = oracle.inputs(rng, "normal")
  if bench.subject.overflow == "error":
    try:
      trial.forward(oracle, inputs)
    except Exception:
      return full
    raise AssertionError(
      f"overflow: no error came, though the routing {variant.routing!r} needs"
      f" more rows on a rank than its capacity of {trial.setting.capacity}."
    )
  planned = oracle.planned(inputs)
  got, received = trial.forward(planned, inputs)
  planned = _observed(bench.subject, planned, received, inputs)
  want = planned.received(inputs)
  _compare_sizes(received, want)
  _compare_rows(received, want, only=planned.holds_token)
  limit = bench.limit(trial.setting, "normal")
  tokens = compare("tokens", got, planned.output(inputs), limit=limit)
  worst = max(full, tokens)
  if bench.subject.gradients:
    worst = max(worst, _check_pullback(bench, trial, oracle, rng))
  return worst


def _fewer_ranks(subject: Subject, seed: int) -> list[Variant]:
  """Returns variants with smaller EP sizes than in all other rules.

  With several processes it returns none, since every process must take part.
  """
  devices, draw = jax.device_count(), Draw(subject, seed)
  smaller = range(1, devices if jax.process_count() == 1 else 1)
  sizes = [size for size in smaller if devices % size == 0]
  return [x for size in sizes for x in draw.one(ep_size=size)]


@_rule(_fewer_ranks, of=Transport | Layer)
def ep_sizes(bench: Bench[Any], variant: Variant) -> float:
  """Fewer ranks with more experts each also match the oracle."""
  if isinstance(bench.subject, Transport):
    for check in (sizes, rows, weights):
      check(bench, variant)
  worst = output(bench, variant)
  if bench.subject.gradients:
    worst = max(worst, gradients(bench, variant))
  return worst


SOAK_STEPS, IN_FLIGHT = 120, 4
# Allowed growth of resources from a third of the steps until the last step. JAX
# may need a worker thread for each step in flight.
GROWTH = Footprint(memory=64 << 10, heap=4 << 10, descriptors=0, threads=64)


@_rule(_once)
def soak(bench: Bench[Any], variant: Variant) -> float:
  """Many steps with changing routings are right and, on Linux, do not leak."""
  trial, _, rng = bench.begin(variant)
  setting = trial.setting
  shape = setting.ep_size * setting.tokens, setting.top_k
  limit = bench.limit(setting, "normal")
  pending: collections.deque[tuple[int, Oracle, Any, Any]] = collections.deque()
  worst = 0.0

  def finish(most: int) -> None:
    nonlocal worst
    while len(pending) > most:
      step, oracle, inputs, running = pending.popleft()
      got, _ = trial.finish(running)
      what = f"{oracle.result} of step {step}"
      want = oracle.output(inputs)
      worst = max(worst, compare(what, got, want, limit=limit))

  before = None
  for step in range(SOAK_STEPS):
    if step == SOAK_STEPS // 3 and sys.platform == "linux":
      finish(0)
      before = Footprint.now()
    odds = rng.choice([0, 1, 8], setting.num_experts)  # odds 0: no rows
    oracle = trial.oracle(draw(rng, shape, odds))
    inputs = oracle.inputs(rng, "normal")
    pending.append((step, oracle, inputs, trial.start(oracle, inputs)))
    finish(IN_FLIGHT)
  finish(0)
  if before:
    before.check_now(GROWTH)
  return worst
