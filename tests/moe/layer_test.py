# SPDX-License-Identifier: Apache-2.0
"""ep.MoE gives the outputs, metrics and gradients of a dense layer.

The dense layer applies every expert to every token, in float64. It calls the
losses of `ep`, which losses_test compares with their formulas.
"""

import dataclasses
import functools
import re

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import pytest

from cases import GPU, jit_quickly
from conftest import (
  assert_shards_close,
  assert_shards_equal,
  make_mesh,
  TIMEOUT_S,
  to_global,
)
import ep
from groups import BACKEND, E, group, H, K, of_one_process, T
from layer_steps import (
  assert_same_bits,
  draw_params,
  in_slots,
  put,
  run_forward,
  whole,
)
import quick_compiler

F, S = 6, 4  # inner sizes of an expert and of a shared one
DETERMINISTIC = not GPU  # nccl refuses deterministic layers.
R = 4  # ranks
PLACEMENT = ep.Placement(np.random.default_rng(7).permutation(E))

PLAIN = ep.MoEConfig(H, F, E, K, gated=False, activation=jax.nn.gelu)
SHARED = ep.MoEConfig(
  H - 1,
  F,
  E,
  K,
  activation=jax.nn.gelu,
  score="sigmoid",
  scale=2.5,
  shared_inner=S,
  router_bias=True,
)
BIASED = ep.MoEConfig(
  H,
  F,
  E,
  K,
  biases=True,
  router_bias=True,
  shared_inner=S,
  up_activation=lambda x: jnp.clip(x, -1, 1) + 1,
)
EARLY = dataclasses.replace(
  BIASED, weigh="early", balance="sequence", normalize=False
)
INPUT = dataclasses.replace(
  BIASED, weigh="input", score="sqrtsoftplus", normalize=False, scale=1.5
)
SPLIT = dataclasses.replace(SHARED, fsdp_axis="dp")


@functools.cache
def make_params(config):
  rng = np.random.default_rng(1)
  return draw_params(config, lambda shape: 0.3 * rng.normal(size=shape))


def tokens(*lead, hidden=H):
  rng = np.random.default_rng(2)
  return rng.normal(size=(*lead, hidden)).astype(np.float32)


def dense(config, params, x, bias=None, mask=None):
  """Returns the layer's output and metrics, computed by dense products."""
  logits = x @ params["router"] + params.get("router_bias", 0)
  scores = {
    "softmax": jax.nn.softmax,
    "sigmoid": jax.nn.sigmoid,
    "sqrtsoftplus": lambda x: jnp.sqrt(jax.nn.softplus(x)),
  }
  scores = scores[config.score](logits)
  ranking = scores if bias is None else scores + bias
  order = jnp.argsort(-lax.stop_gradient(ranking), axis=-1, stable=True)
  chosen = order.argsort(axis=-1) < config.top_k
  keep = jnp.ones(x.shape[:-1]) if mask is None else mask
  chosen = chosen * keep[..., None]
  weights = chosen * scores
  if config.normalize:
    total = weights.sum(axis=-1, keepdims=True)
    weights = weights / jnp.where(total, total, 1)
  weights = config.scale * weights

  def product(x, spec, kind, name):
    out = jnp.einsum(spec, x, params[kind + name])
    return out + params.get("b_" + name, 0) if kind == "w_" else out

  def ffn(x, up, down, kind):
    hidden = product(x, up, kind, "up")
    if config.gated:
      if config.up_activation:
        hidden = config.up_activation(hidden)
      hidden *= config.activation(product(x, up, kind, "gate"))
    else:
      hidden = config.activation(hidden)
    return product(hidden, down, kind, "down")

  inputs = x[..., None, :]
  if config.weigh == "input":
    inputs, weights = inputs * weights[..., None], chosen
  out = ffn(inputs, "...eh,ehf->...ef", "...ef,efh->...eh", "w_")
  y = jnp.einsum("...eh,...e->...h", out, weights)
  if config.shared_inner:
    shared = ffn(x, "...h,hs->...s", "...s,sh->...h", "shared_")
    y += keep[..., None] * shared
  balance = {
    "batch": ep.load_balancing_loss,
    "sequence": ep.sequence_balancing_loss,
  }
  choices = order[..., : config.top_k]
  return y, dict(
    load=chosen.reshape(-1, config.num_experts).sum(axis=0),
    aux_loss=balance[config.balance](
      logits, choices, score=config.score, mask=mask
    ),
    z_loss=ep.router_z_loss(logits, mask=mask),
    entropy=ep.router_entropy(logits, mask=mask),
  )


