# SPDX-License-Identifier: Apache-2.0
"""MoE modules of Flax and Equinox train as the functions of ep.moe do."""

import functools

import equinox as eqx
from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

from conftest import make_mesh, TIMEOUT_S, to_global
import ep
from ep.examples.recipes import equinox_moe, flax_linen_moe, flax_nnx_moe

_CONFIG = ep.MoEConfig(hidden=8, inner=16, num_experts=4, top_k=2)
_STEPS = 3
# Weight decay would change a bias that an optimizer took for a parameter.
_OPTIMIZER = optax.adamw(1e-2, weight_decay=0.1)


@pytest.fixture(scope="module")
def layer():
  with ep.ep_bootstrap(
    make_mesh({"dp": 2, "ep": 2}),
    num_experts=_CONFIG.num_experts,
    max_tokens_per_rank=16,
    hidden_dim=_CONFIG.hidden,
    top_k=_CONFIG.top_k,
    max_token_dtype=jnp.float32,
    timeout_s=TIMEOUT_S,
  ) as group:
    yield _CONFIG.layer(group)


@pytest.fixture(scope="module")
def x(layer):
  x = np.random.default_rng(0).standard_normal((64, _CONFIG.hidden), np.float32)
  return to_global(x, layer.group.mesh, P(("dp", "ep")))


def _loss(y, metrics):
  return jnp.mean((y - 1.0) ** 2) + 1e-2 * metrics.aux_loss


@functools.partial(jax.jit, static_argnums=0)
def _step(layer, x, params, bias, optimizer):
  """Takes a training step with the functions of ep.moe."""

  def loss_fn(params):
    y, metrics = ep.moe.apply(layer, _CONFIG, params, x, bias=bias)
    return _loss(y, metrics), metrics.load

  grads, load = jax.grad(loss_fn, has_aux=True)(params)
  updates, optimizer = _OPTIMIZER.update(grads, optimizer, params)
  params = optax.apply_updates(params, updates)
  return params, ep.moe.update_bias(bias, load), optimizer


def _train_nnx(layer, x):
  model = flax_nnx_moe.MoE(_CONFIG, layer, rngs=nnx.Rngs(0))
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
  return first, params(), model.bias[...]


def _train_linen(layer, x):
  model = flax_linen_moe.MoE(_CONFIG, layer)
  variables = jax.jit(model.init)(jax.random.key(0), x)

  def loss_fn(params, router):
    variables = {"params": params, "router": router}
    result, changed = model.apply(variables, x, mutable="router")
    return _loss(*result), changed["router"]

  @jax.jit
  def step(params, router, optimizer):
    grads, router = jax.grad(loss_fn, has_aux=True)(params, router)
    updates, optimizer = _OPTIMIZER.update(grads, optimizer, params)
    return optax.apply_updates(params, updates), router, optimizer

  params, router = variables["params"], variables["router"]
  first, optimizer = params["moe"], _OPTIMIZER.init(params)
  for _ in range(_STEPS):
    params, router, optimizer = step(params, router, optimizer)
  return first, params["moe"], router["bias"]


def _train_equinox(layer, x):
  make = eqx.nn.make_with_state(equinox_moe.MoE)
  model, state = make(_CONFIG, layer, key=jax.random.key(0))
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
  return first, model.params, state.get(model.bias)


@pytest.mark.parametrize(
  "train", [_train_nnx, _train_linen, _train_equinox], ids=lambda f: f.__name__
)
def test_a_module_trains_as_the_functions_do(layer, x, train):
  """Parameters and bias have the same bits after a few steps."""
  first, params, bias = train(layer, x)
  want_bias, optimizer = jnp.zeros(_CONFIG.num_experts), _OPTIMIZER.init(first)
  want = first
  for _ in range(_STEPS):
    want, want_bias, optimizer = _step(layer, x, want, want_bias, optimizer)
  assert params.keys() == want.keys()
  for name in want:
    assert not np.array_equal(params[name], first[name]), name
    np.testing.assert_array_equal(params[name], want[name], err_msg=name)
  np.testing.assert_array_equal(bias, want_bias)
  assert np.abs(bias).max() > 0


def test_an_equinox_module_maps_over_sequences(layer, x):
  """Under vmap, as Equinox models are written, the results are the same."""
  make = eqx.nn.make_with_state(equinox_moe.MoE)
  model, state = make(_CONFIG, layer, key=jax.random.key(0))

  @eqx.filter_jit
  def both(x, state, same_state):
    mapped = jax.vmap(model, in_axes=(0, None), out_axes=(0, None, None))
    return model(x, state), mapped(x.reshape(16, 4, -1), same_state)

  (want_y, want, _), (y, got, _) = both(x, state, state)
  np.testing.assert_array_equal(y.reshape(x.shape), want_y)
  np.testing.assert_array_equal(got.load, want.load)
