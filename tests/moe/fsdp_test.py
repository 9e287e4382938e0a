# SPDX-License-Identifier: Apache-2.0
"""Gradients of parameters that `fsdp_axis` splits between processes.

The transpose of `lax.all_gather` is a reduce-scatter. In XLA:CPU, the
reduce-scatter of Gloo corrupts large chunks on a busy machine (jax #40830). Run
the last test three times simultaneously to see it fail with `lax.all_gather`:

    ./bazelw test //tests/moe:fsdp_test --test_arg=--fsdp_steps=45 \
        --runs_per_test=3 --jobs=6 --local_resources=cpu=12
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import pytest

from conftest import make_mesh, TIMEOUT_S
import ep
from groups import BACKEND
from layer_steps import draw_params, put

MESH = {"dp": 2, "ep": 2}
T = 64  # tokens per rank


def make(config, **options):
  mesh = make_mesh(MESH)
  return ep.MoE(
    config,
    mesh,
    max_tokens_per_rank=T,
    backend=BACKEND,
    timeout_s=TIMEOUT_S,
    **options,
  )


def inputs(layer, hidden):
  rng = np.random.default_rng(0)
  params = draw_params(
    layer.config, lambda shape: rng.normal(size=shape) / np.sqrt(shape[-2])
  )
  rows = T * layer.group.num_token_ranks
  return put(layer, params, np.float32(rng.normal(size=(rows, hidden))))


def gradient(layer, check_vma=None):
  """Returns the jitted gradient of the parameters; local unless None."""

  def grad(params, x):
    return jax.grad(lambda p: jnp.sum(layer(p, x)[0] ** 2))(params)

  if check_vma is not None:
    specs, tokens = layer.specs(), PartitionSpec(layer.group.token_axes)
    grad = jax.shard_map(
      grad,
      mesh=layer.group.mesh,
      in_specs=(specs, tokens),
      out_specs=specs,
      check_vma=check_vma,
    )
  return jax.jit(grad)


@pytest.mark.skipif(
  jax.process_count() == 1, reason="reduce-scatters inside a process are right"
)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
  "check_vma, data_axes",
  [(None, ("dp",)), (True, ()), (False, ("dp",))],
  ids=str,
)
def test_no_gradient_is_scattered(check_vma, data_axes, deterministic):
  config = ep.MoEConfig(16, 8, 4, 2, fsdp_axis="dp")
  config = dataclasses.replace(config, deterministic=deterministic)
  layer = make(config, data_axes=data_axes)
  program = gradient(layer, check_vma).lower(*inputs(layer, 16)).compile()
  text = program.as_text()
  assert "all-to-all" in text or "all-gather" in text
  assert "reduce-scatter" not in text


def test_gradients_are_right_under_load(request):
  """They equal the gradients of parameters that are not split."""
  H = 512
  whole = ep.MoEConfig(H, 4096, 4, 2)
  layer = make(whole)
  expected = gradient(layer)(*inputs(layer, H))

  layer = make(dataclasses.replace(whole, fsdp_axis="dp"))
  specs = jax.tree.map(
    lambda spec: NamedSharding(layer.group.mesh, spec), layer.specs()
  )
  expected = jax.jit(lambda x: x, out_shardings=specs)(expected)
  step, args = gradient(layer), inputs(layer, H)
  wrong = []
  for number in range(request.config.option.fsdp_steps):
    for name, grad in step(*args).items():
      for got, right in zip(
        grad.addressable_shards, expected[name].addressable_shards, strict=True
      ):
        difference = np.abs(np.asarray(got.data) - np.asarray(right.data))
        if difference.max() > 1e-4 * np.abs(np.asarray(right.data)).max():
          wrong.append((number, name, got.device, difference.max()))
  assert not wrong
