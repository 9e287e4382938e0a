# SPDX-License-Identifier: Apache-2.0
"""XLA's compiler for GPUs puts the ops of "nccl" on the stream of collectives.

Other work runs beside the ops. The tests read the order in which XLA enqueues
the operations of two layers with gradients on four H100.
"""

import functools
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import pytest

from conftest import make_mesh
import ep
from ep._src.backends import host
from ep._src.base.backend import OPS
from gpu_compiler import compile_for_h100, needs_compiler, NOTHING
from groups import bootstrap
from nccl_testing import HostEngine

pytestmark = needs_compiler

H, T, NUM_LAYERS = 1024, 2048, 2
CONFIG = ep.MoEConfig(H, 512, 16, 4, shared_inner=512)
COLLECTIVES = "kAllReduce", "kAllGather", "kReduceScatter", "kAllToAll"


@functools.cache
def compiled(**options):
  """Returns the thunks of two compiled layers with gradients."""
  mesh = make_mesh({"dp": 2, "ep": 2})
  sizes = dict(num_experts=16, top_k=4, max_tokens_per_rank=T, hidden_dim=H)

  def struct(x, spec):
    sharding = jax.sharding.NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=sharding)

  def loss(layers, x):
    losses = 0
    for params in layers:
      y, metrics = layer(params, x)
      x += y
      losses += metrics.aux_loss
    return jnp.square(x.astype(jnp.float32)).mean() + losses

  allowed = [*map(jax.export.DisabledSafetyCheck.custom_call, OPS)]
  export = jax.export.export(
    jax.jit(jax.value_and_grad(loss)),
    platforms=["cuda"],
    disabled_checks=allowed,
  )
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(host, "NativeConnection", HostEngine)
    with bootstrap(mesh, **sizes) as group:
      layer = ep.MoE(CONFIG, group)
      shapes = jax.eval_shape(lambda: ep.moe.init(jax.random.key(0), CONFIG))
      params = {n: struct(x, layer.specs()[n]) for n, x in shapes.items()}
      tokens = jax.ShapeDtypeStruct((4 * T, H), jnp.bfloat16)
      tokens = struct(tokens, jax.P(group.token_axes))
      exported = export([params] * NUM_LAYERS, tokens)
  with tempfile.TemporaryDirectory() as folder:
    return compile_for_h100(exported, mesh, pathlib.Path(folder), **options)


def ours(thunks):
  return [x for x in thunks if x.name.startswith("ep_")]


def collectives_beside_ops(thunks):
  beside = [x for op in ours(thunks) for x in op.beside]
  return [x for x in beside if x.kind in COLLECTIVES]


def test_work_is_beside_ops():
  """Work is beside each op, but in one of the layers XLA may choose none."""
  thunks = compiled()
  assert len(ours(thunks)) == len(OPS) * NUM_LAYERS
  assert NOTHING not in {x.kind for x in thunks}
  beside = {op: [] for op in OPS}
  for op in ours(thunks):
    beside[op.name.rpartition("_moe")[0]] += op.beside
    # Beside this op, XLA spends most time in a matmul of the shared expert.
    if op.name.startswith("ep_combine_moe"):
      assert any("gemm" in x.name for x in op.beside), op
  assert all(beside.values()), beside


def test_no_collective_is_beside_an_op():
  """XLA runs a collective on the stream of ep's ops, or waits for the ops."""
  thunks = compiled()
  (stream,) = {x.stream for x in ours(thunks)}
  assert stream
  of_xla = {x.stream for x in thunks if x.kind in COLLECTIVES}
  assert stream in of_xla and of_xla <= {stream, ""}
  assert not collectives_beside_ops(thunks)


@pytest.mark.skipif(
  jax.__version_info__ < (0, 12), reason="XLA keeps them on one stream"
)
def test_the_flag_that_nccl_refuses_puts_collectives_beside_ops():
  flag = "xla_gpu_experimental_parallel_collective_overlap_limit"
  assert collectives_beside_ops(compiled(**{flag: 2}))