def with_grads(fn):
  """Returns a function that computes outputs, metrics and loss gradients."""

  def loss(params, x, *others):
    y, metrics = fn(params, x, *others)
    if not isinstance(metrics, dict):
      metrics = metrics._asdict()
    floats = {n: metrics[n] for n in ("aux_loss", "z_loss", "entropy", "load")}
    terms = 0.1 * floats["aux_loss"] + 0.01 * floats["z_loss"]
    terms += 0.02 * floats["entropy"]
    return jnp.tanh(y).sum() + terms, (y, floats)

  def call(*args):
    grads, outs = jax.grad(loss, argnums=(0, 1), has_aux=True)(*args)
    return *outs, *grads

  return call


def local_view(layer):
  ranks = PartitionSpec(layer.group.token_axes)

  def call(params, x, mask=None):
    return jax.shard_map(
      lambda params, x, mask: layer(params, x, mask=mask),
      mesh=layer.group.mesh,
      in_specs=(layer.specs(), ranks, ranks),
      out_specs=(ranks, PartitionSpec()),
    )(params, x, mask)

  return call


@functools.cache
def oracle(config):
  return jit_quickly(with_grads(functools.partial(dense, config)))


def expected_of(config, params, x, bias=None, mask=None):
  """Returns the results of `with_grads` for the dense layer.

  The replaced options change no result, so these layers share a program.
  """
  config = dataclasses.replace(
    config,
    capacity_factor=None,
    overflow=None,
    deterministic=False,
    tp_axis=None,
    fsdp_axis=None,
  )
  bias = np.zeros(E, np.float32) if bias is None else bias
  mask = np.ones(x.shape[:-1], bool) if mask is None else mask
  with jax.enable_x64(True):
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64), (params, x))
    return jax.tree.map(np.asarray, oracle(config)(*wide, bias, mask))


def assert_close(got, expected, tol=2e-5):
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    assert_shards_close(a, b, tol, tol * max(np.abs(b).max(), 1e-3))


@of_one_process
@pytest.mark.parametrize(
  "config, mesh, biased",
  [
    pytest.param(SHARED, "ep4", True, id="sigmoid_bias_shared"),
    pytest.param(EARLY, "dp4_ep1", False, id="early_of_sequences"),
    pytest.param(SPLIT, "dp2_ep2", False, id="fsdp"),
    pytest.param(INPUT, "dp2_ep2", True, id="weighted_inputs"),
  ],
)
def test_output_metrics_and_gradients_equal_the_dense_layer(
  config, mesh, biased
):
  layer, params = ep.MoE(config, group(mesh)), make_params(config)
  x = tokens(R, T, hidden=config.hidden)
  bias = np.linspace(-0.2, 0.2, E, dtype=np.float32) if biased else None
  state = ep.moe.State(bias) if biased else None
  apply = functools.partial(layer, state=state)
  got = jax.jit(with_grads(apply))(*put(layer, params, x))
  assert_close(got, expected_of(config, params, x, bias))


@of_one_process
def test_all_metrics_cost_one_sum_over_ranks():
  """XLA removes the sum from a program that uses no metric."""
  layer = ep.MoE(EARLY, group("dp2_ep2"))
  args = put(layer, make_params(EARLY), tokens(R, T))

  def num_sums(program):
    hlo = jit_quickly(program).lower(*args).compile().as_text()
    return len(re.findall(r" all-reduce(?:-start)?\(", hlo))

  assert num_sums(layer) == num_sums(lambda *args: layer(*args)[0]) + 1


