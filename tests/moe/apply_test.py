# SPDX-License-Identifier: Apache-2.0
"""ep.MoE, its metrics and its gradients are those of a dense layer.

The dense layer applies every expert to every token, in float64.
"""

import copy
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
from ep._src.ops import reference
from groups import BACKEND, bootstrap, E, group, H, K, T
import quick_compiler

F, S = 6, 3  # inner sizes of an expert and of a shared one
DETERMINISTIC = not GPU  # nccl refuses it
R = 4  # ranks

PLAIN = ep.MoEConfig(H, F, E, K, gated=False, activation=jax.nn.gelu)
SHARED = ep.MoEConfig(
  H,
  F,
  E,
  K,
  activation=jax.nn.gelu,
  score="sigmoid",
  scale=2.5,
  shared_inner=S,
)
BIASED = ep.MoEConfig(
  H,
  F,
  E,
  K,
  biases=True,
  router_bias=True,
  normalize=False,
  up_activation=lambda x: jnp.clip(x, -1, 1) + 1,
)
EARLY = dataclasses.replace(BIASED, weigh="early", balance="sequence")
SPLIT = dataclasses.replace(SHARED, hidden=6, shared_inner=4, fsdp_axis="dp")


@functools.cache
def make_params(config):
  """Draws parameters, as numpy arrays."""
  init = functools.partial(ep.moe.init, config=config)
  rng = np.random.default_rng(1)
  return {
    name: np.float32(0.3 * rng.normal(size=p.shape))
    for name, p in sorted(jax.eval_shape(init, jax.random.key(0)).items())
  }


def tokens(*lead, hidden=H):
  rng = np.random.default_rng(2)
  return rng.normal(size=(*lead, hidden)).astype(np.float32)


def dense(config, params, x, bias=None, mask=None):
  """Returns the layer's output and metrics; all arrays are whole."""
  logits = x @ params["router"] + params.get("router_bias", 0)
  scores = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}
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

  out = ffn(x, "...h,ehf->...ef", "...ef,efh->...eh", "w_")
  y = jnp.einsum("...eh,...e->...h", out, weights)
  if config.shared_inner:
    shared = ffn(x, "...h,hs->...s", "...s,sh->...h", "shared_")
    y += keep[..., None] * shared
  load = chosen.reshape(-1, config.num_experts).sum(axis=0)
  count = keep.sum()

  def imbalance(chosen, scores):
    chosen, scores = (
      x.reshape(-1, config.num_experts).sum(0) for x in (chosen, scores)
    )
    return config.num_experts * (chosen * scores).sum() / chosen.sum()

  def mean(v):
    return (keep[..., None] * v).reshape(-1, v.shape[-1]).sum(0) / count

  affinities = scores / scores.sum(axis=-1, keepdims=True)
  log_p = jax.nn.log_softmax(logits)
  lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
  if config.balance == "sequence":
    aux_loss = jax.vmap(imbalance)(chosen, affinities).mean() / x.shape[-2]
  else:
    aux_loss = imbalance(chosen, keep[..., None] * affinities) / count
  return y, dict(
    load=load,
    aux_loss=aux_loss,
    z_loss=mean(lse**2)[0],
    entropy=-mean(log_p * jnp.exp(log_p)).sum(),
  )


def with_grads(fn):
  """Returns output, metrics, and gradients of a loss of them all."""

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


def put(mesh_group, config, params, *arrays):
  """Places parameters by their specs, and token arrays over all ranks."""
  mesh = mesh_group.mesh
  specs = ep.moe.partition_specs(config, mesh_group.axis_name)
  spec = PartitionSpec(mesh_group.token_axes)
  params = {
    n: to_global(p.astype(np.float32), mesh, specs[n])
    for n, p in params.items()
  }
  return params, *(to_global(x, mesh, spec) for x in arrays)


def local_view(mesh_group, config):
  """Returns `apply` to parameters and tokens, as of one rank, of whole ones."""
  ranks = PartitionSpec(mesh_group.token_axes)
  specs = ep.moe.partition_specs(config, mesh_group.axis_name)
  apply = ep.MoE(config, mesh_group)

  def call(params, x, mask=None):
    return jax.shard_map(
      lambda params, x, mask: apply(params, x, mask=mask),
      mesh=mesh_group.mesh,
      in_specs=(specs, ranks, ranks),
      out_specs=(ranks, PartitionSpec()),
    )(params, x, mask)

  return call


