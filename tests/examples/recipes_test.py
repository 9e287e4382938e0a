# SPDX-License-Identifier: Apache-2.0
"""The recipes for Flax and Equinox agree with `ep.MoE`."""

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
from recipes import equinox_moe, flax_moe

H, F, E, K = 8, 16, 8, 2
_CONFIG = ep.MoEConfig(hidden=H, inner=F, num_experts=E, top_k=K)
_STEPS = 3
# Weight decay would change the router's bias if the bias were a parameter.
_OPTIMIZER = optax.adamw(1e-2, weight_decay=0.1)


@pytest.fixture(scope="module")
def layer():
  with ep.ep_bootstrap(
    make_mesh({"dp": 2, "ep": 2}),
    num_experts=E,
    top_k=K,
    timeout_s=TIMEOUT_S,
  ) as group:
    yield ep.EpLayerConfig(group)


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
  """NNX derives the shardings of variables and of their moments."""

  @nnx.jit
  def create():
    model = flax_moe.MoE(moe, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, _OPTIMIZER, wrt=nnx.Param)

  def check(x, sharding):
    assert x.sharding.is_equivalent_to(sharding, x.ndim)

  mesh = moe.group.mesh
  with jax.set_mesh(mesh):
    model, optimizer = create()
  specs = nnx.get_partition_spec(nnx.state(model))["params"]
  assert {n: v.get_value() for n, v in specs.items()} == moe.specs()
  state = nnx.state((model, optimizer))
  jax.tree.map(check, state, nnx.get_named_sharding(state, mesh))
