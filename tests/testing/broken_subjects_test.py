# SPDX-License-Identifier: Apache-2.0
"""Each rule of ep.testing detects an object under test that breaks the rule.

A broken transport is a correct transport with one fault. Some faults are
allowed if the transport declares weaker guarantees.
"""

import dataclasses
import functools
import itertools
import re

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest
from testing_subjects import HOST, ONE_HOT

import ep
from ep.testing import GroupedMatmul, Received, Tolerance
from ep.testing._rules import RULES

SEED = 0

# A failure names an array, a place in it, and both values.
_PLACE = (
  r"rank \d, (expert \d+|token \d+ \(of experts [-\d, ]+\)|row \d+ in the tail)"
)
_VALUES = (
  r"is \S+, but the oracle has \S+(, off .*)?; \d+ of \d+ values are wrong"
)
NAMED = rf"^[\w ]+(\['\w+'\])?: ({_PLACE}|index \(.*\)).* {_VALUES}"
NOT_SENT = r"row \d+ (.|\n)* is no token that chose expert \d+"


# --- Parts of a fault --------------------------------------------------------

# A fault is a function of a setting, dispatch and combine. It returns a broken
# dispatch and combine.


def received(change):
  """Returns a fault: `change(received)` returns the altered fields."""

  def fault(setting, dispatch, combine):
    def other(*args):
      x = dispatch(*args)
      return x._replace(**change(x))

    return other, combine

  return fault


def array(name, alter):
  """Returns a fault that alters one array of the result of dispatch."""
  return received(lambda x: {name: alter(getattr(x, name))})


def summed(alter):
  """Returns a fault: `alter(combine, rows)` returns the tokens."""

  def fault(setting, dispatch, combine):
    def other(rows, state):
      return alter(lambda rows: combine(rows, state), rows)

    return dispatch, other

  return fault


def backward(alter):
  """Returns the identity, whose backward pass is `alter`."""

  @jax.custom_vjp
  def same(x):
    return x

  same.defvjp(lambda x: (x, None), lambda _, g: (alter(g),))
  return same


def forward(alter):
  """Returns the identity, whose tangent is `alter` of the tangent."""

  @jax.custom_jvp
  def same(x):
    return x

  same.defjvp(lambda primals, tangents: (*primals, alter(*tangents)))
  return same


def in_bfloat16(x):
  return x.astype(jnp.bfloat16).astype(x.dtype)


def in_slabs(x):
  """Returns whether each row `[C, 1]` belongs to an expert segment."""
  return jnp.arange(len(x.rows))[:, None] < x.group_sizes.sum()


def is_tail(x):
  return ~in_slabs(x)


def is_padding(x):
  return in_slabs(x) & (x.weights == 0)[:, None]


def filled(name, is_filled, value):
  """Returns a fault that writes a value to rows of an array."""

  def change(x):
    array = getattr(x, name)
    return {name: jnp.where(is_filled(x), value, array).astype(array.dtype)}

  return received(change)


def in_halves(combine, rows):
  """Sums even and odd rows separately, then adds."""
  even = jnp.arange(len(rows))[:, None] % 2 == 0
  return combine(jnp.where(even, rows, 0)) + combine(jnp.where(even, 0, rows))


def called_with(fn, x):
  """Returns `fn(rank, x)`, called with NumPy arrays."""
  return jax.pure_callback(fn, x, lax.axis_index("ep"), x)


# --- Faults of several lines -------------------------------------------------


def last_source_first(setting, dispatch, combine):
  def other(*args):
    x = dispatch(*args)
    ends, slots = jnp.cumsum(x.group_sizes), jnp.arange(setting.capacity)
    j = (slots[:, None] >= ends).sum(1)
    mirrored = 2 * ends[j] - x.group_sizes[j] - 1 - slots
    at = jnp.where(slots < ends[-1], mirrored, slots)
    arrays = x.rows, x.weights, x.scales
    rows, weights, scales = jax.tree.map(lambda array: array[at], arrays)
    return Received(rows, weights, x.group_sizes, (x.state, at), scales)

  return other, lambda rows, state: combine(rows[state[1]], state[0])


