# SPDX-License-Identifier: Apache-2.0
"""JAX's transformations work on grouped matmuls.

The function under test multiplies shared rows by two lists of matrices, as a
gated expert does. The dense reference looks up a matrix for each row.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from cases import jit_quickly
from conftest import make_mesh
from ep._src.matmul import grouped_matmul as gm

C, F, G, K = 11, 4, 6, 5
SIZES = np.int32([3, 0, 6])
USED = 9


def gated(x, w, v, sizes=SIZES):
  y, z = gm.grouped_matmuls(x, [w, v], sizes, tail="zero")
  return jnp.sin(y), jnp.cos(z) * z


def dense(x, w, v, sizes=SIZES):
  ends = jnp.cumsum(sizes)
  row = jnp.arange(C)
  slab = jnp.searchsorted(ends, row, side="right", method="compare_all")
  used = (row < ends[-1])[:, None]
  y, z = (
    jnp.where(used, jnp.einsum("cf,cfg->cg", x, m[slab]), 0) for m in (w, v)
  )
  return jnp.sin(y), jnp.cos(z) * z


def inputs(seed=0, lead=()):
  rng = np.random.default_rng(seed)
  shapes = (C, F), (3, F, G), (3, F, K)
  return tuple(rng.normal(size=(*lead, *s)).astype(np.float32) for s in shapes)


def close(actual, expected):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-4), actual, expected
  )


def scalar(fn):
  return lambda *args: sum(jnp.sum(jnp.tanh(y)) for y in fn(*args))


def grad(fn):
  return jax.grad(scalar(fn), (0, 1, 2))


def forward(fn):
  return lambda *args: jax.jvp(fn, args, inputs(1))[1]


def linearized(fn):
  return lambda *args: jax.linearize(fn, *args)[1](*inputs(1))


OF_DENSE = jit_quickly(lambda *args: (dense(*args), grad(dense)(*args)))


def of_examples(*args):
  """Returns stacked results and gradients of `dense` for stacked arguments."""
  results = [OF_DENSE(*example) for example in zip(*args, strict=True)]
  return jax.tree.map(lambda *xs: np.stack(xs), *results)


def test_derivatives():
  """Tests all orders, modes and arguments, and a loss of only one output."""

  def derivatives(fn):
    def of_one(i, *args):
      """Differentiates by argument i; other arguments have no tangents."""

      def fn_of_one(x):
        return fn(*args[:i], x, *args[i + 1 :])

      tangent = jax.jvp(fn_of_one, [args[i]], [inputs(1)[i]])[1]
      return jax.grad(scalar(fn_of_one))(args[i]), tangent

    return jit_quickly(
      lambda *args: dict(
        linearized=linearized(fn)(*args),
        reverse_over_reverse=grad(grad(fn))(*args),
        forward_over_forward=forward(forward(fn))(*args),
        three_times=grad(forward(grad(fn)))(*args),
        of_one_argument=[of_one(i, *args) for i in range(3)],
        of_one_output=grad(lambda *a: fn(*a)[1:])(*args),
      )
    )

  close(derivatives(gated)(*inputs()), derivatives(dense)(*inputs()))


@pytest.mark.parametrize("batched", [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_vmap(batched):
  """Batches any operand, inside and outside of a gradient."""
  rows, matrices, sizes = batched
  is_batched = rows, matrices, matrices, sizes
  x, w, v = inputs(lead=(2,))
  stacked = x, w, v, np.stack([SIZES, np.int32([0, 4, 4])])
  args = [a if b else a[0] for a, b in zip(stacked, is_batched, strict=True)]
  axes = [0 if b else None for b in is_batched]

  @jit_quickly
  def of_all(*args):
    inner = jax.vmap(lambda *a: (gated(*a), grad(gated)(*a)), axes)(*args)
    return inner, grad(lambda *a: jax.vmap(gated, axes)(*a))(*args)

  inner, outer = of_all(*args)
  expected = of_examples(
    *(
      a if b else np.stack([a, a])
      for a, b in zip(args, is_batched, strict=True)
    )
  )
  close(inner, expected)
  for got, of_each, b in zip(outer, expected[1], is_batched[:3], strict=True):
    close(got, of_each if b else of_each.sum(0))


def test_eager_calls_compile_once():
  args = inputs()
  compiled = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: compiled.append(event)
  )

  def step():
    return gm.grouped_matmul(*args[:2], SIZES), grad(gated)(*args)

  step()
  before = sum("backend_compile" in e for e in compiled)
  step()
  assert before and sum("backend_compile" in e for e in compiled) == before


def test_arrays_that_xla_divides():
  """XLA partitions the op, and would reject an op with a side effect."""
  mesh = make_mesh({"ranks": 2})
  sharding = jax.NamedSharding(mesh, PartitionSpec("ranks"))
  stacked = inputs(lead=(2,))
  shards = [jax.device_put(x, sharding) for x in stacked]
  got = jit_quickly(jax.vmap(grad(gated)))(*shards)
  close(got, of_examples(*stacked)[1])