@functools.cache
def oracle(config):
  return jit_quickly(with_grads(functools.partial(dense, config)))


def expected_of(config, params, x, bias=None, mask=None):
  with jax.enable_x64(True):
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64), (params, x))
    return jax.tree.map(np.asarray, oracle(config)(*wide, bias, mask))


def assert_close(got, expected, tol=2e-5):
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    assert_shards_close(a, b, tol, tol * max(np.abs(b).max(), 1e-3))


@pytest.mark.parametrize(
  "config, mesh, biased",
  [
    pytest.param(SHARED, "ep4", True, id="sigmoid_bias_shared"),
    pytest.param(EARLY, "dp4_ep1", False, id="early_of_sequences"),
    pytest.param(SPLIT, "dp2_ep2", False, id="fsdp"),
  ],
)
def test_output_metrics_and_gradients_are_those_of_the_dense_layer(
  config, mesh, biased
):
  mesh_group = group(mesh)
  layer, params = ep.MoE(config, mesh_group), make_params(config)
  x = tokens(R, T, hidden=config.hidden)
  bias = np.linspace(-0.2, 0.2, E, dtype=np.float32) if biased else None
  state = ep.moe.State(bias) if biased else None
  apply = functools.partial(layer, state=state)
  got = jax.jit(with_grads(apply))(*put(mesh_group, config, params, x))
  assert_close(got, expected_of(config, params, x, bias))


def test_bfloat16_in_both_views():
  """Parameters are float32, and split over "dp" as well."""
  config, mesh_group = SPLIT, group("dp2_ep2")
  params = make_params(config)
  x = tokens(R, T, hidden=config.hidden).astype(jnp.bfloat16)
  apply = ep.MoE(config, mesh_group)
  local = local_view(mesh_group, config)

  @jax.jit
  def run(*args):
    outs, metrics = local(*args)
    equal = jax.tree.map(jnp.array_equal, (outs, metrics), apply(*args))
    return outs, metrics, jnp.stack(jax.tree.leaves(equal))

  y, metrics, equal = run(*put(mesh_group, config, params, x))
  assert np.asarray(equal).all()
  assert y.dtype == jnp.bfloat16
  assert int(metrics.dropped) == 0
  expected = expected_of(config, params, x)[0]
  eps = float(jnp.finfo(jnp.bfloat16).eps)
  assert_shards_close(y, expected, 4 * eps, 4 * eps * np.abs(expected).max())


@pytest.mark.parametrize(
  "config, view",
  [
    pytest.param(
      dataclasses.replace(
        SHARED, router_bias=True, deterministic=DETERMINISTIC
      ),
      "local",
      id="shared_deterministic",
    ),
    pytest.param(
      dataclasses.replace(
        BIASED, shared_inner=S, capacity_factor=1.6, overflow="chunk"
      ),
      "global",
      id="biases_chunk",
    ),
  ],
)
def test_masked_tokens_visit_no_expert_and_do_not_count(config, view):
  """A NaN or an infinity in masked tokens reaches no other value."""
  mesh_group = group("dp2_ep2")
  params, x = make_params(config), tokens(R * T)
  mask = np.random.default_rng(3).random(R * T) < 0.6
  junk = np.where(mask[:, None], x, np.resize([np.nan, np.inf, 3e38], x.shape))
  if view == "global":
    apply = ep.MoE(config, mesh_group)
  else:
    apply = local_view(mesh_group, config)
  fn = with_grads(lambda params, x, mask: apply(params, x, mask=mask))
  args = put(mesh_group, config, params, junk.astype(x.dtype), mask)
  assert_close(
    jax.jit(fn)(*args),
    expected_of(config, params, x * mask[:, None], mask=mask),
  )


