# SPDX-License-Identifier: Apache-2.0
"""Each rule of ep.testing detects an object under test that breaks the rule.

A broken transport is a correct transport with one fault. Some faults are
allowed if the transport declares weaker guarantees.
"""

import dataclasses
import functools
import re
import time

import broken_matmuls
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest
from testing_subjects import HOST, ONE_HOT

import ep
from ep.testing import _rank, Received, Tolerance, Transport
from ep.testing._rules import RULES

# (rule, broken transport, layer or matmul, pattern of each failure)
BROKEN = [*broken_matmuls.BROKEN]
SEED = 0

ROW = r"rank \d, expert \d+, row \d+ \(token \d+ of rank \d\)"
TOKEN = r"rank \d, token \d+ \(of experts [-\d, ]+\)"
VALUES = r"is \S+, but the oracle has \S+; \d+ of \d+ values are wrong"


def _breaks(rule, says, base=HOST, **declared):
  """Registers a copy of the transport `base`, with altered functions."""

  def add(alter):
    subject = dataclasses.replace(
      base,
      name=alter.__name__,
      build=lambda setting: alter(setting, *base.build(setting)),
      **({"dtypes": ("float32",)} | declared),
    )
    BROKEN.append((rule, subject, says))
    return subject

  return add


def _then(dispatch, alter):
  return lambda *args: alter(dispatch(*args))


def _with(name, dispatch, alter):
  """Returns `dispatch` with one array of its result altered."""

  def altered(received):
    return received._replace(**{name: alter(getattr(received, name))})

  return _then(dispatch, altered)


_with_rows = functools.partial(_with, "rows")
_with_sizes = functools.partial(_with, "group_sizes")
_with_weights = functools.partial(_with, "weights")


def _identity(backward):
  """Returns the identity with `backward` as backward pass."""

  @jax.custom_vjp
  def same(x):
    return x

  same.defvjp(lambda x: (x, None), lambda _, g: (backward(g),))
  return same


def _in_slabs(received):
  """Returns whether each row `[C, 1]` belongs to an expert segment."""
  slots = jnp.arange(len(received.rows))[:, None]
  return slots < received.group_sizes.sum()


@_breaks("sizes", rf"^group_sizes: rank \d, expert \d+ {VALUES}")
def numbers_experts_in_reverse(setting, dispatch, combine):
  return _with_sizes(dispatch, lambda sizes: sizes[::-1]), combine


@_breaks("sizes", r"rows float32\[\d+, \d+\]; it has to return float32\[")
def returns_fewer_rows(setting, dispatch, combine):
  return _with_rows(dispatch, lambda rows: rows[1:]), combine


@_breaks("sizes", "a tuple; it has to return an ep.testing.Received")
def returns_a_tuple(setting, dispatch, combine):
  return _then(dispatch, tuple), combine


def _taken(x, at):
  """Gathers rows bit for bit; XLA may change the bits of 16-bit NaNs."""
  if x.dtype == jnp.float32:
    return x[at]
  bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
  return lax.bitcast_convert_type(bits[at], x.dtype)


@_breaks("rows", rf"^rows: {ROW}, column 0 {VALUES}")
def takes_the_last_source_first(setting, dispatch, combine):
  def order(group_sizes):
    ends = jnp.cumsum(group_sizes)
    slots = jnp.arange(setting.capacity)
    j = (slots[:, None] >= ends).sum(1)
    mirrored = 2 * ends[j] - group_sizes[j] - 1 - slots
    return jnp.where(slots < ends[-1], mirrored, slots)

  def other(*args):
    received = dispatch(*args)
    at = order(received.group_sizes)
    rows, weights, scales = jax.tree.map(
      lambda x: _taken(x, at),
      (received.rows, received.weights, received.scales),
    )
    state = received.state, at
    return Received(rows, weights, received.group_sizes, state, scales)

  return other, lambda rows, state: combine(rows[state[1]], state[0])


@_breaks(
  "rows",
  r"rank \d, expert \d+, row 1 (.|\n)* is no token that chose expert \d+",
  order="any",
)
def sends_a_token_twice(setting, dispatch, combine):
  return _with_rows(dispatch, lambda x: x.at[1].set(x[0])), combine


