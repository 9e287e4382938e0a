# SPDX-License-Identifier: Apache-2.0
"""JAX's transformations work on grouped matmuls.

The function under test multiplies shared rows by two lists of matrices, as a
gated expert does, and its dense counterpart looks up a matrix for each row.
"""

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from cases import jit_quickly
from conftest import make_mesh
from ep._src.matmul import grouped_matmul as gm

C, F, G, K = 11, 4, 6, 5
SIZES = jnp.int32([3, 0, 6])
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
  return tuple(
    jnp.asarray(rng.normal(size=(*lead, *s)), jnp.float32) for s in shapes
  )


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


DERIVATIVES = {
  "linearized": linearized,
  "reverse over reverse": lambda fn: grad(grad(fn)),
  "forward over reverse": lambda fn: forward(grad(fn)),
  "reverse over forward": lambda fn: grad(forward(fn)),
  "forward over forward": lambda fn: forward(forward(fn)),
  "three times": lambda fn: grad(forward(grad(fn))),
}


@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
def test_derivatives(derivative):
  args = inputs()
  close(
    jit_quickly(derivative(gated))(*args), jit_quickly(derivative(dense))(*args)
  )


@pytest.mark.parametrize("argument", range(3))
def test_derivatives_in_one_argument(argument):
  """Symbolic zeros of the other arguments are left out."""

  def both(fn):
    def tangent(*args):
      def of_one(x):
        return fn(*args[:argument], x, *args[argument + 1 :])

      t = inputs(1)[argument]
      return jax.grad(scalar(of_one))(args[argument]), jax.jvp(
        of_one, (args[argument],), (t,)
      )

    return jit_quickly(tangent)

  close(both(gated)(*inputs()), both(dense)(*inputs()))


def test_a_gradient_of_one_output_alone():
  def one(fn):
    return jit_quickly(grad(lambda *args: fn(*args)[1:]))

  close(one(gated)(*inputs()), one(dense)(*inputs()))


@pytest.mark.parametrize(
  "batched", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)]
)
def test_vmap(batched):
  """Any of the operands may be batched, under and over a gradient."""
  rows, matrices, sizes = batched
  B = 2
  x, w, v = inputs(lead=(B,))
  s = jnp.stack([SIZES, jnp.int32([0, 4, 4])])
  args = [
    a if b else a[0]
    for a, b in zip(
      (x, w, v, s), (rows, matrices, matrices, sizes), strict=True
    )
  ]
  axes = [0 if b else None for b in (rows, matrices, matrices, sizes)]

  def both(fn):
    inner = jax.vmap(lambda *a: (fn(*a), grad(fn)(*a)), axes)
    outer = grad(lambda *a: jax.vmap(fn, axes)(*a))
    return jit_quickly(lambda *a: (inner(*a), outer(*a)))

  close(both(gated)(*args), both(dense)(*args))


def test_jacobian():
  close(
    jit_quickly(jax.jacrev(gated, (0, 1)))(*inputs()),
    jit_quickly(jax.jacfwd(dense, (0, 1)))(*inputs()),
  )


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
  """Matrices may be the same on ranks whose rows differ."""
  mesh = make_mesh({"ep": min(2, jax.device_count())})
  x, w, v = inputs()
  x = jnp.concatenate([x] * mesh.size)
  ranks = PartitionSpec("ep")

  def both(fn):
    def loss(x, w, v):
      return lax.psum(scalar(fn)(x, w, v), "ep")

    return jit_quickly(
      jax.grad(
        jax.shard_map(
          loss,
          mesh=mesh,
          in_specs=(ranks, PartitionSpec(), PartitionSpec()),
          out_specs=PartitionSpec(),
          check_vma=check_vma,
        ),
        (0, 1, 2),
      )
    )

  close(both(gated)(x, w, v), both(dense)(x, w, v))


def test_scan_and_checkpoint():
  x, w, v = inputs(lead=(2,))

  def both(fn):
    @jax.checkpoint
    def layer(total, args):
      return total + scalar(fn)(*args), None

    def loss(*args):
      return lax.scan(layer, 0.0, args)[0]

    return jit_quickly(jax.grad(loss, (0, 1, 2)))

  close(both(gated)(x, w, v), both(dense)(x, w, v))


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
  """Outside of `jax.shard_map`, a call with a side effect would be refused."""
  mesh = make_mesh({"ranks": 2})
  sharding = jax.NamedSharding(mesh, PartitionSpec("ranks"))
  stacked = inputs(lead=(2,))
  shards = [jax.device_put(x, sharding) for x in stacked]
  close(
    jit_quickly(jax.vmap(grad(gated)))(*shards),
    jit_quickly(jax.vmap(grad(dense)))(*stacked),
  )
