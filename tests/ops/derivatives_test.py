# SPDX-License-Identifier: Apache-2.0
"""Second derivatives in forward and reverse mode equal the oracle's results.

The function is a polynomial of whole numbers. float32 evaluates it exactly, so
the order of JAX's sums does not matter.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import assert_same, Case, jit_quickly
from groups import layer
from op_functions import Ops, round_trip


@pytest.fixture(name="case")
def small_case():
  return Case(layer(top_k=2), "with_unused_choices", whole=True)


def block(ops, tokens, weights):
  """Returns a polynomial of degree 2 in the tokens and in the weights."""
  recv, recv_weights = ops.dispatch(tokens, weights)
  rows = recv * recv * recv_weights[..., None]
  return ops.combine(rows, recv_weights)


def pullback(ops, tokens, weights, g):
  return jax.vjp(lambda *x: block(ops, *x), tokens, weights)[1](g)


def forward(ops, tokens, weights, g):
  primals, tangents = (tokens, weights), (g, weights)
  return jax.jvp(lambda *x: block(ops, *x), primals, tangents)


def linearized(ops, tokens, weights, g):
  out, f = jax.linearize(lambda *x: block(ops, *x), tokens, weights)
  return out, f(g, weights), f(tokens, weights)


def reverse_over_reverse(ops, tokens, weights, g):
  _, vjp = jax.vjp(lambda *x: pullback(ops, *x), tokens, weights, g)
  return vjp((tokens, weights))


def reverse_over_forward(ops, tokens, weights, g):
  primals = tokens, weights, g
  _, vjp = jax.vjp(lambda *x: forward(ops, *x), *primals)
  return vjp((g, tokens))


def forward_over_forward(ops, tokens, weights, g):
  primals = tokens, weights, g
  return jax.jvp(lambda *x: forward(ops, *x), primals, primals)


@pytest.mark.parametrize(
  "derivative",
  [
    linearized,
    reverse_over_reverse,
    reverse_over_forward,
    forward_over_forward,
  ],
)
def test_derivative(case, derivative):
  """Tests second derivatives in all modes, and the values from jax.jvp."""
  small_weights = np.ceil(4 * case.weights())
  case.check(derivative, case.tokens(), small_weights, case.tokens())


def test_hessian(case):
  """jax.hessian is forward over reverse mode, with a `vmap` in each."""

  def loss(scales, ops, tokens, weights):
    recv, recv_weights = ops.dispatch(tokens, weights * scales[0])
    return jnp.sum(ops.combine(recv * scales[1], recv_weights) ** 2)

  def hessian(ops, *x):
    return jax.hessian(loss)(jnp.ones(2), ops, *x)

  arrays = case.tokens(), np.ceil(4 * case.weights())
  want = jit_quickly(hessian)(case.oracle, *arrays)
  assert_same(case.run(hessian, *arrays), np.asarray(want))


def test_dispatch_has_a_gradient_if_one_output_is_used(case):
  def of_rows(ops, tokens, weights, g):
    return jax.vjp(lambda x: ops.dispatch(x, weights)[0], tokens)[1](g)

  def of_weights(ops, tokens, weights, g):
    return jax.vjp(lambda w: ops.dispatch(tokens, w)[1], weights)[1](g)

  case.check(of_rows, case.tokens(), case.weights(), case.rows())
  case.check(of_weights, case.tokens(), case.weights(), case.row_weights())


def test_the_handle_has_no_gradient(case):
  """The handle's gradient is float0, as of any integer array in JAX."""

  def through_handle(ops, tokens, weights, g):
    def out(handle, tokens):
      return round_trip(Ops(handle), tokens, weights)

    g_handle, _ = jax.vjp(out, ops.handle, tokens)[1](g)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(g_handle)}
    assert dtypes == {jax.dtypes.float0}
    return ()

  case.run(through_handle, case.tokens(), case.weights(), case.tokens())