@_breaks(
  "weights",
  rf"^weights: {ROW} {VALUES}",
  dtypes=("float32", "bfloat16"),
)
def rounds_weights_to_the_dtype_of_tokens(setting, dispatch, combine):
  def rounded(weights):
    return weights.astype(setting.dtype).astype(jnp.float32)

  return _with_weights(dispatch, rounded), combine


@_breaks("padding", r"rows: rank \d, expert \d+, row \d+ \(padding\), column 0")
def pads_with_ones(setting, dispatch, combine):
  def padded(received):
    padding = _in_slabs(received) & ~received.rows.any(1, keepdims=True)
    return received._replace(rows=jnp.where(padding, 1, received.rows))

  return _then(dispatch, padded), combine


@_breaks("tail", r"rows: rank \d, row \d+ in the tail, column 0 is 7.0, but")
def writes_the_tail_after_padded_slabs(setting, dispatch, combine):
  if setting.alignment == 1:
    return dispatch, combine

  def written(received):
    rows = jnp.where(_in_slabs(received), received.rows, 7)
    return received._replace(rows=rows)

  return _then(dispatch, written), combine


@_breaks("scales", rf"^scales: {ROW}, column 0 is \S+, but")
def sends_scales_to_other_rows(setting, dispatch, combine):
  return _with("scales", dispatch, lambda x: x.at[:2].set(x[1::-1])), combine


def _ones_in_scales(dispatch, where):
  """Returns `dispatch` with scales of 1 in the rows `where(received)`."""

  def filled(received):
    scales = jnp.where(where(received), 1, received.scales)
    return received._replace(scales=scales.astype(received.scales.dtype))

  return _then(dispatch, filled)


@_breaks("scales", r"^scales: rank \d, .* in the tail, column 0 is \S+, but")
def leaves_scales_in_the_tail(setting, dispatch, combine):
  return _ones_in_scales(dispatch, lambda r: ~_in_slabs(r)), combine


@_breaks(
  "scales", r"^scales: rank \d, expert \d+, row \d+ \(padding\), column 0 is"
)
def pads_scales_with_ones(setting, dispatch, combine):
  def is_padding(received):
    return _in_slabs(received) & (received.weights == 0)[:, None]

  return _ones_in_scales(dispatch, is_padding), combine


@_breaks(
  "scales", r"row \d+ (.|\n)* is no token that chose expert", order="any"
)
def sends_scales_of_another_token(setting, dispatch, combine):
  return _with("scales", dispatch, lambda x: x.at[0].set(x[1])), combine


@_breaks("special_values", r"column \d+ is nan, but the oracle has nan")
def makes_all_nans_alike(setting, dispatch, combine):
  def alike(rows):
    return jnp.where(jnp.isnan(rows), jnp.nan, rows)

  return _with_rows(dispatch, alike), combine


@_breaks(
  "output",
  rf"^tokens: {TOKEN}, column \d+ is .*, off by \S+ ulps of \d+;",
  tolerance=Tolerance(1),
)
def adds_up_in_bfloat16(setting, dispatch, combine):
  def other(rows, state):
    return combine(rows.astype(jnp.bfloat16).astype(rows.dtype), state)

  return dispatch, other


def _in_halves(combine):
  """Returns a combine that sums even and odd rows separately, then adds."""

  def other(rows, state):
    even = jnp.arange(len(rows))[:, None] % 2 == 0
    halves = jnp.where(even, rows, 0), jnp.where(even, 0, rows)
    return combine(halves[0], state) + combine(halves[1], state)

  return other


@_breaks("output", rf"^tokens: {TOKEN}, column \d+ {VALUES}")
def adds_up_in_another_order(setting, dispatch, combine):
  return dispatch, _in_halves(combine)


@_breaks("output", rf"^tokens: {TOKEN}, column 0 is", ONE_HOT)
def forgets_the_weights(setting, apply, params):
  def other(params, tokens, topk_idx, topk_weights):
    return apply(params, tokens, topk_idx, jnp.ones_like(topk_weights))

  return other, params


@_breaks("unread", "tokens: rank .* is nan, but the oracle has")
def multiplies_the_tail_by_zero(setting, dispatch, combine):
  return dispatch, lambda rows, state: combine(rows, state) + 0 * rows.sum(0)