@of_one_process
@pytest.mark.parametrize("of_x, of_params", [(0, 1), (1, 0), (0, 0)])
def test_one_dtype_or_the_dtype_of_the_configuration(of_x, of_params):
  """The router is float32, and reads tokens before they are converted."""
  narrow = dataclasses.replace(SPLIT, dtype=jnp.bfloat16)
  layers = [ep.MoE(config, group("dp2_ep2")) for config in (SPLIT, narrow)]
  kinds = jnp.bfloat16, jnp.float32
  params = {
    n: p if n.startswith("router") else p.astype(kinds[of_params])
    for n, p in make_params(SPLIT).items()
  }
  x = tokens(R, T, hidden=SPLIT.hidden).astype(kinds[of_x])
  if of_x != of_params:
    words = rf"params\['\w+'\] is {np.dtype(kinds[of_params])}, but x is"
    with pytest.raises(TypeError, match=words + ".* MoEConfig\\(dtype=jnp"):
      layers[0](params, x)
    layers = layers[1:]
  outs = [run_forward(layer, params, x) for layer in layers]
  assert_same_bits(outs, [outs[0]] * len(outs))
  y, metrics = outs[0]
  assert (y.dtype, metrics.dropped) == (jnp.bfloat16, 0)
  expected = expected_of(SPLIT, params, x)[0]
  eps = float(jnp.finfo(jnp.bfloat16).eps)
  tolerance = 4 * eps * np.abs(expected).max()
  np.testing.assert_allclose(np.float64(y), expected, 4 * eps, tolerance)


@of_one_process
def test_masked_tokens_visit_no_expert_and_do_not_count():
  """No NaN or infinity of a masked token reaches another value."""
  config = dataclasses.replace(BIASED, deterministic=DETERMINISTIC)
  layer = ep.MoE(config, group("dp2_ep2"))
  params, x = make_params(config), tokens(R, T)
  mask = np.random.default_rng(3).random((R, T)) < 0.6
  junk = np.where(
    mask[..., None], x, np.resize([np.nan, np.inf, 3e38], x.shape)
  )
  args = put(layer, params, junk.astype(x.dtype), mask)
  assert_close(
    jax.jit(with_grads(local_view(layer)))(*args),
    expected_of(config, params, x * mask[..., None], mask=mask),
  )


@of_one_process
def test_vmap_of_grad_gives_the_gradients_of_each_example():
  """`vmap(grad)` exchanges once per example, so each has separate gradients.

  Each example here has a separate `w_up`, and the examples share the rest.
  """
  config = dataclasses.replace(PLAIN, deterministic=DETERMINISTIC)
  layer, params = ep.MoE(config, group("ep4")), make_params(config)
  args = put(layer, params, tokens(R))

  def loss(params, x):
    return jnp.tanh(layer(params, x)[0]).sum()

  def dense_loss(params, x):
    return jnp.tanh(dense(config, params, x)[0]).sum()

  @jax.jit
  def of_two(params, x):
    params["w_up"], xs = (jnp.stack([a, 2 * a]) for a in (params["w_up"], x))
    axes = {n: 0 if n == "w_up" else None for n in params}
    return jax.vmap(jax.grad(loss, (0, 1)), (axes, 0))(params, xs)

  got = of_two(*args)
  grad = jit_quickly(jax.grad(dense_loss, (0, 1)))
  x, other = tokens(R), params | {"w_up": 2 * params["w_up"]}
  expected = jax.tree.map(
    lambda *g: np.stack(g), grad(params, x), grad(other, 2 * x)
  )
  assert_close(got, expected, 1e-4)


@of_one_process
def test_tangents_equal_the_dense_layer():
  """Masked tokens, here NaN, have zero tangents."""
  layer = ep.MoE(SHARED, group("dp2_ep2"))
  params, x = make_params(SHARED), tokens(R * T, hidden=SHARED.hidden)
  mask = np.arange(R * T) % 3 > 0
  junk = np.where(mask[:, None], x, np.float32(np.nan))

  def tangents(fn):
    def call(params, x, mask):
      def of(*args):
        y, metrics = fn(*args, mask=mask)
        if not isinstance(metrics, dict):
          metrics = metrics._asdict()
        return y, [metrics[n] for n in ("aux_loss", "z_loss", "entropy")]

      return jax.jvp(of, (params, x), (params, x))

    return call

  got = jax.jit(tangents(layer))(*put(layer, params, junk, mask))
  expected = jit_quickly(tangents(functools.partial(dense, SHARED)))(
    params, x * mask[:, None], mask
  )
  assert_close(got, jax.tree.map(np.asarray, expected), 1e-4)


