# SPDX-License-Identifier: Apache-2.0
"""moe_layer takes a batch that does not divide over the ranks, if asked."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
import numpy as np
import pytest

from cases import jit_quickly
from conftest import assert_shards_close, to_global
import ep
from groups import E, H, K, layer, ranks, spec, T

F = 6  # inner size of an expert


def arrays(lead):
  """Returns tokens, choices, weights and matrices, the same everywhere."""
  rng = np.random.default_rng(0)
  idx = rng.permuted(np.tile(np.arange(E), (*lead, 1)), axis=-1)[..., :K]
  tokens = rng.normal(size=(*lead, H)).astype(np.float32)
  weights = rng.uniform(size=(*lead, K)).astype(np.float32)
  up = rng.normal(size=(E, H, F)).astype(np.float32)
  down = rng.normal(size=(E, F, H)).astype(np.float32)
  return idx.astype(np.int32), tokens, weights, up, down


def padded(config):
  def call(idx, tokens, weights, up, down):
    return ep.moe_layer(
      config, tokens, idx, weights, w_up=up, w_down=down, pad=True
    )

  return call


def dense(idx, tokens, weights, up, down):
  hidden = jax.nn.silu(jnp.einsum("...h,ehf->...ef", tokens, up))
  out = jnp.einsum("...ef,efh->...eh", hidden, down)
  chosen = jax.nn.one_hot(idx, E)
  return jnp.einsum("...k,...ke,...eh->...h", weights, chosen, out)


def with_grads(fn):
  def call(idx, *args):
    out, vjp = jax.vjp(functools.partial(fn, idx), *args)
    return out, vjp(out)

  return call


dense_with_grads = jit_quickly(with_grads(dense))


def check(config, lead, run=jax.jit):
  """Compares the layer and its gradients with a dense layer."""
  inputs = arrays(lead)
  mesh = config.group.mesh
  split = PartitionSpec(config.group.axis_name)
  specs = [PartitionSpec()] * 3 + [split] * 2
  placed = [to_global(x, mesh, s) for x, s in zip(inputs, specs, strict=True)]
  got = run(with_grads(padded(config)))(*placed)
  want = dense_with_grads(*inputs)
  for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
    assert_shards_close(a, np.asarray(b), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
  "lead, axis_type", [((1,), AxisType.Auto), ((2, 3), AxisType.Explicit)]
)
def test_any_batch(lead, axis_type):
  """Also one of fewer tokens than ranks, and of any leading axes."""
  check(layer("dp2_ep2", axis_type), lead)


def test_outside_of_jit():
  check(layer(), (6,), run=lambda fn: fn)


def test_examples_of_vmap():
  """They are one batch, whose first axis is that of the examples."""
  config = layer()
  idx, tokens, weights, up, down = arrays((2, 5))
  batched = jax.vmap(padded(config), in_axes=(0, 0, 0, None, None))
  got = jax.jit(batched)(idx, tokens, weights, up, down)
  want = np.asarray(jit_quickly(dense)(idx, tokens, weights, up, down))
  assert_shards_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_local", [False, True])
def test_what_needs_no_padding_stays_as_it_is(is_local):
  """A batch that divides, or a rank's, has the program of no such option."""
  config = layer()

  def without(idx, tokens, weights, up, down):
    return ep.moe_layer(config, tokens, idx, weights, w_up=up, w_down=down)

  fns = padded(config), without
  if is_local:
    sharded, experts = spec(config), PartitionSpec("ep")
    specs = dict(in_specs=(sharded,) * 3 + (experts,) * 2, out_specs=sharded)
    fns = [jax.shard_map(f, mesh=config.group.mesh, **specs) for f in fns]
  programs = [jax.make_jaxpr(f)(*arrays((12,))) for f in fns]
  assert str(programs[0]) == str(programs[1])


def test_the_handle_is_of_the_padded_tokens():
  config = layer()
  idx, tokens, weights, up, down = arrays((6,))
  out, handle = jax.eval_shape(
    lambda: ep.moe_layer(
      config,
      tokens,
      idx,
      weights,
      w_up=up,
      w_down=down,
      pad=True,
      return_handle=True,
    )
  )
  assert out.shape == (6, H)
  assert handle.token_shape == (2,)
  assert handle.kept.shape == (ranks(config) * 2, idx.shape[-1])


def test_more_tokens_than_a_rank_may_have():
  config = layer()
  lead = (ranks(config) * T + 1,)
  with pytest.raises(ValueError, match="max_tokens_per_rank"):
    jax.eval_shape(padded(config), *arrays(lead))