@_breaks("unread", "the gradient of tokens: rank .* is nan, but the oracle has")
def multiplies_gradients_of_the_tail_by_zero(setting, dispatch, combine):
  moved = _identity(lambda g: g + 0 * g.sum(0))
  return _with_rows(dispatch, moved), combine


@_breaks("interleaved", rf"^tokens: {TOKEN}, column \d+ is")
def combines_by_the_last_dispatch(setting, dispatch, combine):
  last = []

  def other(*args):
    received = dispatch(*args)
    last[:] = [received.state]
    return received

  return other, lambda rows, state: combine(rows, *last)


@_breaks("gradients", rf"^the gradient of weights: {TOKEN}, choice \d+ is 0.0,")
def drops_the_gradient_of_weights(setting, dispatch, combine):
  return _with_weights(dispatch, lax.stop_gradient), combine


@_breaks("gradients", rf"^the gradient of tokens: {TOKEN}")
def rounds_gradients_to_bfloat16(setting, dispatch, combine):
  moved = _identity(lambda g: g.astype(jnp.bfloat16).astype(g.dtype))
  return _with_rows(dispatch, moved), combine


@_breaks(
  "gradients",
  r"^the gradient of params\['w_down'\]: index \(\d+, 0, 0\) is 0.0",
  ONE_HOT,
)
def drops_the_gradient_of_a_matrix(setting, apply, params):
  def other(params, *args):
    fixed = {"w_down": lax.stop_gradient(params["w_down"])}
    return apply(params | fixed, *args)

  return other, params


@_breaks(
  "gradients", rf"^the gradient of tokens: {TOKEN}, column 0 is 0.0, but"
)
def drops_gradients_of_padded_slabs(setting, dispatch, combine):
  if setting.alignment == 1:
    return dispatch, combine
  return _with_rows(dispatch, lax.stop_gradient), combine


def _with_tangent(alter):
  """Returns the identity with `alter` applied to the tangent."""

  @jax.custom_jvp
  def same(x):
    return x

  same.defjvp(lambda primals, tangents: (*primals, alter(*tangents)))
  return same


@_breaks("jvp", rf"^the tangent of tokens: {TOKEN}, column 0 {VALUES}")
def rounds_the_tangent(setting, dispatch, combine):
  moved = _with_tangent(lambda t: t.astype(jnp.bfloat16).astype(t.dtype))
  return _with_rows(dispatch, moved), combine


@_breaks("jvp", "TypeError: can't apply forward-mode")
def has_reverse_mode_only(setting, dispatch, combine):
  return _with_rows(dispatch, _identity(lambda g: g)), combine


@_breaks(
  "overflow", r"no error came, .* than its capacity of \d+", overflow="error"
)
def ignores_the_overflow(setting, dispatch, combine):
  return dispatch, combine


@_breaks("overflow", "^NotImplementedError: dispatch", overflow="error")
def always_fails(setting, dispatch, combine):
  def failing(*args):
    raise NotImplementedError("dispatch")

  return failing, combine


@_breaks("overflow", f"^tokens: {TOKEN}, column 0 is 0.0, but")
def loses_the_last_row_of_a_full_rank(setting, dispatch, combine):
  return _with_rows(dispatch, lambda rows: rows.at[-1].set(0)), combine


@_breaks("overflow", f"^tokens: {TOKEN}")
def gives_dropped_choices_the_last_row(setting, dispatch, combine):
  roomy = dataclasses.replace(setting, capacity=8 * setting.capacity)
  dispatch, combine = HOST.build(roomy)

  def other(*args):
    rows, weights, group_sizes, state, _ = dispatch(*args)
    ends = jnp.cumsum(group_sizes).clip(max=setting.capacity)
    cut = jnp.diff(ends, prepend=0)
    return Received(
      rows[: setting.capacity], weights[: setting.capacity], cut, state
    )

  def last_again(rows, state):
    more = roomy.capacity - setting.capacity
    return combine(jnp.pad(rows, ((0, more), (0, 0)), mode="edge"), state)

  return other, last_again


@_breaks("ep_sizes", rf"^group_sizes: rank \d, expert \d+ {VALUES}")
def counts_two_experts_of_a_rank(setting, dispatch, combine):
  known = setting.num_local_experts == 2
  return _with_sizes(dispatch, lambda sizes: sizes * known), combine


