# SPDX-License-Identifier: Apache-2.0
"""Ops and layers, and their gradients, hold in the strict modes of JAX.

A program is traced with `jax_numpy_dtype_promotion=strict` twice: with
`jax_check_tracer_leaks`, and with `jax_enable_x64`, where an array of a default
dtype has 64 bits and cannot be added to one of a documented dtype. Each time,
results have the dtypes that they have without.

Gradients are taken inside of `jax.shard_map`. JAX 0.10.2 reports a leak in each
gradient of a `shard_map` with a psum.
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

HIDDEN, INNER = 128, 4
SHORT = dict(capacity_factor=1.0, overflow="drop")
PLACEMENT = ep.Placement(np.arange(E)[::-1])


def draw(shape, dtype=jnp.bfloat16):
  return np.random.default_rng(0).normal(size=shape).astype(dtype)


def ids(*shape):
  return np.arange(np.prod(shape)).astype(np.int32).reshape(shape) % E


# Options of `MoEConfig`, and arguments of a call on a rank.
LAYERS = {
  "router": (
    dict(biases=True, router_bias=True, weigh="early", jitter=0.1),
    dict(key=jax.random.key(0)),
  ),
  "shared": (
    dict(shared_inner=INNER, score="sigmoid", num_groups=4, top_groups=2),
    dict(state=ep.moe.State(np.zeros(E, np.float32)), mask=np.arange(T) > 1),
  ),
  "forced": (
    dict(capacity_factor=2.0, overflow="error"),
    dict(forced_idx=ids(T, K), placement=PLACEMENT),
  ),
  "fsdp": (dict(fsdp_axis="dp"), {}),
  "tp": (dict(tp_axis="dp", biases=True), {}),
  "fair": (SHORT, {}),
  "weight": (dict(drop_by="weight", **SHORT), {}),
  "moves": (dict(num_candidates=5, **SHORT), {}),
  "chunk": (SHORT | dict(overflow="chunk"), {}),
  "token_chunks": (dict(token_chunks=2), {}),
  "copies": (dict(replica_slots=1), dict(placement=PLACEMENT)),
  "mxfp8": (dict(wire="mxfp8"), {}),
  "fp8": (dict(wire="fp8_block128"), {}),
  "deterministic": (dict(deterministic=True), {}),
}

# Options of `EpLayerConfig`.
OPS = {
  "plain": {},
  "slot": dict(drop_by="slot", **SHORT),
  "moved": dict(num_candidates=5, **SHORT),
  "wire": dict(wire="mxfp8"),
}


def of_layer(options, call, backend):
  config = ep.MoEConfig(HIDDEN, INNER, E, K, **options)
  sizes = dict(hidden_dim=HIDDEN, num_experts=E + 2 * config.replica_slots)
  if config.tp_axis:
    sizes |= dict(data_axes=())
  layer = ep.MoE(config, group("dp2_ep2", alignment=4, **sizes, **backend))
  dtype = jnp.float32 if config.deterministic else jnp.bfloat16

  def step(params, x):
    def loss(params, x):
      y, metrics = layer(params, x, **call)
      losses = metrics.aux_loss + metrics.z_loss + metrics.entropy
      return losses + y.astype(jnp.float32).sum(), (y, metrics)

    grads, (y, metrics) = jax.grad(loss, (0, 1), has_aux=True)(params, x)
    metrics = metrics, metrics.dropped, layer.init_state().after(metrics.load)
    return grads, y, metrics

  tokens = PartitionSpec(layer.group.token_axes)
  in_specs = layer.specs(), tokens
  step = jax.shard_map(step, mesh=layer.group.mesh, in_specs=in_specs, out_specs=(in_specs, tokens, PartitionSpec()))
  x = draw((layer.group.num_token_ranks * T, HIDDEN))
  return step, (layer.init(jax.random.key(0), dtype), x)


def of_ops(options, backend):
  where = group("dp2_ep2", alignment=4, hidden_dim=HIDDEN, **backend)
  config = ep.EpLayerConfig(where, **options)

  def step(ids, weights, tokens, rows, row_weights):
    ids = ids.astype(int)  # 64 bits where JAX has them
    handle = ep.ep_prepare(config, ids, weights)
    arrays = tokens, weights[:, :K], rows, row_weights
    return handle.leaves, everything(Ops(handle), *arrays)

  M = config.num_candidates or K
  C = config.capacity_for(T)
  R = 4
  axes = PartitionSpec(where.token_axes)
  step = jax.shard_map(step, mesh=where.mesh, in_specs=axes, out_specs=axes)
  return step, (
    ids(R * T, M),
    draw((R * T, M), np.float32),
    draw((R * T, HIDDEN)),
    draw((R * C, HIDDEN)),
    draw(R * C, np.float32),
  )

CASES = {name: functools.partial(of_layer, *x) for name, x in LAYERS.items()}
CASES |= {name: functools.partial(of_ops, x) for name, x in OPS.items()}

def types(tree):
  return jax.tree.map(lambda x: (x.shape, x.dtype), tree)

@functools.cache
def program(name, backend=None):
  step, args = CASES[name](dict(backend=backend) if backend else {})
  return step, args, types(jax.eval_shape(step, *args))


@contextlib.contextmanager
def modes(*contexts):
  with contextlib.ExitStack() as stack:
    stack.enter_context(jax.numpy_dtype_promotion("strict"))
    for context in contexts:
      stack.enter_context(context)
    yield

@pytest.mark.parametrize("name", CASES)
def test_traced(name):
  step, args, want = program(name)
  with modes(jax.checking_leaks()):
    traced = jax.jit(step).trace(*args)
    assert types(traced.out_info) == want
    traced.lower()

@pytest.mark.parametrize("name", CASES)
def test_run(name):
  step, args, want = program(name)
  with modes(jax.enable_x64(True), jax.debug_nans(True)):
    assert types(jax.jit(step)(*args)) == want

@pytest.mark.parametrize("name", OPS)
def test_xla(name):
  step, args, want = program(name, "xla")
  with modes(jax.enable_x64(True)):
    traced = jax.jit(step).trace(*args)
    assert types(traced.out_info) == want
    traced.lower(lowering_platforms=("cpu", "tpu", "cuda"))
