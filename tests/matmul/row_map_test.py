# SPDX-License-Identifier: Apache-2.0
"""`map_used_rows` has the values and derivatives of the mapped function.

The tail of each input is NaN, and must not reach other values.
"""

import re

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import jit_quickly
import ep
from ep._src.matmul import grouped_matmul as gm
from ep._src.native import ffi
from ep._src.ops import row_map
from ep._src.ops.row_map import map_used_rows

C, USED, F = 600, 300, 4  # USED is two whole blocks and a partial block.


def act(gates, values, weights):
  return jax.nn.silu(gates) * values * weights[:, None], jnp.tanh(gates)


def inputs(lead=()):
  rng = np.random.default_rng(0)
  shapes = (C, F), (C, F), (C,)
  arrays = [rng.normal(size=(*lead, *s)).astype("f") for s in shapes]
  for x in arrays:
    x[(slice(None),) * len(lead) + (slice(USED, None),)] = np.nan
  return tuple(map(jnp.asarray, arrays))


def mapped(*args):
  return map_used_rows(act, jnp.int32([USED]), *args)


def used(tree):
  return jax.tree.map(
    lambda x: x[..., :USED, :] if x.ndim > 1 else x[:USED], tree
  )


def close(actual, expected):
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-5),
    used(actual),
    used(expected),
  )


def grad(fn):
  def loss(*args):
    return sum(jnp.sum(jnp.sin(y)) for y in used(fn(*args)))

  return jax.grad(loss, (0, 1, 2))


def forward(fn):
  return lambda *args: jax.jvp(fn, args, args)[1]


def every_derivative(fn, *args):
  return [
    fn(*args),
    jax.checkpoint(grad(fn))(*args),
    grad(grad(fn))(*args),
    forward(grad(fn))(*args),
    grad(forward(fn))(*args),
    forward(forward(fn))(*args),
  ]


def test_derivatives_beside_unused_nans():
  @jit_quickly
  def of_mapped(*args):
    return every_derivative(mapped, *args)

  @jit_quickly
  def of_all(*args):
    return every_derivative(act, *args)

  close(of_mapped(*inputs()), of_all(*inputs()))


@pytest.mark.parametrize("tail", ["zero", "nan"])
def test_the_tail_is_what_was_asked_for(tail):
  def call(*args):
    asked = "zero" if tail == "zero" else "unspecified"
    return map_used_rows(act, jnp.int32([USED]), *args, tail=asked)

  with ep.checked(tail == "nan"):
    outs = jit_quickly(lambda *args: call(*args))(*inputs())
  value = 0 if tail == "zero" else np.nan
  for out in outs:
    np.testing.assert_array_equal(out[USED:], np.full((C - USED, F), value))


def test_nothing_touches_whole_arrays():
  """XLA:CPU neither converts nor copies whole bfloat16 arrays.

  XLA:CPU converts bfloat16 arrays that a loop slices, or copies their buffers,
  for all rows instead of the used rows. The gradients of matrices have the
  dtype of the matrices.
  """
  sizes = jnp.int32([100, 200])

  def experts(x, w):
    (y,) = gm.grouped_matmuls(x, [w], sizes)
    return map_used_rows(jnp.sin, sizes, y)

  def step(x, w):
    y, vjp = jax.vjp(experts, x, w)
    return vjp(y)

  args = jnp.zeros((C, F), jnp.bfloat16), jnp.zeros((3, 2, F, F), jnp.bfloat16)
  scanned = jax.jit(lambda x, w: lax.scan(step, x, w))
  program = scanned.lower(*args).compile()
  text = program.as_text()
  assert f"u16[{C},{F}]" in text
  assert f"f32[{C}," not in text
  assert not re.findall(rf"= u16\[{C},{F}\]\S* copy\(.*", text)
  call = 'custom_call_target="ep_grouped_matmul"'
  assert re.search(rf"= \(?bf16\[2,{F},{F}\].* custom-call\(.*{call}", text)


@pytest.mark.parametrize("is_native", [True, False])
def test_work_follows_the_used_rows(is_native):
  ffi.library("host")
  starts = []

  def fn(x):
    jax.debug.callback(lambda _: starts.append(1), x[0, 0])
    return x

  call = jax.jit(
    lambda n, x: row_map._apply_by_blocks(
      n, x, fn=lambda x: [fn(x)], tail="unspecified", is_native=is_native
    )
  )
  for count in (0, 129):
    jax.block_until_ready(call(jnp.int32(count), jnp.ones((2048, 1))))
  jax.effects_barrier()
  assert len(starts) == 2
