# SPDX-License-Identifier: Apache-2.0
"""The recipes for other frameworks agree with a dense model or with `ep.MoE`.

Modules of Flax and Equinox train with the same bits as the functions. For the
recipes for other frameworks, compares outputs and all gradients with a model in
which every expert computes every token.
"""

import contextlib
import functools
from types import SimpleNamespace

import equinox as eqx
from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from conftest import make_mesh, TIMEOUT_S, to_global
import ep
from recipes import equinox_moe, flax_moe, maxtext, transformer_engine

B, S, H, F, E, K = 4, 4, 8, 16, 8, 2
_CONFIG = ep.MoEConfig(hidden=H, inner=F, num_experts=E, top_k=K)
_STEPS = 3
# Weight decay would change the router's bias if the bias were a parameter.
_OPTIMIZER = optax.adamw(1e-2, weight_decay=0.1)


@contextlib.contextmanager
def _layer_on(axes, axis_name, data_axes):
  with ep.ep_bootstrap(
    make_mesh(axes),
    axis_name=axis_name,
    data_axes=data_axes,
    num_experts=E,
    top_k=K,
    timeout_s=TIMEOUT_S,
  ) as group:
    yield ep.EpLayerConfig(group)


@pytest.fixture(scope="module")
def layer():
  with _layer_on({"dp": 2, "ep": 2}, "ep", ("dp",)) as layer:
    yield layer


@pytest.fixture(scope="module")
def moe(layer):
  return ep.MoE(_CONFIG, layer.group)


@pytest.fixture(scope="module")
def x(layer):
  x = np.random.default_rng(0).standard_normal((64, H), np.float32)
  return to_global(x, layer.group.mesh, P(("dp", "ep")))


def _loss(y, metrics):
  return jnp.mean((y - 1.0) ** 2) + 1e-2 * metrics.aux_loss


@functools.partial(jax.jit, static_argnums=0)
def _step(layer, x, params, state, optimizer):
  """Runs a training step without a framework."""

  def loss_fn(params):
    y, metrics = layer(params, x, state)
    return _loss(y, metrics), metrics.load

  grads, load = jax.grad(loss_fn, has_aux=True)(params)
  updates, optimizer = _OPTIMIZER.update(grads, optimizer, params)
  params = optax.apply_updates(params, updates)
  return params, state.after(load), optimizer


def _train_flax(layer, x):
  model = flax_moe.MoE(layer, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, _OPTIMIZER, wrt=nnx.Param)

  def params():
    return {name: param[...] for name, param in model.params.items()}

  @nnx.jit
  def step(model, optimizer):
    grads = nnx.grad(lambda model: _loss(*model(x, train=True)))(model)
    optimizer.update(model, grads)

  first = params()
  for _ in range(_STEPS):
    step(model, optimizer)
  return first, params(), ep.moe.State(model.bias[...])


def _train_equinox(layer, x):
  make = eqx.nn.make_with_state(equinox_moe.MoE)
  model, state = make(layer, key=jax.random.key(0))
  optimizer = _OPTIMIZER.init(eqx.filter(model, eqx.is_array))

  def loss_fn(model, state):
    y, metrics, state = model(x, state)
    return _loss(y, metrics), state

  @eqx.filter_jit
  def step(model, state, optimizer):
    grads, state = eqx.filter_grad(loss_fn, has_aux=True)(model, state)
    arrays = eqx.filter(model, eqx.is_array)
    updates, optimizer = _OPTIMIZER.update(grads, optimizer, arrays)
    return eqx.apply_updates(model, updates), state, optimizer

  first = model.params
  for _ in range(_STEPS):
    model, state, optimizer = step(model, state, optimizer)
  return first, model.params, state.get(model.state)


@pytest.mark.parametrize(
  "train", [_train_flax, _train_equinox], ids=lambda f: f.__name__
)
def test_a_module_trains_as_the_layer_does(moe, x, train):
  """After `_STEPS` steps, module and layer have the same parameters and state.

  XLA may fuse the two programs differently, so the last bits may differ.
  """
  first, params, state = train(moe, x)
  want_state, optimizer = moe.init_state(), _OPTIMIZER.init(first)
  want = first
  for _ in range(_STEPS):
    want, want_state, optimizer = _step(moe, x, want, want_state, optimizer)
  assert params.keys() == want.keys()
  for name in want:
    assert not np.array_equal(params[name], first[name]), name
    np.testing.assert_allclose(
      params[name], want[name], 1e-6, 1e-7, err_msg=name
    )
  np.testing.assert_array_equal(state.bias, want_state.bias)
  assert np.abs(state.bias).max() > 0