def test_gradients_of_each_example_are_its_own():
  """`vmap(grad)` makes one exchange per example, and so sums nothing.

  That holds for examples of one model and for those of a model each.
  """
  mesh_group = group("ep4")
  config = dataclasses.replace(PLAIN, deterministic=DETERMINISTIC)
  layer, params = ep.MoE(config, mesh_group), make_params(config)
  args = put(mesh_group, config, params, tokens(R))

  def loss(params, x):
    return jnp.tanh(layer(params, x)[0]).sum()

  def dense_loss(params, x):
    return jnp.tanh(dense(config, params, x)[0]).sum()

  @jax.jit
  def of_one_model_and_of_two(*args):
    grad = jax.grad(loss, (0, 1))
    models, xs = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), args)
    return jax.vmap(grad, (None, 0))(args[0], xs), jax.vmap(grad)(models, xs)

  got = of_one_model_and_of_two(*args)
  grad = jit_quickly(jax.grad(dense_loss, (0, 1)))
  x, twice = tokens(R), jax.tree.map(lambda p: 2 * p, params)
  expected = [
    jax.tree.map(lambda *g: np.stack(g), grad(params, x), grad(p, 2 * x))
    for p in (params, twice)
  ]
  assert_close(got, tuple(expected), 1e-4)


def test_tangents_are_those_of_the_dense_layer():
  """Those of masked tokens, which are NaN, are zero."""
  config, mesh_group = SHARED, group("dp2_ep2")
  params, x = make_params(config), tokens(R * T)
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

  args = put(mesh_group, config, params, junk, mask)
  got = jax.jit(tangents(ep.MoE(config, mesh_group)))(*args)
  expected = jit_quickly(tangents(functools.partial(dense, config)))(
    params, x * mask[:, None], mask
  )
  assert_close(got, jax.tree.map(np.asarray, expected), 1e-4)


def test_a_choice_can_be_forced_and_logits_be_noisy():
  mesh_group = group("ep4")
  config = dataclasses.replace(PLAIN, jitter=0.3, num_groups=4, top_groups=2)
  apply, params = ep.MoE(config, mesh_group), make_params(config)
  idx = np.tile(np.arange(K, dtype=np.int32), (R * T, 1))
  placed, x, idx = put(mesh_group, config, params, tokens(R * T), idx)

  @jax.jit
  def run(params, x, idx):
    keys = jax.random.split(jax.random.key(0))
    forced = apply(params, x, forced_idx=idx, key=keys[0])[1].load
    return forced, [apply(params, x, key=key)[0] for key in keys]

  forced, (first, second) = run(placed, x, idx)
  np.testing.assert_array_equal(np.asarray(forced), [R * T] * 3 + [0] * 5)
  for a, b in zip(
    first.addressable_shards, second.addressable_shards, strict=True
  ):
    assert (np.asarray(a.data) != np.asarray(b.data)).any()


def test_any_batch_is_padded_when_asked():
  config, mesh_group = PLAIN, group("dp2_ep2")
  params, one, six = make_params(config), tokens(1), tokens(3, 2)
  apply = ep.MoE(config, mesh_group)
  placed, *whole = (
    *put(mesh_group, config, params),
    *(to_global(x, mesh_group.mesh) for x in (one, six)),
  )
  with pytest.raises(ValueError, match="cannot be split over 4 ranks"):
    apply(placed, whole[0])
  padded = functools.partial(apply, pad=True)

  @jax.jit
  def run(params, one, six):
    return padded(params, one)[0], with_grads(padded)(params, six)

  y, got = run(placed, *whole)
  expected = expected_of(config, params, six)
  assert_close(got, expected)
  np.testing.assert_array_equal(one, six[0, :1])
  assert_close(y, expected[0][0, :1])


