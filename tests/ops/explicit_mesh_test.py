# SPDX-License-Identifier: Apache-2.0
"""Ops on Explicit axes, the default of `jax.make_mesh`, take any sharding."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
import numpy as np
import pytest

from conftest import assert_shards_close, make_mesh, to_global
import ep
from groups import bootstrap, E, H, K, T
from layer_steps import draw_params, whole

AUTO, EXPLICIT = (AxisType.Auto,) * 2, (AxisType.Explicit,) * 2
RANKS = PartitionSpec(("dp", "ep"))
CONFIG = ep.MoEConfig(H, 4, E, K, shared_inner=2, jitter=0.1)


@functools.cache
def inputs():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(4 * T, H)).astype(np.float32)
  return x, draw_params(CONFIG, lambda shape: rng.normal(size=shape) / 3)


def ops(layer, x, params):
  topk_idx, topk_weights = ep.route_topk(x @ params["router"], K)
  handle = ep.ep_prepare(layer, topk_idx)
  return ep.ep_combine(handle, *ep.ep_dispatch(handle, x, topk_weights))


def moe_layer(layer, x, params):
  topk = ep.route_topk(x @ params["router"], K)
  matrices = {n: p for n, p in params.items() if n.startswith("w_")}
  return ep.moe_layer(layer, x, *topk, **matrices)


def whole_layer(layer, x, params):
  key = jax.random.key(1)
  return ep.MoE(CONFIG, layer.group)(params, x, key=key)[0]


PARTS = ops, moe_layer, whole_layer


def everything(layer, *args):
  return {part.__name__: part(layer, *args) for part in PARTS}


def with_grads(layer, parts=PARTS):
  def call(*args):
    found = {}
    for part in parts:
      out, vjp = jax.vjp(functools.partial(part, layer), *args)
      found[part.__name__] = out, vjp(out)
    return found

  return call


def as_needed(mesh, x, params):
  specs = ep.moe.partition_specs(CONFIG)
  place = {n: to_global(p, mesh, specs[n]) for n, p in params.items()}
  return to_global(x, mesh, RANKS), place


def otherwise(mesh, x, params):
  """Splits arrays of even length over other axes than the layer needs."""

  def place(x, axes):
    return to_global(x, mesh, PartitionSpec(None if len(x) % 2 else axes))

  return place(x, ("ep", "dp")), {n: place(p, "dp") for n, p in params.items()}


@functools.cache
def layer(*axis_types):
  mesh = make_mesh(dict(dp=2, ep=2), axis_types)
  return ep.EpLayerConfig(bootstrap(mesh))


@functools.cache
def compiled(*axis_types):
  """Returns a program whose arguments need no resharding."""
  bound = layer(*axis_types)
  args = as_needed(bound.group.mesh, *inputs())
  return jax.jit(with_grads(bound)).lower(*args).compile()


@functools.cache
def expected():
  """Returns the results on Auto axes, as numpy arrays."""
  return whole(compiled(*AUTO)(*as_needed(layer(*AUTO).group.mesh, *inputs())))


def check_outputs(got):
  for name, (want, _) in expected().items():
    assert_shards_close(got[name], want, 1e-5, 1e-5)


def check(run, place):
  """Checks results, and that gradients have the sharding of the arguments."""
  given = place(layer(*EXPLICIT).group.mesh, *inputs())
  for name, (out, grads) in run(*given).items():
    want, want_grads = expected()[name]
    assert_shards_close(out, want, 1e-5, 1e-5)
    leaves = map(jax.tree.leaves, (grads, want_grads, given))
    for grad, want, arg in zip(*leaves, strict=True):
      assert_shards_close(grad, want, 1e-5, 1e-5)
      assert grad.sharding.is_equivalent_to(arg.sharding, arg.ndim)


def test_arguments_where_they_are_needed():
  check(compiled(*EXPLICIT), as_needed)


def test_arguments_of_another_sharding():
  check(jax.jit(with_grads(layer(*EXPLICIT), [ops, whole_layer])), otherwise)


def test_replicated_arguments_in_the_context_of_the_mesh():
  bound = layer(*EXPLICIT)
  args = jax.tree.map(lambda x: to_global(x, bound.group.mesh), inputs())
  with jax.set_mesh(bound.group.mesh):
    out = jax.jit(functools.partial(everything, bound))(*args)
  check_outputs(out)
  assert np.isfinite(jnp.sum(out["whole_layer"] ** 2).addressable_data(0))


def test_numpy_arrays_on_axes_of_both_kinds():
  bound = layer(*EXPLICIT[:1], *AUTO[:1])
  check_outputs(jax.jit(functools.partial(everything, bound))(*inputs()))


def test_outside_of_jit(recwarn):
  """A warning names each array that JAX reshards."""
  bound = layer(*EXPLICIT)
  check_outputs(everything(bound, *otherwise(bound.group.mesh, *inputs())))
  wrong = {"x", "tokens", "topk_idx", "topk_weights", "w_up", "w_gate"}
  assert resharded_arrays(recwarn) >= wrong


def resharded_arrays(warnings):
  resharded = {str(w.message).split(" of shape")[0] for w in warnings}
  return {m.rpartition(": ")[2] for m in resharded if "layer" in m}


def test_gradients_outside_of_jit(recwarn):
  """JAX needs the mesh as context even for the gradient of a sum."""
  bound = layer(*EXPLICIT)
  with jax.set_mesh(bound.group.mesh):
    check(with_grads(bound, [moe_layer]), as_needed)
  assert not resharded_arrays(recwarn)


def test_an_array_of_one_device_is_refused():
  x = jax.device_put(np.zeros((4 * T, K), np.int32), jax.local_devices()[0])
  words = r"topk_idx of shape.*the op needs NamedSharding.*\('dp', 'ep'\)"
  with pytest.raises(ValueError, match=words):
    ep.ep_prepare(layer(*EXPLICIT), x)


def test_no_collective_is_added_where_shardings_fit():
  def collectives(*axis_types):
    hlo = compiled(*axis_types).as_text()
    return collections.Counter(re.findall(r" (all-\w+|collective-\w+)\(", hlo))

  assert collectives(*EXPLICIT) == collectives(*AUTO)


@pytest.mark.parametrize(
  "axes",
  [PartitionSpec("dp"), PartitionSpec("ep"), PartitionSpec(), RANKS],
  ids=str,
)
@pytest.mark.parametrize("part", [moe_layer, whole_layer])
def test_the_output_of_a_layer_has_the_sharding_of_its_tokens(part, axes):
  """The layers reshard only where they must, by collectives with a name."""
  bound = layer(*EXPLICIT)
  mesh = bound.group.mesh
  whole_x, params = inputs()
  _, params = as_needed(mesh, whole_x, params)
  x = to_global(whole_x.reshape(4, T, H), mesh, axes)

  def block(x, params):
    return x + part(bound, x, params)

  def step(x, params):
    out, vjp = jax.vjp(block, x, params)
    assert jax.typeof(out).sharding.spec == jax.typeof(x).sharding.spec
    return out, vjp(out)

  with jax.set_mesh(mesh):
    compiled = jax.jit(step).lower(x, params).compile()
    out, _ = compiled(x, params)
  ep.assert_no_hidden_collectives(compiled, allow=["all-reduce"])
  is_moved = re.search(r"all-gather.*ep_reshard", compiled.as_text())
  assert bool(is_moved) == (axes != RANKS)
  if part is moe_layer:  # the jitter of a whole layer depends on the shape
    want, _ = expected()[part.__name__]
    assert_shards_close(out, (want + whole_x).reshape(4, T, H), 1e-5, 1e-5)


def moved(bound, x, matrix):
  spec = PartitionSpec("ep")
  new = ep.Placement([*range(bound.group.num_expert_slots)][::-1])
  return ep.moe.move(bound.group, matrix, spec, old=None, new=new)


def matrices_of_a_layer(bound, x, matrix):
  ids = jnp.zeros((len(x), 1), jnp.int32)
  matrices = dict(w_up=matrix, w_down=matrix.mT)
  return ep.moe_layer(bound, x, ids, jnp.ones_like(x[:, :1]), **matrices)


@pytest.mark.parametrize("part", [moved, matrices_of_a_layer])
def test_other_arrays_than_tokens_are_resharded_in_sight(part):
  mesh = make_mesh({"ep": 4}, (AxisType.Explicit,))
  x = to_global(np.zeros((4 * T, H), np.float32), mesh, PartitionSpec("ep"))
  with bootstrap(mesh) as group, jax.set_mesh(mesh):
    bound = ep.EpLayerConfig(group, top_k=1)

    def hlo(spec):
      matrix = to_global(np.zeros((E, H, 8), np.float32), mesh, spec)
      step = jax.jit(lambda *args: part(bound, *args))
      return step.lower(x, matrix).compile().as_text()

    allow = ["ragged_all_to_all"]  # of ep.moe.move
    ep.assert_no_hidden_collectives(hlo(PartitionSpec("ep")), allow)
    split_otherwise = hlo(PartitionSpec(None, None, "ep"))
    with pytest.raises(AssertionError, match="all-to-all"):
      ep.assert_no_hidden_collectives(split_otherwise, allow)