@of_one_process
def test_forced_choices_and_jitter():
  config = dataclasses.replace(PLAIN, jitter=0.3, num_groups=4, top_groups=2)
  layer, params = ep.MoE(config, group("ep4")), make_params(config)
  idx = np.tile(np.arange(K, dtype=np.int32), (R * T, 1))
  args = put(layer, params, tokens(R * T), idx)
  run = jax.jit(
    lambda params, x, idx, key: layer(params, x, forced_idx=idx, key=key)
  )
  keys = jax.random.split(jax.random.key(0))
  (first, metrics), (second, _) = whole([run(*args, key) for key in keys])
  np.testing.assert_array_equal(metrics.load, [R * T] * 3 + [0] * 5)
  assert (first != second).any()


@of_one_process
def test_any_batch_is_padded_when_asked():
  layer = ep.MoE(SHARED, group("dp2_ep2"))
  params, x = make_params(SHARED), tokens(R, T, hidden=SHARED.hidden)
  batch = np.s_[:2, :3]
  (placed,) = put(layer, params)
  with pytest.raises(ValueError, match="cannot be split over 4 ranks"):
    layer(placed, x[batch])
  padded = jax.jit(functools.partial(layer, pad=True))
  y, metrics = padded(placed, to_global(x[batch], layer.group.mesh))
  mask = np.zeros((R, T), bool)
  mask[batch] = True
  expected, numbers, *_ = expected_of(SHARED, params, x, mask=mask)
  assert_close(y, expected[batch])
  assert_close({n: getattr(metrics, n) for n in numbers}, numbers)


@of_one_process
def test_a_tight_capacity_drops_and_counts_the_drops():
  """Without `max_tokens_per_rank`, the tokens of a call set the capacity."""
  limit = T if GPU else None
  config = dataclasses.replace(PLAIN, capacity_factor=1.0, overflow="drop")
  layer = ep.MoE(config, group("ep4", max_tokens_per_rank=limit))
  x, params = tokens(R * T), make_params(PLAIN)
  assert layer.ep_layer.capacity_for(T) == T * K
  # All other logits are 0, so tokens with a positive logit choose expert 0.
  params = params | {"router": params["router"] * (np.arange(E) == 0)}
  choices = np.argsort(-x @ params["router"], axis=-1, kind="stable")[:, :K]
  load = np.bincount(choices.ravel(), minlength=E)
  params, experts = in_slots(PLACEMENT, params), PLACEMENT.experts
  choices = PLACEMENT.slots[choices]
  _, metrics = run_forward(layer, params, x, placement=PLACEMENT)
  np.testing.assert_array_equal(metrics.load, load)
  rows = load[experts].reshape(R, -1).sum(axis=1)
  assert metrics.max_rank_rows == rows.max() > T * K
  dropped = np.maximum(rows - T * K, 0).astype(np.int32)
  assert metrics.dropped == dropped.sum()
  handle = ep.ep_prepare(layer.ep_layer, choices.astype(np.int32))
  assert handle.capacity == T * K
  assert_shards_equal(handle.dropped_counts.sum(axis=1), dropped)
  by_rank = metrics.drops[experts].reshape(R, -1).sum(axis=1)
  np.testing.assert_array_equal(by_rank, dropped)
  assert (metrics.drops <= load).all()


@of_one_process
def test_fp8_rows_of_a_deterministic_layer_that_drops():
  """fp8 represents the tokens exactly; a rank has several blocks of rows."""
  dropping = dataclasses.replace(
    BIASED,
    hidden=32,
    deterministic=DETERMINISTIC,
    dtype=jnp.bfloat16,
    overflow="drop",
    capacity_factor=0.75,
  )
  rng = np.random.default_rng(0)
  x = rng.integers(-1, 2, (R * 200, 32)).astype(jnp.bfloat16)
  outs = []
  for wire in "mxfp8", None:
    config = dataclasses.replace(dropping, wire=wire)
    layer = ep.MoE(config, group(hidden_dim=32, max_tokens_per_rank=200))
    outs.append(run_forward(layer, make_params(dropping), x))
  assert_same_bits(*outs)
  assert outs[0][1].dropped