def of_the_last_dispatch(setting, dispatch, combine):
  last = []

  def other(*args):
    x = dispatch(*args)
    last[:] = [x.state]
    return x

  return other, lambda rows, state: combine(rows, *last)


def keeps_every_step(setting, dispatch, combine):
  memory = []

  def keep(rank, topk_idx):
    memory.append(np.ones(1 << 16, np.uint8))
    return np.array(topk_idx)

  def other(tokens, topk_idx, weights):
    return dispatch(tokens, called_with(keep, topk_idx), weights)

  return other, combine


def without_gradient_of_a_matrix(setting, apply, params):
  def other(params, *args):
    fixed = {"w_down": lax.stop_gradient(params["w_down"])}
    return apply(params | fixed, *args)

  return other, params


# --- The table ---------------------------------------------------------------

ROUNDED, ANY_ORDER = dict(tolerance=Tolerance(1)), dict(order="any")
rows, sizes, weights, scales = (
  functools.partial(array, name)
  for name in ("rows", "group_sizes", "weights", "scales")
)
# (rule, broken transport, layer or matmul, pattern of the failure)
BROKEN = []


def breaks(rule, *, says=NAMED, declares=None, base=HOST, **faults):
  """Adds copies of a transport or layer, each with a fault."""

  def broken(name, fault):
    return dataclasses.replace(
      base,
      name=name,
      build=lambda setting: fault(setting, *base.build(setting)),
      **{"dtypes": ("float32", "bfloat16")} | (declares or {}),
    )

  BROKEN.extend((rule, broken(*item), says) for item in faults.items())


breaks("sizes", experts_in_reverse=sizes(lambda x: x[::-1]))
breaks("rows", the_last_first=last_source_first)
swapped = rows(lambda x: x.at[1].set(x[0]))
breaks("rows", says=NOT_SENT, declares=ANY_ORDER, a_token_twice=swapped)
breaks("weights", rounds_weights=weights(in_bfloat16))
breaks("padding", ones=filled("rows", is_padding, 1))
breaks("tail", is_written=filled("rows", is_tail, 7))
breaks("scales", of_other_rows=scales(lambda x: x.at[:2].set(x[1::-1])))
breaks(
  "special_values",
  all_nans_alike=rows(lambda x: jnp.where(jnp.isnan(x), jnp.nan, x)),
)
breaks("output", adds_up_in_another_order=summed(in_halves))
breaks(
  "unread",
  multiplies_the_tail_by_zero=summed(lambda f, x: f(x) + 0 * x.sum(0)),
)
breaks("interleaved", combines_by_the_last_dispatch=of_the_last_dispatch)
breaks("gradients", not_of_weights=weights(lax.stop_gradient))
breaks("gradients", base=ONE_HOT, not_of_a_matrix=without_gradient_of_a_matrix)
breaks("jvp", rounded=rows(forward(in_bfloat16)))
breaks("second_order", none=rows(backward(lax.stop_gradient)))
breaks(
  "overflow",
  says=r"no error came, .* capacity of \d+",
  declares=dict(overflow="error"),
  is_ignored=lambda _, *fns: fns,
)
breaks(
  "overflow",
  loses_the_last_row_of_a_full_rank=rows(lambda x: x.at[-1].set(0)),
)
breaks("ep_sizes", counts_nothing=sizes(lambda x: x * 0))
breaks("soak", says="heap grew: ", keeps_memory_of_every_step=keeps_every_step)


# --- Faults of grouped matmuls -----------------------------------------------

# Released kernels had most of these faults, as the docstrings cite.

OF_MATRICES = r"^the gradient of matrices: group \d+ of \d+ rows, row \d+"


