# SPDX-License-Identifier: Apache-2.0
"""Tests the layers of benchmarks/peers.py against a dense layer."""

import functools

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
from jax.sharding import AxisType
import numpy as np
import pytest

from benchmarks import peers
from benchmarks.workload import AXIS, SPEC
import ep

P, L, T, K, H, F = 4, 4, 24, 3, 128, 256
E = P * L


def _inputs(dtype=np.float32):
  rng = np.random.default_rng(0)
  logits = rng.normal(size=(P * T, E)) - np.log(np.arange(E) + 1)
  topk_idx = np.argsort(-logits, axis=1)[:, :K].astype(np.int32)
  shapes = (P * T, H), (P * T, K), (E, H, F), (E, H, F), (E, F, H)
  tokens, weights, *matrices = (rng.normal(size=s) for s in shapes)
  matrices = [np.float32(w) / 8 for w in matrices]
  return topk_idx, (tokens.astype(dtype), np.float32(weights), *matrices)


def _outputs(run, topk_idx, args):
  """Returns the output of `run`, and its gradients, for one cotangent."""
  out, vjp = jax.vjp(lambda *args: run(topk_idx, *args), *args)
  return out, *vjp(jnp.sin(out))


def _dense(kept):
  def run(topk_idx, tokens, weights, w_gate, w_up, w_down):
    def of_expert(gate, up, down):
      return (jax.nn.silu(tokens @ gate) * (tokens @ up)) @ down

    outs = jax.vmap(of_expert)(w_gate, w_up, w_down)  # [E, P * T, H]
    is_chosen = topk_idx[..., None] == jnp.arange(E)
    weights = jnp.where(is_chosen & kept[..., None], weights[..., None], 0)
    return jnp.einsum("te,eth->th", weights.sum(1), outs)

  return run


def _kept(topk_idx, capacity, order):
  """Returns which choices fit, if each rank takes them in an order.

  `order` is a function of source rank and expert.
  """
  kept = np.zeros(topk_idx.size, bool)
  source = np.arange(topk_idx.size) // (T * K)
  expert = topk_idx.ravel()
  for group in range(E // capacity[1]):
    here = np.flatnonzero(expert // capacity[1] == group)
    here = here[np.lexsort(order(source[here], expert[here]))]
    kept[here[: capacity[0]]] = True
  return kept.reshape(topk_idx.shape)


CASES = {
  "ragged": (peers.Ragged, None, lambda idx: np.ones(idx.shape, bool)),
  "ragged_cut": (
    peers.Ragged,
    1.25,
    lambda idx: _kept(idx, (90, L), lambda source, expert: (expert, source)),
  ),
  "ring": (peers.Ring, None, lambda idx: np.ones(idx.shape, bool)),
  "chunked": (peers.Chunked, None, lambda idx: np.ones(idx.shape, bool)),
  "chunked_cut": (
    peers.Chunked,
    1.25,
    lambda idx: _kept(idx, (45, 2), lambda source, expert: (source, expert)),
  ),
}


def _on_ranks(peer):
  mesh = jax.make_mesh((P,), (AXIS,), axis_types=(AxisType.Auto,))
  return jax.shard_map(
    peer.moe, mesh=mesh, in_specs=SPEC, out_specs=SPEC, check_vma=False
  )


@pytest.mark.parametrize(("kind", "factor", "kept"), CASES.values(), ids=CASES)
def test_outputs_and_gradients(kind, factor, kept):
  topk_idx, args = _inputs()
  kept = kept(topk_idx)
  assert kept.all() == (factor is None)
  run = _on_ranks(kind(P, E, factor, peers.ragged_dot))
  with ep.lax.install():
    actual = jax.jit(lambda *args: _outputs(run, topk_idx, args))(*args)
  expected = _outputs(_dense(kept), topk_idx, args)
  for a, b in zip(actual, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


def test_kernels_and_the_operation_of_xla_agree():
  """The ring passes sizes of experts that the rank does not have."""
  topk_idx, (tokens, _, w, *_) = _inputs()
  sizes = np.bincount(topk_idx.ravel(), minlength=E).astype(np.int32)
  rows = np.repeat(tokens, K, axis=0)

  @functools.partial(jax.jit, static_argnums=0)
  def run(multiply, *args):
    return _outputs(lambda sizes, *args: multiply(*args, sizes), sizes, args)

  with pltpu.force_tpu_interpret_mode():
    actual = run(peers.megablox, rows, w[:L])
  expected = run(peers.ragged_dot, rows, w[:L])
  for a, b in zip(actual, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
