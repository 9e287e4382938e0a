# SPDX-License-Identifier: Apache-2.0
"""Exchanges that run at the same time do not mix or wait for each other.

XLA:CPU runs the ready ops of a program in any order. The order differs between
ranks, and programs overlap. Each program here would hang, or return rows of
another exchange, if the backend matched ops by their order of arrival or if a
handler waited.
"""

import functools

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import assert_same, Case, check, expected, run
import ep
from groups import layer, of_one_process
from op_functions import block, block_and_back, Ops

ROUTINGS = ["uniform", "skewed", "empty_experts", "with_unused_choices"]


def claim(routing="uniform", fn=block_and_back, scale=1, **options):
  """Returns a claim about `fn` for `cases.check`."""
  case = Case(layer(**options), routing, whole=True)
  tokens = case.tokens() * np.float32(scale)
  return case, fn, tokens, case.weights(), case.tokens()


def test_many_layers_of_two_groups(request):
  """In each of two groups, 12 layers dispatch and combine in any order."""
  claims = [
    claim(
      ROUTINGS[i % 4],
      block,
      1 + i % 8,
      mesh=mesh,
      name=f"{i}",
      top_k=1 + i % 3,
      alignment=1 + i % 4,
    )
    for i in range(12)
    for mesh in ("ep4", "dp2_ep2")
  ]
  want = [expected(*claim) for claim in claims]
  for _ in range(request.config.getoption("load_rounds")):
    assert_same(run(*claims), want)


def test_128_branches_on_one_handle():
  case, _, tokens, weights, _ = claim("skewed")

  def fan_out(ops, tokens, weights):
    @jax.jit  # JAX traces the branch only once.
    def branch(handle, tokens):
      return Ops(handle).dispatch(tokens, weights)[0]

    return [branch(ops.handle, tokens * i) for i in range(128)]

  rows, _ = case.oracle.dispatch(tokens, weights)
  for i, out in enumerate(case.run(fan_out, tokens, weights)):
    assert_same(out, rows * np.float32(i))


def test_two_programs_in_flight():
  claims = [
    claim(ROUTINGS[i % 4], (block, block_and_back)[i % 2], 1 + i)
    for i in range(16)
  ]
  outs = [run(c) for c in claims]
  for c, (out,) in zip(claims, outs, strict=True):
    assert_same(out, expected(*c))


def test_one_rank_runs_extra_programs():
  """Ranks need not launch unrelated programs equally often."""
  device = jax.devices()[1]
  extra = jax.jit(lambda x: x * 2)
  for _ in range(4):
    if device.process_index == jax.process_index():
      extra(jax.device_put(jnp.ones(3), device))
    check(claim("skewed", block))


@pytest.mark.parametrize(
  "wrap", [jax.jit, pytest.param(jax.checkpoint, marks=of_one_process)]
)
def test_one_inner_function_twice_in_one_program(wrap):
  """A program calls one jitted block twice, with different tokens.

  JAX may lower the block once and call it twice. Then one op of the module runs
  as two exchanges, in either order.
  """

  @wrap
  def inner(topk_idx, *x):
    return block(Ops(ep.ep_prepare(layer(), topk_idx)), *x)

  def inner_and_back(ops, topk_idx, *x):
    fn = functools.partial(inner, topk_idx)
    if not isinstance(ops, Ops):
      fn = functools.partial(block, ops)
    out, vjp = jax.vjp(fn, *x)
    return out, vjp(x[0])

  claims = [
    (case, inner_and_back, case.topk_idx, tokens, weights)
    for case, _, tokens, weights, _ in map(claim, ROUTINGS[:2])
  ]
  want = [expected(*claim) for claim in claims]
  for _ in range(8):
    assert_same(run(*claims), want)


def test_branches_and_loops_that_depend_on_data():
  """All ranks take the same branch, which they know only at run time."""

  def decided(ops, steps, tokens, weights):
    def once(x):
      return ops.combine(ops.dispatch(x, weights)[0])

    x = lax.cond(steps > 2, once, lambda x: x, tokens)
    return lax.fori_loop(0, steps, lambda _, x: once(x), x)

  case = Case(layer(), "skewed", whole=True)
  inputs = case.tokens(), case.weights()

  @jax.jit
  def program(steps, topk_idx, *inputs):
    return decided(Ops(ep.ep_prepare(case.layer, topk_idx)), steps, *inputs)

  for steps in (0, 3):
    actual = program(steps, *map(case.put, (case.topk_idx, *inputs)))
    assert_same(actual, expected(case, decided, steps, *inputs))


def test_two_loops_in_parallel():
  """Each op runs several times in a program; two loops overlap."""

  def loop(ops, tokens, weights, _):
    def step(_, tokens):
      recv, _ = ops.dispatch(tokens, weights)
      return ops.combine(recv)

    return lax.fori_loop(0, 4, step, tokens)

  check(claim("uniform", loop), claim("skewed", loop))