def breaks_matmul(rule, says, **declared):
  """Adds a function `matmul(rows, matrices, sizes)`."""

  def add(matmul):
    properties = dict(gradients=True, tail="zero") | declared
    subject = GroupedMatmul(name=matmul.__name__, matmul=matmul, **properties)
    BROKEN.append((rule, subject, says))
    return matmul

  return add


def with_gradients_of_matrices(starts_of):
  """Returns grouped_matmul whose groups start at `starts_of(sizes)` backward.

  The sums of the gradients of matrices include zeros times NaNs.
  """

  @jax.custom_vjp
  def matmul(*args):
    return ep.grouped_matmul(*args)

  def backward(residuals, g):
    rows, matrices, sizes = residuals
    _, vjp = jax.vjp(lambda x: ep.grouped_matmul(x, matrices, sizes), rows)
    starts, row = starts_of(sizes), jnp.arange(len(rows))
    is_in = (starts[:, None] <= row) & (row < (starts + sizes)[:, None])
    outer = ((is_in[:, None] * rows.T) @ g).astype(rows.dtype)
    return *vjp(g), outer, None

  matmul.defvjp(lambda *args: (matmul(*args), args), backward)
  return matmul


@breaks_matmul("gradients", OF_MATRICES)
def starts_groups_at_multiples_of_64(*args):
  """marin #8339: cuDNN's kernel, without the alignment that it needs."""
  return with_gradients_of_matrices(
    lambda sizes: (jnp.cumsum(sizes) - sizes) // 64 * 64
  )(*args)


@breaks_matmul("neighbours", OF_MATRICES)
def multiplies_other_rows_by_zero(*args):
  return with_gradients_of_matrices(lambda sizes: jnp.cumsum(sizes) - sizes)(
    *args
  )


@breaks_matmul("output", r"\(after the last group\), column 0 is 7.0, but")
def does_not_write_the_tail(rows, matrices, sizes):
  """transformers #48205: torch._grouped_mm, where callers expect zeros."""
  out = ep.grouped_matmul(rows, matrices, sizes)
  is_used = (jnp.arange(len(out)) < sizes.sum())[:, None]
  return jnp.where(is_used, out, 7)


_calls = itertools.count(1)


@breaks_matmul(
  "repeatable", r"\(0, 0\) is \S+, but the first call", gradients=False
)
def leaves_a_tile_unwritten(rows, matrices, sizes):
  """marin #8959: QuACK's scheduler skips tiles while others use the GPU."""
  out = ep.grouped_matmul(rows, matrices, sizes)
  is_skipped = jax.pure_callback(
    lambda _: np.bool_(next(_calls) % 3 == 0),
    jax.ShapeDtypeStruct((), bool),
    sizes,
  )
  in_tile = (jnp.arange(len(out)) < 64)[:, None]
  return jnp.where(in_tile & is_skipped, 7, out)


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
  report = ep.testing.check(
    _of_table("experts_in_reverse"), ["sizes"], seed=SEED
  )
  assert not report.passed
  (line,) = report.lines
  assert line.result == f"FAILED in {len(report.failures)}"
  for id, failure in report.failures.items():
    assert id in repr(report) == str(report)
    assert failure in str(report).replace("\n  ", "\n")
  assert f"seed={SEED}" in str(report)


def test_each_rule_catches_something():
  assert {rule for rule, _, _ in BROKEN} == RULES.keys()


def _of_table(name):
  (subject,) = (x for _, x, _ in BROKEN if x.name == name)
  return subject


@pytest.mark.parametrize(
  "name, declared, rules",
  [
    ("the_last_first", ANY_ORDER, ["rows"]),
    ("adds_up_in_another_order", ROUNDED, ["output"]),
  ],
)
def test_weaker_declarations_allow_some_faults(name, declared, rules):
  """A transport may declare rows or sums in any order."""
  weaker = dataclasses.replace(
    _of_table(name), dtypes=("float32",), alignments=(1,), **declared
  )
  report = ep.testing.check(weaker, [*rules, "gradients"])
  assert report.passed, report