@_breaks("ep_sizes", rf"^the gradient of tokens: {TOKEN}, column 0 is 0.0, but")
def drops_gradients_of_fewer_ranks(setting, dispatch, combine):
  if setting.ep_size == 4:
    return dispatch, combine
  return _with_rows(dispatch, lax.stop_gradient), combine


@_breaks("sizes", f"^group_sizes: rank .*{VALUES}")
def wraps_sizes_at_16_bits(setting, dispatch, combine):
  return _with_sizes(dispatch, lambda sizes: sizes % (1 << 16)), combine


@_breaks("sizes", f"^group_sizes: rank .*{VALUES}")
def counts_one_less_if_counts_are_equal(setting, dispatch, combine):
  def counted(sizes):
    return sizes - ((sizes[0] == sizes).all() & (sizes[0] > 0))

  return _with_sizes(dispatch, counted), combine


@_breaks("second_order", rf"^the gradient of (tokens|weights|g): {TOKEN}")
def has_no_derivative_of_the_gradient(setting, dispatch, combine):
  return _with_rows(dispatch, _identity(lax.stop_gradient)), combine


@_breaks("special_values", rf"^tokens: {TOKEN}, .*the oracle has -?inf")
def clamps_infinite_sums(setting, dispatch, combine):
  most = jnp.finfo(setting.dtype).max

  def clamped(rows, state):
    sums = combine(rows, state)
    return jnp.where(jnp.isinf(sums), jnp.sign(sums) * most, sums)

  return dispatch, clamped


@_breaks("special_values", rf"^tokens: {TOKEN}, .* -0.0, but .* 0.0")
def keeps_the_sign_of_a_zero_sum(setting, dispatch, combine):
  def signed(rows, state):
    sums = combine(rows, state)
    return jnp.where(sums == 0, jnp.array(-0.0, sums.dtype), sums)

  return dispatch, signed


def _called_with(fn, x):
  """Returns `fn(rank, x)`, called with NumPy arrays."""
  return jax.pure_callback(fn, x, lax.axis_index("ep"), x)


@_breaks(
  "repeatable",
  "but the first call has",
  tolerance=Tolerance(1),
  gradients=False,
)
def alternates_the_order_of_sums(setting, dispatch, combine):
  calls = []

  def next_call(rank, rows):
    calls.append(rank)
    return np.array([calls.count(rank) % 2], np.int32)

  def other(rows, state):
    is_odd = jax.pure_callback(
      next_call,
      jax.ShapeDtypeStruct((1,), np.int32),
      lax.axis_index("ep"),
      rows,
    )
    split = _in_halves(combine)(rows, state)
    return jnp.where(is_odd == 1, split, combine(rows, state))

  return dispatch, other


@_breaks("soak", r"tokens of step \d: rank \d, token ")
def remembers_the_first_routing(setting, dispatch, combine):
  first = {}

  def remember(rank, topk_idx):
    return first.setdefault(int(rank), np.array(topk_idx))

  def other(tokens, topk_idx, weights):
    return dispatch(tokens, _called_with(remember, topk_idx), weights)

  return other, combine


@_breaks("soak", "heap grew: ")
def keeps_memory_of_every_step(setting, dispatch, combine):
  kept = []

  def keep(rank, topk_idx):
    kept.append(np.ones(1 << 16, np.uint8))
    return np.array(topk_idx)

  def other(tokens, topk_idx, weights):
    return dispatch(tokens, _called_with(keep, topk_idx), weights)

  return other, combine


def _alone(setting):
  """Builds a transport that exchanges no rows."""

  def dispatch(tokens, topk_idx, topk_weights):
    rows = jnp.zeros((setting.capacity, setting.hidden), tokens.dtype)
    sizes = jnp.zeros(setting.num_local_experts, jnp.int32)
    return Received(rows, rows[:, 0].astype(jnp.float32), sizes, tokens)

  return dispatch, lambda rows, tokens: jnp.zeros_like(tokens)


