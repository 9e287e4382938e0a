# SPDX-License-Identifier: Apache-2.0
"""Tests MaxText with ep's exchange and matmul against MaxText's dense path.

CI does not run this test, because it needs a checkout of MaxText and packages
that MaxText imports; see docs/howto/replace.md. The test changes a
copy of the checkout, and replaces packages that the layers do not use.
"""

import importlib.machinery
import inspect
import os
import pathlib
import shutil
import subprocess
import sys
import types

from flax import nnx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from recipes import maxtext_moe as recipe

if "MAXTEXT" not in os.environ:
  pytest.skip("MAXTEXT is not set", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

E, K, H, F, S = 8, 2, 32, 16, 6
_MODELS = {
  "mixtral": dict(model_name="mixtral-8x7b"),
  "qwen3": dict(model_name="qwen3-30b-a3b"),
  "deepseek2": dict(model_name="deepseek2-16b"),
  "deepseek3": dict(
    model_name="deepseek3-671b",
    n_routing_groups=4,
    topk_routing_group=2,
    routed_bias_update_rate=0.001,
  ),
  "gpt_oss": dict(model_name="gpt-oss-20b"),
  "llama4": dict(model_name="llama4-17b-16e", num_experts_per_tok=1),
  "gemma4": dict(model_name="gemma4-26b"),
}
_MESHES = {
  "ep": dict(ici_expert_parallelism=4),
  "ep_tensor": dict(ici_expert_parallelism=2, ici_tensor_parallelism=2),
  "ep_fsdp": dict(ici_expert_parallelism=2, ici_fsdp_parallelism=2),
}
_DENSE = dict(sparse_matmul=False)
_EP = dict(jax_ep_backend=os.environ.get("EP_TEST_BACKEND", "host"))
# Packages that modules of MaxText import, but its layers do not use.
_UNUSED = {
  "PIL",
  "drjax",
  "google_cloud_mldiagnostics",
  "ml_goodput_measurement",
  "sentencepiece",
  "sympy",
  "tensorflow",
  "tiktoken",
}


class _Name(type):
  """A class with any attribute, which is a class with any attribute."""

  def __getattr__(cls, name):
    if name.startswith("__"):
      raise AttributeError(name)
    return _Name(name, (), {})


class _Stub(types.ModuleType):
  __path__ = ()
  __getattr__ = _Name.__getattr__


class _StubFinder:
  """Imports an empty module for each package in `_UNUSED`."""

  @staticmethod
  def find_spec(name, path=None, target=None):
    if name.partition(".")[0] in _UNUSED:
      return importlib.machinery.ModuleSpec(name, _StubFinder, is_package=True)

  @staticmethod
  def create_module(spec):
    return _Stub(spec.name)

  @staticmethod
  def exec_module(module):
    pass


@pytest.fixture(scope="module")
def maxtext(tmp_path_factory):
  """Returns a changed copy of MaxText's package."""
  folder = tmp_path_factory.mktemp("maxtext")
  checkout = pathlib.Path(os.environ["MAXTEXT"])
  shutil.copytree(checkout / "src", folder / "src")
  subprocess.run(
    ["git", "apply"],
    cwd=folder,
    input=recipe.diff(checkout),
    text=True,
    check=True,
  )
  sys.path.insert(0, str(folder / "src"))
  sys.meta_path.append(_StubFinder)
  from maxtext.configs import pyconfig
  from maxtext.layers import initializers, moe
  from maxtext.models import models
  from maxtext.utils import maxtext_utils

  return types.SimpleNamespace(
    base=folder / "src/maxtext/configs/base.yml",
    initializers=initializers,
    models=models,
    moe=moe,
    pyconfig=pyconfig,
    utils=maxtext_utils,
  )


def _config(maxtext, **fields):
  """Returns the configuration of a tiny model."""
  return maxtext.pyconfig.initialize(
    [None, str(maxtext.base)],
    **dict(
      run_name="ep",
      enable_checkpointing=False,
      override_model_config=True,
      base_emb_dim=H,
      base_mlp_dim=F,
      base_moe_mlp_dim=F,
      num_experts=E,
      num_experts_per_tok=K,
      dtype="float32",
      weight_dtype="float32",
      matmul_precision="highest",
      megablox=False,
      attention="dot_product",
      load_balance_loss_weight=0.01,
    )
    | fields,
  )


def _mesh(maxtext, config):
  """Returns the mesh of a configuration; one device for the dense path."""
  if config.sparse_matmul:
    devices = maxtext.utils.create_device_mesh(config)
  else:
    devices = np.array(jax.devices()[:1]).reshape((1,) * len(config.mesh_axes))
  return jax.sharding.Mesh(devices, config.mesh_axes)


def _run(maxtext, x, **fields):
  """Returns (y, lb_loss, bias_updates), and gradients of the layer and of x."""
  config = _config(maxtext, **fields)
  mesh = _mesh(maxtext, config)
  layer = maxtext.moe.RoutedMoE(
    config=config,
    num_experts=config.num_experts,
    num_experts_per_tok=config.num_experts_per_tok,
    mesh=mesh,
    kernel_init=maxtext.initializers.nd_dense_init(1.0, "fan_in", "normal"),
    kernel_axes=("embed_moe", None),
    intermediate_dim=F,
    dtype=config.dtype,
    weight_dtype=config.weight_dtype,
    rngs=nnx.Rngs(0),
  )
  rng = np.random.default_rng(0)
  params = nnx.state(layer, nnx.Param)  # biases are zero until here
  params = jax.tree.map(
    lambda p: jnp.asarray(rng.standard_normal(p.shape, np.float32) / 3), params
  )
  nnx.update(layer, params)

  def loss(layer, x):
    results = layer(x)
    return jnp.sum(jnp.sin(results[0])), results

  with mesh, nn.logical_axis_rules(config.logical_axis_rules):
    program = nnx.jit(nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, results), grads = program(layer, x)
  return jax.block_until_ready((results, grads))


def _x(batch, length=S):
  rng = np.random.default_rng(1)
  return jnp.asarray(rng.standard_normal((batch, length, H), np.float32))


def _check(got, want):
  """Fails unless outputs and gradients are equal and have the same names."""
  got, want = ((r[0][0], r[1]) for r in (got, want))
  jax.tree.map_with_path(_check_array, got, want)


def _check_array(path, got, want):
  bound = 2e-5 * max(1e-3, np.abs(want).max())
  name = jax.tree_util.keystr(path)
  np.testing.assert_allclose(got, want, rtol=0, atol=bound, err_msg=name)


@pytest.mark.parametrize("mesh", _MESHES)
@pytest.mark.parametrize("model", _MODELS)
def test_a_split_batch(maxtext, model, mesh):
  """Also compares the loss and the bias updates.

  MaxText computes the loss on each shard and returns the loss of the first.
  Bias updates are of the whole batch from 0.2.5 on; before, of the first shard.
  """
  fields = _MODELS[model] | _MESHES[mesh]
  x = _x(8)
  got = _run(maxtext, x, **fields, **_EP)
  whole = _run(maxtext, x, **fields, **_DENSE)
  _check(got, whole)
  shards = 2 if mesh == "ep_tensor" else 4
  (_, *want), _ = _run(maxtext, x[: 8 // shards], **fields, **_DENSE)
  permute = inspect.signature(maxtext.moe.RoutedMoE.permute)
  if "mesh_axis_names" in permute.parameters:
    want[1] = whole[0][2]
  for a, b in zip(got[0][1:], want, strict=True):
    assert (a is None) == (b is None)
    if b is not None:
      np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("mesh", _MESHES)
def test_a_replicated_batch(maxtext, mesh, length):
  """MaxText replicates a batch of one sequence, as in decoding.

  The rows of `permute`, 2 or 10, cannot be split equally over 4 shards.
  """
  fields = _MODELS["gpt_oss"] | _MESHES[mesh]
  x = _x(1, length)
  _check(*(_run(maxtext, x, **fields, **path) for path in (_EP, _DENSE)))


def test_a_model_with_scanned_layers(maxtext):
  """One program runs the layers by `scan`, and all programs share a group."""
  maxtext.moe._ep_group.cache_clear()
  fields = _MODELS["deepseek3"] | dict(
    base_num_decoder_layers=3,
    first_num_dense_layers=1,
    base_num_query_heads=2,
    base_num_kv_heads=2,
    head_dim=16,
    vocab_size=64,
    max_target_length=S,
  )

  def program(path):
    config = _config(maxtext, **fields, **_MESHES["ep"], **path)
    mesh = _mesh(maxtext, config)
    model = maxtext.models.transformer_as_linen(
      config=config, mesh=mesh, quant=None, model_mode="train"
    )

    def loss(variables, ids):
      positions = jnp.broadcast_to(jnp.arange(S), ids.shape)
      logits = model.apply(
        variables, ids, positions, jnp.ones_like(ids), enable_dropout=False
      )
      return jnp.sum(jnp.sin(logits)), logits

    def run(variables, ids):
      with mesh, nn.logical_axis_rules(config.logical_axis_rules):
        return jax.jit(jax.grad(loss, has_aux=True))(variables, ids)

    return model, run

  dense, want_of = program(_DENSE)
  _, got_of = program(_EP)
  ids = np.random.default_rng(3).integers(0, 64, (8, S))
  positions = np.broadcast_to(np.arange(S), ids.shape)
  variables = dense.init(
    {"params": jax.random.key(0)},
    ids,
    positions,
    np.ones_like(ids),
    enable_dropout=False,
  )
  for batch in 8, 4, 1:
    got, want = (f(variables, ids[:batch]) for f in (got_of, want_of))
    jax.tree.map_with_path(_check_array, got, want)
  assert maxtext.moe._ep_group.cache_info().misses == 1