def test_flax_variables_carry_their_shardings(moe):
  """NNX derives the shardings of variables, stacked layers' and moments'."""

  @nnx.split_rngs(splits=2)
  @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
  def stacked(rngs):
    return flax_moe.MoE(moe, rngs=rngs)

  @nnx.jit
  def create():
    rngs = nnx.Rngs(0)
    models = [flax_moe.MoE(moe, rngs=rngs), stacked(rngs)]
    optimizers = [nnx.Optimizer(m, _OPTIMIZER, wrt=nnx.Param) for m in models]
    return nnx.List(models), nnx.List(optimizers)

  def check(x, sharding):
    assert x.sharding.is_equivalent_to(sharding, x.ndim)

  mesh = moe.group.mesh
  with jax.set_mesh(mesh):
    models, optimizers = create()
  for lead, model in enumerate(models):
    specs = nnx.get_partition_spec(nnx.state(model))["params"]
    assert {n: v.get_value() for n, v in specs.items()} == moe.specs(lead)
  state = nnx.state((models, optimizers))
  jax.tree.map(check, state, nnx.get_named_sharding(state, mesh))


def test_an_equinox_module_maps_over_sequences(moe, x):
  """`jax.vmap` over sequences, as in Equinox models, gives the same results."""
  make = eqx.nn.make_with_state(equinox_moe.MoE)
  model, state = make(moe, key=jax.random.key(0))

  @eqx.filter_jit
  def both(x, state, same_state):
    mapped = jax.vmap(model, in_axes=(0, None), out_axes=(0, None, None))
    return model(x, state), mapped(x.reshape(16, 4, -1), same_state)

  (want_y, want, _), (y, got, _) = both(x, state, state)
  np.testing.assert_array_equal(y.reshape(x.shape), want_y)
  np.testing.assert_array_equal(got.load, want.load)


_KERNELS = "w0", "w1", "wo"
_BIASES = "b0", "b1", "bo"


def _values() -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  shapes = dict(
    x=(B, S, H),
    router=(H, E),
    w0=(E, H, F),
    w1=(E, H, F),
    wo=(E, F, H),
    b0=(E, F),
    b1=(E, F),
    bo=(E, H),
  )
  return {n: rng.standard_normal(s, np.float32) for n, s in shapes.items()}


@pytest.fixture(scope="module")
def expected():
  def dense(v):
    scores = jax.nn.softmax(v["x"] @ v["router"])
    least = jnp.sort(scores)[..., -K, None]
    shares = jnp.where(scores >= least, scores, 0.0)
    shares /= shares.sum(axis=-1, keepdims=True)
    gate = jnp.einsum("bsh,ehf->bsef", v["x"], v["w0"]) + v["b0"]
    up = jnp.einsum("bsh,ehf->bsef", v["x"], v["w1"]) + v["b1"]
    out = jnp.einsum("bsef,efh->bseh", jax.nn.silu(gate) * up, v["wo"])
    y = jnp.einsum("bseh,bse->bsh", out + v["bo"], shares)
    return jnp.mean((y - 1.0) ** 2)

  return jax.jit(jax.value_and_grad(dense))(_values())


def _check(expected, group, specs, model, gathers=False):
  """Fails unless loss and gradients of a model equal the dense model's.

  XLA may gather some of the values if `gathers`. Returns the other results of
  the model.
  """
  v = _values()
  args = {n: to_global(v[n], group.mesh, s) for n, s in specs.items()}

  def fn(v):
    y, *others = model(v, [v[n] for n in _KERNELS], [v[n] for n in _BIASES])
    return jnp.mean((y - 1.0) ** 2), others

  compiled = jax.jit(jax.value_and_grad(fn, has_aux=True)).lower(args).compile()
  # XLA sums with all-reduces. Recipes call the collectives with underscores.
  meant = ["all-reduce", "reduce_scatter", "all_gather"]
  meant += ["all-gather", "reduce-scatter"] * gathers
  ep.assert_no_hidden_collectives(compiled, allow=meant)
  (value, others), grads = jax.block_until_ready(compiled(args))
  want_value, want_grads = expected
  np.testing.assert_allclose(value, want_value, rtol=1e-5)
  for name, want in want_grads.items():
    bound = 2e-5 * np.abs(want).max()
    np.testing.assert_allclose(
      grads[name], want, rtol=0, atol=bound, err_msg=name
    )
  return others


def _maxtext_config(block, model, **fields):
  """Returns the fields of MaxText's config that a recipe reads."""
  config = dict(
    decoder_block=SimpleNamespace(value=block),
    model_name=model,
    mlp_activations=["silu", "linear"],
    mlp_activations_limit=-1.0,
    routed_score_func="",
    routed_scaling_factor=1.0,
    n_routing_groups=-1,
    use_random_routing=False,
    quantization="",
    load_balance_loss_weight=0.01,
    routed_bias_update_rate=0.001,
  )
  return SimpleNamespace(**config | fields)


_MIXTRAL = _maxtext_config("mixtral", "mixtral-8x7b")
_DEEPSEEK = "deepseek", "deepseek3-671b"