ALONE = Transport(
  name="exchanges nothing",
  location="broken_subjects_test:ALONE",
  build=_alone,
  reports_disagreement=True,
)
BROKEN += [
  ("processes", ALONE, "group_sizes: rank 0, expert 0 is 0, but the oracle"),
  ("disagreement", ALONE, "process 0 got no error, though process 1 has"),
]


def _waiting(setting):
  """Builds a transport that hangs in its third step."""
  steps = {}

  def step(rank, topk_idx):
    steps[int(rank)] = steps.get(int(rank), 0) + 1
    time.sleep(600 * (steps[int(rank)] > 2))
    return np.array(topk_idx)

  dispatch, _combine = _alone(setting)

  def waiting(tokens, topk_idx, weights):
    waited = _called_with(step, topk_idx).sum()
    return _with_rows(dispatch, lambda rows: rows + waited)(
      tokens, topk_idx, weights
    )

  return waiting, lambda rows, tokens: tokens + rows[: len(tokens)]


WAITING = Transport(
  name="waits without end",
  location="broken_subjects_test:WAITING",
  build=_waiting,
  reports_death=True,
  limit_s=1,
)
BROKEN.append(
  (
    "killed_rank",
    WAITING,
    "process 0 neither finished nor failed within 1 s; its log ends in:",
  )
)


def _second_build_fails():
  builds = []

  def build(setting):
    builds.append(setting)
    if len(builds) > 1:
      raise RuntimeError("a second build")
    return _alone(setting)

  return dataclasses.replace(ALONE, build=build)


def _second_step_fails():
  def build(setting):
    steps = []

    def step(rank, topk_idx):
      steps.append(rank)
      if steps.count(rank) > 1:
        raise RuntimeError("a second step")
      return np.array(topk_idx)

    dispatch, _combine = _alone(setting)

    def failing(tokens, topk_idx, weights):
      topk_idx = _called_with(step, topk_idx)
      return dispatch(tokens + topk_idx.sum(), topk_idx, weights)

    return failing, lambda rows, tokens: tokens

  return dataclasses.replace(ALONE, build=build)


@pytest.mark.parametrize(
  "task, make, says",
  [
    (_rank.disagreement, _second_build_fails, "a second build"),
    (_rank.killed_rank, _second_step_fails, "a second step"),
  ],
)
def test_an_error_without_a_cause_is_no_report(task, make, says):
  """A transport whose second call always fails does not detect a dead rank."""
  with pytest.raises(Exception, match=says):
    task(make(), 0)


@pytest.mark.parametrize(
  "rule, subject, says",
  BROKEN,
  ids=[f"{rule}-{subject.name}" for rule, subject, _ in BROKEN],
)
def test_it_is_caught(rule, subject, says):
  """The first failure names the fault, and says how to repeat the case."""
  for param in ep.testing.cases(subject, [rule], seed=SEED):
    (case,) = param.values
    try:
      case.check()
    except Exception as error:
      is_plain = isinstance(error, AssertionError)
      words = str(error) if is_plain else f"{type(error).__name__}: {error}"
      assert re.search(says, words), words
      assert f"Repeat this with seed={SEED}." in error.__notes__
      return
  pytest.fail("no case failed")


def test_a_report_shows_each_failure():
  report = ep.testing.check(returns_a_tuple, ["sizes"], seed=SEED)
  assert not report.passed
  (line,) = report.lines
  assert line.result == f"FAILED in {line.cases}"
  assert len(report.failures) == line.cases
  for id, failure in report.failures.items():
    assert id in repr(report) == str(report)
    assert failure in str(report).replace("\n  ", "\n")
  assert f"seed={SEED}" in str(report)


def test_each_rule_catches_something():
  assert {rule for rule, _, _ in BROKEN} == RULES.keys()


@pytest.mark.parametrize(
  "subject, declared, rules",
  [
    (takes_the_last_source_first, dict(order="any"), ["rows"]),
    (adds_up_in_another_order, dict(tolerance=Tolerance(1)), ["output"]),
  ],
  ids=lambda x: getattr(x, "name", None),
)
def test_weaker_declarations_allow_some_faults(subject, declared, rules):
  """A transport may declare rows or sums in any order."""
  weaker = dataclasses.replace(subject, alignments=(1,), **declared)
  report = ep.testing.check(weaker, [*rules, "gradients"])
  assert report.passed, report