def test_a_tight_capacity_drops_and_tells():
  """It does so with a limit of tokens, and, in one process, without any."""
  limit = T if GPU or jax.process_count() > 1 else None
  mesh_group = group("ep4", max_tokens_per_rank=limit)
  config = dataclasses.replace(PLAIN, capacity_factor=1.0, overflow="drop")
  layer, x, params = (
    ep.MoE(config, mesh_group),
    tokens(R * T),
    make_params(PLAIN),
  )
  assert layer.ep_layer.capacity_for(T) == T * K
  # All tokens of one sign choose expert 0.
  params = params | {"router": params["router"] * (np.arange(E) == 0)}
  _, metrics = jax.jit(layer)(*put(mesh_group, config, params, x))
  choices = np.argsort(-x @ params["router"], axis=-1, kind="stable")[:, :K]
  load = np.bincount(choices.ravel(), minlength=E)
  np.testing.assert_array_equal(np.asarray(metrics.load), load)
  rows = load.reshape(4, -1).sum(axis=1)
  assert int(metrics.max_rank_rows) == rows.max() > T * K
  dropped = np.maximum(rows - T * K, 0).astype(np.int32)
  assert int(metrics.dropped) == dropped.sum()
  handle = ep.ep_prepare(layer.ep_layer, choices.astype(np.int32))
  assert handle.capacity == T * K
  assert_shards_equal(handle.dropped_counts.sum(axis=1), dropped)
  by_expert = np.asarray(metrics.drops).reshape(4, -1)
  np.testing.assert_array_equal(by_expert.sum(axis=1), dropped)
  assert (by_expert <= load.reshape(4, -1)).all() and metrics.moved == 0


def test_a_choice_without_room_moves_and_its_weight_follows():
  """The layer is the one in which those experts were chosen at first."""
  mesh_group = group("ep4")
  config = dataclasses.replace(
    PLAIN, capacity_factor=1.4, overflow="drop", num_candidates=E
  )
  layer, params, x = (
    ep.MoE(config, mesh_group),
    make_params(PLAIN),
    tokens(R * T),
  )
  bias = np.where(np.arange(E) < K, 0.5, 0.0).astype(np.float32)
  route = functools.partial(
    ep.route_topk, top_k=K, num_candidates=E, selection_bias=bias
  )
  candidates, weights = jit_quickly(route)(x @ params["router"])
  candidates = np.asarray(candidates)
  assigned = reference.assign(
    candidates.reshape(R, T, E),
    np.asarray(weights).reshape(R, T, E),
    top_k=K,
    num_experts=E,
    capacity=layer.ep_layer.capacity,
    drop_by="fair",
  ).reshape(-1, K)
  assert (assigned >= K).any() and (assigned >= 0).all()
  used = np.take_along_axis(candidates, assigned, axis=1)
  wide = ep.MoE(PLAIN, mesh_group)

  def value_and_grads(layer, params, x, **options):
    def loss(params, x):
      y, metrics = layer(params, x, **options)
      return jnp.tanh(y).sum(), (y, metrics)

    grad = jax.grad(loss, argnums=(0, 1), has_aux=True)
    grads, (y, metrics) = grad(params, x)
    return (y, grads), metrics

  @jax.jit
  def both(bias, params, x, used):
    return (
      value_and_grads(layer, params, x, state=ep.moe.State(bias)),
      value_and_grads(wide, params, x, forced_idx=used),
    )

  (moved, metrics), (forced, _) = both(
    bias, *put(mesh_group, config, params, x, used)
  )

  def close(x, y):
    shards = zip(x.addressable_shards, y.addressable_shards, strict=True)
    for a, b in shards:
      np.testing.assert_allclose(a.data, b.data, 1e-5, 1e-6)

  jax.tree.map(close, moved, forced)
  assert int(metrics.dropped) == 0
  assert int(metrics.moved) == (assigned >= K).sum()
  wanted = np.bincount(candidates[:, :K].ravel(), minlength=E)
  np.testing.assert_array_equal(np.asarray(metrics.load), wanted)


