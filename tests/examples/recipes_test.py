# SPDX-License-Identifier: Apache-2.0
"""The recipes for Flax and Equinox agree with `ep.MoE`.

The recipe for MaxText changes the text of MaxText only where it may.
"""

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
from recipes import equinox_moe, flax_moe, maxtext_moe

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


# The names in MaxText that the recipe uses.
_MOE = """
class RouteMetadata:
  shard: int

class RoutedMoE:

  @staticmethod
  def get_ragged_buffer_size(
      local_batch, ep_degree, global_experts, top_k, ragged_buffer_factor
  ):
    return 0

  def sparse_matmul(self):
    def jax_ragged_dot_gmm(
        inputs, kernel, tiling, group_sizes, expert_assignments, padding_amount
    ):
      \"\"\"Multiplies.\"\"\"
      return inputs

    def ra2a_and_route(
        x, logits, pre_bias_logits, num_ep, expert_shard_id, rngs,
        input_ids=None,
    ):
      (
          x, sorted_selected_experts, weights, group_sizes, selected_experts,
          lb_loss, bias_updates, local_group_sizes,
      ) = self.permute()
      if num_ep > 1:
        pass
      return RouteMetadata(
          shard=expert_shard_id,
      )

    def unsort_output_and_ra2a(
        intermediate_output, routing, route_metadata, output_shape,
        is_batch_sharded_by_expert,
    ):
      \"\"\"Sends rows back.\"\"\"
      return intermediate_output
"""
_TYPES = """
class MoEGeneral:
  use_ring_of_experts: bool = False

  def check(self):
    if True:
      self.validate_ragged_buffer_factor()
"""


def _checkout(folder, moe):
  for name, source in (("layers/moe", moe), ("configs/types", _TYPES)):
    path = folder / f"src/maxtext/{name}.py"
    path.parent.mkdir(parents=True)
    path.write_text(source)
  return folder


def test_maxtext_changes_only_exchange_and_matmul(tmp_path):
  """maxtext_test runs the changed code in MaxText; CI only finds the places."""
  lines = maxtext_moe.diff(_checkout(tmp_path, _MOE)).splitlines()
  removed = [x for x in lines if x.startswith("-") and not x.startswith("---")]
  assert removed == ["-      if num_ep > 1:"]
  added = "\n".join(x[1:] for x in lines if x.startswith("+"))
  for text in (
    ", cfg.ragged_buffer_factor",
    "elif num_ep > 1:",
    "ep_dispatch(",
    "grouped_matmul(",
    "ep_combine(",
    "ep_handle=",
  ):
    assert added.count(text) == 1


@pytest.mark.parametrize(
  "old, new",
  [
    ("expert_shard_id, rngs,", "rngs,"),
    ("weights, group_sizes,", "scores, group_sizes,"),
    ("if num_ep > 1", "if num_ep >= 2"),
    # More steps than the new code replaces.
    (
      "      if num_ep > 1:",
      "      if log:\n        log(x)\n      if num_ep > 1:",
    ),
  ],
)
def test_maxtext_refuses_what_it_does_not_know(tmp_path, old, new):
  assert old in _MOE
  with pytest.raises(ValueError, match="[02] places with .*needs exactly one"):
    maxtext_moe.diff(_checkout(tmp_path, _MOE.replace(old, new)))
