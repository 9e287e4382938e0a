# SPDX-License-Identifier: Apache-2.0
"""Ops, and their gradients, run in the strict modes of JAX.

The modes are `jax_numpy_dtype_promotion=strict`, `jax_numpy_rank_promotion=
raise`, `jax_enable_x64`, `jax_debug_nans` and `jax_check_tracer_leaks`. No mode
changes the dtypes of results. Strict promotion with x64 finds arrays of default
dtypes: these arrays have 64 bits, and JAX refuses to add them to narrower
arrays. The column `test_strict_modes` of tests/moe/layer_test.py has layers.

A program is a function of one rank's arrays: JAX 0.10.2 itself leaks a tracer
in the gradient of a `shard_map` with a psum.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import pytest

import ep
from groups import E, group, K, of_one_process, T
from op_functions import everything, Ops

pytestmark = of_one_process

HIDDEN, INNER, R, L = 128, 4, 4, E // 2
TOKENS = PartitionSpec(("dp", "ep"))
SHORT = dict(capacity_factor=1.0, overflow="drop")
PLACEMENT = ep.Placement(np.arange(E)[::-1])


def floats(*shape, dtype=jnp.bfloat16):
  return np.random.default_rng(0).normal(size=shape).astype(dtype)


def ids(*shape):
  return np.arange(np.prod(shape), dtype=np.int32).reshape(shape) % E


# Options of `EpLayerConfig`.
OPS = {
  "error": dict(tail="unspecified"),
  "fair": SHORT,
  "mxfp8": dict(wire="mxfp8"),
}


def bound(backend=None, **sizes):
  chosen = {} if backend is None else dict(backend=backend)
  return group("dp2_ep2", alignment=4, hidden_dim=HIDDEN, **sizes, **chosen)


def on_ranks(step, in_specs, out_specs, *args):
  mesh = bound().mesh
  step = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
  return step, args


def of_ops(options, backend=None):
  layer = ep.EpLayerConfig(bound(backend), **options)
  C = layer.capacity_for(T)

  def step(ids, weights, *arrays):
    handle = ep.ep_prepare(layer, ids.astype(int), weights)
    tokens, *rows = arrays
    out = everything(Ops(handle), tokens, weights, *rows)
    return jax.tree.leaves(handle), out

  return on_ranks(
    step,
    TOKENS,
    TOKENS,
    ids(R * T, K),
    floats(R * T, K, dtype=np.float32),
    floats(R * T, HIDDEN),
    floats(R * C, HIDDEN),
    floats(R * C, dtype=np.float32),
  )


def of_function(fn, *arrays, backend=None):
  """Returns a program of `fn(group, *arrays)` and its gradients."""
  is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in arrays]

  def step(*arrays):
    def loss(*arrays):
      outs = jax.tree.map(jnp.atleast_1d, fn(bound(backend), *arrays))
      terms = [x.astype(jnp.float32).sum() for x in jax.tree.leaves(outs)]
      return sum(terms), outs

    return jax.grad(loss, np.flatnonzero(is_float), has_aux=True)(*arrays)

  return on_ranks(step, TOKENS, TOKENS, *arrays)


def exchanges(group, rows, offsets):
  ones = jnp.ones_like(offsets)
  return (
    ep.lax.ragged_all_to_all(
      rows, rows, offsets, ones, offsets, ones, axis_name="ep"
    ),
    ep.moe.move(group, rows, PartitionSpec("ep"), old=None, new=PLACEMENT),
    ep.ordered_psum(rows, group.token_axes) * rows,
  )


def experts(group, tokens, ids, weights, up, down):
  layer = ep.EpLayerConfig(group)
  matrices = dict(w_gate=up, w_up=up, w_down=down)
  out, handle = ep.moe_layer(
    layer, tokens, ids, weights, **matrices, return_handle=True
  )
  rows, scales = ep.quant.quantize(tokens, "fp8_block128")
  rows, *received = ep.ep_dispatch(handle, rows, weights, scales=scales)
  rows = ep.quant.dequantize(rows, received[1], tokens.dtype)
  return out, received, ep.grouped_matmul(rows, up, handle.group_sizes)


FUNCTIONS = {
  "exchanges": (exchanges, floats(R * L, HIDDEN), ids(R * 2) % 2),
  "experts": (
    experts,
    floats(R * T, HIDDEN),
    ids(R * T, K),
    floats(R * T, K),
    floats(R * L, HIDDEN, INNER),
    floats(R * L, INNER, HIDDEN),
  ),
}

PROGRAMS = {
  **{f"ops {n}": functools.partial(of_ops, x) for n, x in OPS.items()},
  **{n: functools.partial(of_function, *x) for n, x in FUNCTIONS.items()},
}


@contextlib.contextmanager
def strict(mode):
  promotion = jax.numpy_dtype_promotion("strict")
  with promotion, jax.numpy_rank_promotion("raise"), mode:
    yield


def types(tree):
  return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def traced(step, args):
  traced = jax.jit(step).trace(*args)
  return traced, types(traced.out_info)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
  step, args = PROGRAMS[name]()
  with strict(jax.checking_leaks()):
    lowered, expected = traced(step, args)
    lowered.lower()
  # Checked mode writes NaN into unused rows, except under `jax_debug_nans`.
  with strict(jax.enable_x64(True)), jax.debug_nans(True), ep.checked():
    assert types(jax.jit(step)(*args)) == expected


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_for_other_platforms(name):
  step, args = PROGRAMS[name](backend="xla")
  _, expected = traced(step, args)
  with strict(jax.enable_x64(True)), ep.checked():
    lowered, actual = traced(step, args)
    assert actual == expected
    lowered.lower(lowering_platforms=("cpu", "cuda", "tpu"))