def test_vmap_over_examples_makes_one_exchange():
  """Its gradients are those of the batch, and its bits those of one call.

  Those are close to what the dense layer gives. Profilers see the parts of the
  layer by name.
  """
  config, mesh_group = PLAIN, group("dp2_ep2")
  params, x = make_params(config), tokens(R, T)
  apply = ep.MoE(config, mesh_group)
  args = put(mesh_group, config, params, x)

  def mapped(params, x):
    y, metrics = jax.vmap(apply, in_axes=(None, 0))(params, x)
    return y, jax.tree.map(lambda m: m[0], metrics)

  def compare(*args):
    results = with_grads(apply)(*args)
    equal = jax.tree.map(jnp.array_equal, with_grads(mapped)(*args), results)
    return jnp.stack(jax.tree.leaves(equal)), results

  # With both flags of quick_compiler.py, two programs may round differently.
  options = quick_compiler.OPTIMIZED | {"xla_backend_optimization_level": 0}
  options = None if GPU else options
  equal, results = jax.jit(compare, compiler_options=options)(*args)
  assert np.asarray(equal).all()
  assert_close(results, expected_of(config, params, x))
  one = jax.jit(mapped).lower(*args)
  assert one.as_text().count("custom_call @ep_prepare") == 1
  names = one.as_text(debug_info=True)
  for scope in ("route", "experts", "metrics"):
    assert re.search(rf"[\"/]{scope}/", names)


def test_tensor_parallel_experts_give_the_dense_layer():
  """Inner sizes are split over an axis whose ranks hold the same tokens."""
  mesh = make_mesh({"dp": 1, "ep": 2, "tp": 2})
  config = dataclasses.replace(BIASED, shared_inner=4, tp_axis="tp")
  params, x = make_params(config), tokens(2 * T)
  with bootstrap(mesh, data_axes=("dp",)) as mesh_group:
    apply = local_view(mesh_group, config)
    args = put(mesh_group, config, params, x)
    assert_close(
      jax.jit(with_grads(apply))(*args), expected_of(config, params, x)
    )


def test_a_bias_of_other_experts_than_the_load():
  with pytest.raises(ValueError, match=r"bias has shape \(3,\), but load \(4,"):
    ep.moe.State(jnp.zeros(3)).after(jnp.zeros(4))


def test_the_bias_rises_for_experts_below_the_mean_load():
  load = jnp.array([[4.0, 2.0, 0.0], [1.0, 1.0, 1.0]])
  state = ep.moe.State(jnp.zeros((2, 3))).after(load, rate=0.5)
  np.testing.assert_array_equal(state.bias, [[-0.5, 0, 0.5], [0, 0, 0]])


@pytest.mark.parametrize(
  "change, message",
  [
    (dict(top_k=E + 1), "top_k = 9, but it must be in 1..num_experts = 8"),
    (dict(inner=0), "inner = 0, but it must be at least 1"),
    (dict(score="relu"), "score = 'relu', but it must be one of"),
    (dict(capacity_factor=-1.0), "capacity_factor = -1.0"),
    (dict(up_activation=jnp.tanh), "gated = False"),
    (dict(num_groups=3), "num_groups = 3 does not divide"),
    (dict(jitter=2.0), "jitter = 2.0"),
    (dict(drop_by="first"), "drop_by = 'first'"),
    (dict(num_candidates=E + 1), "num_candidates = 9, but"),
    (dict(scale=np.nan), "scale = nan, but it must be a finite number"),
    (dict(jitter=np.nan), "jitter = nan"),
    (dict(capacity_factor=np.inf), "capacity_factor = inf"),
    (dict(name="moe\0"), r"name = 'moe\\x00'"),
  ],
)
def test_a_config_that_cannot_be(change, message):
  with pytest.raises(ValueError, match=message):
    dataclasses.replace(PLAIN, **{"name": "moe_3", **change})


def test_candidates_that_no_choice_can_move_to():
  """A group may have the capacity that a config leaves open."""
  config = dataclasses.replace(PLAIN, num_candidates=E)
  with pytest.raises(ValueError, match="num_candidates = 8, but .* no choice"):
    ep.MoE(config, group("ep4", backend="xla"))
  ep.MoE(config, group("ep4", recv_capacity_per_rank=R * T * K))


def test_ranks_that_hold_other_tokens_cannot_split_inner_sizes():
  """Their outputs would be added, though they are those of other tokens."""
  config = dataclasses.replace(PLAIN, tp_axis="dp")
  with pytest.raises(ValueError, match=r"splits tokens.*data_axes=\(\)"):
    ep.MoE(config, group("dp2_ep2"))


def test_a_copy_of_a_config_is_the_config():
  assert copy.deepcopy([BIASED])[0] is BIASED