@of_one_process
def test_vmap_over_examples_makes_one_exchange():
  """vmap gives the same bits as one call with the whole batch.

  Named scopes name the steps of the layer in profiles.
  """
  layer = ep.MoE(PLAIN, group("dp2_ep2"))
  args = put(layer, make_params(PLAIN), tokens(R, T))

  def mapped(params, x):
    y, metrics = jax.vmap(layer, in_axes=(None, 0))(params, x)
    return y, jax.tree.map(lambda m: m[0], metrics)

  def compare(*args):
    results = with_grads(layer)(*args)
    equal = jax.tree.map(jnp.array_equal, with_grads(mapped)(*args), results)
    return jnp.stack(jax.tree.leaves(equal))

  # With both flags of quick_compiler.py, two programs may round differently.
  options = quick_compiler.OPTIMIZED | {"xla_backend_optimization_level": 0}
  options = None if GPU else options
  lowered = jax.jit(compare).lower(*args)
  assert np.asarray(lowered.compile(options)(*args)).all()
  assert lowered.as_text().count("custom_call @ep_prepare") == 2
  names = lowered.as_text(debug_info=True)
  for scope in ("route", "experts", "metrics"):
    assert re.search(rf"[\"/]{scope}/", names)


def test_a_tensor_parallel_layer_makes_its_group_and_parameters():
  """The layer places parameters and state on the given mesh.

  An axis whose ranks hold the same tokens splits the inner sizes of experts.
  """
  mesh = make_mesh({"ep": 2, "tp": 2})
  config = dataclasses.replace(BIASED, tp_axis="tp")
  options = dict(
    max_tokens_per_rank=2 * T, timeout_s=TIMEOUT_S, backend=BACKEND
  )
  layer = ep.MoE(config, mesh, **options)
  with layer.group as mesh_group:
    assert mesh_group.data_axes == ()
    assert (mesh_group.hidden_dim, mesh_group.top_k) == (config.hidden, K)
    params, state = layer.init(jax.random.key(0)), layer.init_state()
    for name, spec in layer.specs().items():
      assert params[name].sharding == NamedSharding(mesh, spec)
    first = jit_quickly(functools.partial(ep.moe.init, config=config))(
      jax.random.key(0)
    )
    assert_close(params, jax.tree.map(np.asarray, first), 1e-6)
    x = tokens(R, T, hidden=config.hidden)
    results = jax.jit(with_grads(layer))(
      params, to_global(x, mesh, PartitionSpec("ep")), state
    )
    assert_close(results, expected_of(config, first, x))
    load = results[1]["load"]
    state = jax.jit(ep.moe.State.after)(state, load)
    load = np.asarray(load)
    bias = np.float32(1e-3) * np.sign(load.mean() - load)
    assert_shards_equal(state.bias, bias)
    with pytest.raises(TypeError, match="'timeout_s'. are options of ep_boot"):
      ep.MoE(config, mesh_group, timeout_s=1.0)


@of_one_process
@pytest.mark.parametrize(
  "examples, lead, axis", [(2, (8, 4), 1), (3, (T,), 0), (5, (3, 2), 0)]
)
def test_vmap_over_any_number_of_examples(examples, lead, axis):
  """y and gradients are those of one batch, and the metrics are of all."""
  here = group("ep4", max_tokens_per_rank=None)
  layer, params = ep.MoE(PLAIN, here), make_params(PLAIN)
  x = tokens(examples, *lead)
  mapped = jax.vmap(layer, (None, axis), (axis, None))

  def step(params, x):
    y, metrics = mapped(params, x)
    return jnp.moveaxis(y, axis, 0), metrics

  *outs, grad_x = jax.jit(with_grads(step))(params, np.moveaxis(x, 0, axis))
  got = *outs, jnp.moveaxis(grad_x, axis, 0)
  assert_close(got, expected_of(PLAIN, params, x))
  program = str(jax.make_jaxpr(step)(params, np.moveaxis(x, 0, axis)))
  assert program.count("ep_dispatch[") == 1