@pytest.mark.parametrize("fsdp, tensor", [(2, 1), (1, 2)])
def test_maxtext(expected, fsdp, tensor):
  axes = {"data": 1, "fsdp": fsdp, "expert": 2, "tensor": tensor}
  column, row = P("expert", "fsdp", "tensor"), P("expert", "tensor")
  specs = dict(
    x=P(("data", "fsdp", "expert")),
    router=P(),
    w0=column,
    w1=column,
    wo=P("expert", "tensor", "fsdp"),
    **dict.fromkeys(_BIASES, row),
  )

  def model(v, kernels, biases):
    gate, scores, config = v["x"] @ v["router"], None, _MIXTRAL
    if tensor > 1:  # As in DeepSeek, with a bias of zero.
      gate = scores = jax.nn.softmax(gate)
      config = _maxtext_config(*_DEEPSEEK, routed_score_func="sigmoid")
    return maxtext.sparse_matmul(
      layer, config, v["x"], gate, scores, *kernels, *biases
    )

  with _layer_on(axes, "expert", ("data", "fsdp")) as layer:
    lb_loss, updates = _check(
      expected, layer.group, specs, model, gathers=fsdp > 1
    )

  # MaxText's formulas, in float64.
  def softmax(x):
    return np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)

  v = _values()
  gate = np.float64(v["x"]) @ v["router"]
  if tensor > 1:
    gate = softmax(gate)
  chosen = np.argsort(-gate)[..., :K]
  visits = (chosen[..., None] == np.arange(E)).any(axis=2)  # [B, S, E]
  products = visits.mean(axis=1) * softmax(gate).mean(axis=1)
  np.testing.assert_allclose(lb_loss, 0.01 * E**2 * products.mean(), rtol=1e-5)
  want = 0.001 * np.sign(B * S * K / E - visits.sum((0, 1)))
  np.testing.assert_allclose(updates, want, rtol=1e-6)


@pytest.mark.parametrize(
  "field, config",
  [
    ("decoder_block", _maxtext_config("gpt_oss", "gpt-oss-20b")),
    ("decoder_block", _maxtext_config("llama4", "llama4-17b-16e")),
    ("decoder_block", _maxtext_config("gemma4", "gemma4-26b")),
    ("decoder_block", _maxtext_config("deepseek4", "deepseek4-284b")),
    ("model_name", _maxtext_config("deepseek", "deepseek2-16b")),
    ("model_name", _maxtext_config("deepseek", "kimi-k2-1t")),
    ("routed_score_func", _maxtext_config(*_DEEPSEEK)),
    *(
      (field, _maxtext_config(*block, routed_score_func="sigmoid", **changes))
      for block, changes in [
        (_DEEPSEEK, dict(routed_scaling_factor=2.5)),
        (_DEEPSEEK, dict(n_routing_groups=8)),
        (_DEEPSEEK, dict(mlp_activations_limit=7.0)),
        (("mixtral", "mixtral-8x7b"), dict(mlp_activations=["gelu"])),
        (("mixtral", "mixtral-8x7b"), dict(use_random_routing=True)),
        (("mixtral", "mixtral-8x7b"), dict(quantization="fp8_full")),
      ]
      for field in changes
    ),
  ],
)
def test_maxtext_refuses_unsupported_fields(field, config):
  scores = jnp.zeros((B, S, E))
  pre_bias = scores if config.model_name.startswith("deepseek3") else None
  with pytest.raises(ValueError, match=f"MaxText's {field} = "):
    maxtext.sparse_matmul(None, config, None, scores, pre_bias, *[None] * 6)


_RANKS = P(("dp", "ep"))
_SPECS = dict(
  x=_RANKS, router=P(), **dict.fromkeys((*_KERNELS, *_BIASES), P("ep"))
)


def test_transformer_engine_ops(expected, layer):
  def of_rank(rows, counts, kernels, biases):
    """Applies a rank's experts; `counts` has the number of rows per expert."""
    rows, sizes, (w0, w1, wo) = rows[0], counts[0], kernels
    ids = jnp.repeat(jnp.arange(len(w0)), sizes, total_repeat_length=len(rows))
    b0, b1, bo = (b[ids] for b in biases)
    gate = lax.ragged_dot(rows, w0, sizes) + b0
    up = lax.ragged_dot(rows, w1, sizes) + b1
    return (lax.ragged_dot(jax.nn.silu(gate) * up, wo, sizes) + bo)[None]

  def model(v, kernels, biases, shape=(B, S)):
    topk_idx, topk_weights = ep.route_topk(v["x"] @ v["router"], K)
    capacity = layer.capacity_for(B * S // 4)
    rows, weights, mem, counts, total = transformer_engine.ep_dispatch(
      layer, topk_idx, v["x"], topk_weights, capacity
    )
    out = jax.shard_map(
      of_rank,
      mesh=layer.group.mesh,
      in_specs=(_RANKS, _RANKS, P("ep"), P("ep")),
      out_specs=_RANKS,
    )(rows, counts, kernels, biases)
    y = transformer_engine.ep_combine(
      layer, mem, counts, out * weights[..., None], shape
    )
    return y, total

  (total,) = _check(expected, layer.group, _SPECS, model)
  with pytest.raises(ValueError, match="num_local_tokens = 16, but"):
    _check(expected, layer.group, _SPECS, functools.partial(model, shape=B * S))
  assert total.shape == (4, 1) and total.sum() == B * S * K