@pytest.mark.parametrize(
  "change",
  [
    *[{f.name: "no"} for f in dataclasses.fields(PLAIN) if f.type == "bool"],
    dict(biases=np.array([1, 0])),
    dict(deterministic=1),
    dict(scale="2"),
    dict(jitter=True),
    dict(num_groups="1"),
    dict(tp_axis=1),
    dict(capacity_factor="1.25"),
  ],
)
def test_a_field_of_another_type(change):
  (name,) = change
  with pytest.raises(TypeError, match=f"MoEConfig.*: {name} = .* is expected"):
    dataclasses.replace(PLAIN, **change)


def test_an_activation_is_a_function():
  with pytest.raises(TypeError, match="'gelu' is a str.*jax.nn.gelu"):
    dataclasses.replace(PLAIN, activation="gelu")


@pytest.mark.parametrize(
  "change, message",
  [
    (dict(x=np.zeros((R, H + 1), np.float32)), r"x has shape \(4, 8\)"),
    (dict(params={}), r"params holds \[\], but the config has"),
    (dict(router=np.zeros((H, E - 1))), r"params\['router'\] has shape"),
    (dict(mask=np.ones(R + 1, bool)), r"mask has shape \(5,\)"),
    (dict(state=np.zeros(E)), "state is a ndarray, but an ep.moe.State"),
    (
      dict(config=dataclasses.replace(PLAIN, balance="sequence")),
      "balance = 'sequence' needs",
    ),
  ],
)
def test_arguments_that_do_not_fit(change, message):
  mesh_group = group("ep4")
  params = make_params(PLAIN)
  args = dict(params=params, x=np.zeros((R, H), np.float32))
  change = dict(change)
  layer = ep.MoE(change.pop("config", PLAIN), mesh_group)
  if "router" in change:
    change = dict(params={**params, **change})
  with pytest.raises((ValueError, TypeError), match=message):
    layer(**{**args, **change})


@pytest.mark.parametrize(
  "change, message",
  [
    (dict(num_experts=4), "num_experts = 4, but the group has 8"),
    (dict(hidden=H + 1), "but the group's rows have hidden_dim"),
    (dict(tp_axis="ep"), "tp_axis = 'ep', but it must be one of the mesh axes"),
    (
      dict(drop_by="fair", overflow="drop"),
      "drop_by = 'fair', but capacity_factor = None leaves room",
    ),
    (dict(drop_by="fair", capacity_factor=1.0), 'pass overflow="drop" as well'),
  ],
)
def test_a_config_that_does_not_fit_the_group(change, message):
  with pytest.raises(ValueError, match=message):
    ep.MoE(dataclasses.replace(PLAIN, **change), group("ep4"))


def test_a_layer_is_bound_to_a_mesh():
  """It makes a group, and parameters and a state that are placed there."""
  mesh = make_mesh({"tp": 2, "ep": 2})
  config = dataclasses.replace(PLAIN, tp_axis="tp")
  options = dict(max_tokens_per_rank=T, timeout_s=TIMEOUT_S, backend=BACKEND)
  layer = ep.MoE(config, mesh, **options)
  with layer.group as mesh_group:
    assert mesh_group.data_axes == ()
    assert (mesh_group.hidden_dim, mesh_group.top_k) == (H, K)
    params, state = layer.init(jax.random.key(0)), layer.init_state()
    for name, spec in layer.specs().items():
      assert params[name].sharding == NamedSharding(mesh, spec)
    whole = jit_quickly(functools.partial(ep.moe.init, config=config))(
      jax.random.key(0)
    )
    assert_close(params, jax.tree.map(np.asarray, whole), 1e-6)
    x = tokens(2 * T)
    y, metrics = jax.jit(layer)(
      params, to_global(x, mesh, PartitionSpec("ep")), state
    )
    assert_close(y, expected_of(config, whole, x)[0])
    load = np.asarray(metrics.load)
    state = jax.jit(ep.moe.State.after)(state, metrics.load)
    bias = np.float32(1e-3) * np.sign(load.mean() - load)
    assert_shards_equal(state.bias, bias)
    with pytest.raises(TypeError, match="'timeout_s'. are options of ep_boot"):
      ep.MoE(config, mesh_group, timeout_s=1.0)
