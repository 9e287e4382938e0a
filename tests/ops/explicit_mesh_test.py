# SPDX-License-Identifier: Apache-2.0
"""On Explicit axes, the default of `jax.make_mesh`, any sharding will do."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np
import pytest

from conftest import assert_shards_close, make_mesh, to_global
import ep
from groups import bootstrap, E, H, K, T

AUTO, EXPLICIT = (AxisType.Auto,) * 2, (AxisType.Explicit,) * 2
RANKS = PartitionSpec(("dp", "ep"))
CONFIG = ep.MoEConfig(H, 4, E, K, shared_inner=2, jitter=0.1)


@functools.cache
def inputs():
  rng = np.random.default_rng(0)
  params = ep.moe.init(jax.random.key(0), CONFIG)
  return dict(
    x=rng.normal(size=(4 * T, H)).astype(np.float32),
    params={n: np.asarray(p) for n, p in params.items()},
  )


def everything(layer, args):
  """Returns the results of the ops and of both layers."""
  x, params = args["x"], args["params"]
  topk = ep.route_topk(x @ params["router"], K)
  handle = ep.ep_prepare(layer, topk[0])
  matrices = {n: p for n, p in params.items() if n.startswith("w_")}
  return dict(
    ops=ep.ep_combine(handle, *ep.ep_dispatch(handle, x, topk[1])),
    moe_layer=ep.moe_layer(layer, x, *topk, **matrices),
    whole_layer=ep.MoE(CONFIG, layer.group)(params, x, key=jax.random.key(1))[
      0
    ],
  )


def with_grads(layer):
  def call(args):
    out, vjp = jax.vjp(lambda args: everything(layer, args), args)
    return out, *vjp(out)

  return call


def as_needed(mesh, args):
  specs = ep.moe.partition_specs(CONFIG)
  place = {n: to_global(p, mesh, specs[n]) for n, p in args["params"].items()}
  return dict(x=to_global(args["x"], mesh, RANKS), params=place)


def otherwise(mesh, args):
  """Splits the first axis of each array, if it can be, over other axes."""

  def place(x, axes):
    return to_global(x, mesh, PartitionSpec(None if len(x) % 2 else axes))

  params = {n: place(p, "dp") for n, p in args["params"].items()}
  return dict(x=place(args["x"], ("ep", "dp")), params=params)


PLACES = {
  "numpy": lambda mesh, args: args,
  "replicated": lambda mesh, args: jax.tree.map(
    lambda x: to_global(x, mesh), args
  ),
  "as_needed": as_needed,
  "otherwise": otherwise,
}


@functools.cache
def layer(*axis_types):
  mesh = make_mesh(dict(dp=2, ep=2), axis_types)
  return ep.EpLayerConfig(bootstrap(mesh))


@functools.cache
def program(*axis_types):
  return jax.jit(with_grads(layer(*axis_types)))


@functools.cache
def compiled(*axis_types):
  """Returns a program whose arguments are where they are needed."""
  args = as_needed(layer(*axis_types).group.mesh, inputs())
  return program(*axis_types).lower(args).compile()


@functools.cache
def expected():
  """Returns the results on Auto axes, as numpy arrays."""
  mesh = layer(*AUTO).group.mesh
  gather = jax.jit(
    lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec())
  )
  results = gather(compiled(*AUTO)(as_needed(mesh, inputs())))
  return jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), results)


def check(run, place, *axis_types):
  """Checks results, and that gradients have the sharding of the arguments."""
  given = PLACES[place](layer(*axis_types).group.mesh, inputs())
  got = run(given)
  for a, b in zip(*map(jax.tree.leaves, (got, expected())), strict=True):
    assert_shards_close(a, b, 1e-5, 1e-5)
  if place != "numpy":
    for grad, arg in zip(*map(jax.tree.leaves, (got[1], given)), strict=True):
      assert grad.sharding.is_equivalent_to(arg.sharding, arg.ndim)
  return got


@pytest.mark.parametrize("place", PLACES)
def test_arguments_of_any_sharding(place):
  run = compiled if place == "as_needed" else program
  out, _ = check(run(*EXPLICIT), place, *EXPLICIT)
  assert np.isfinite(jnp.sum(out["whole_layer"] ** 2).addressable_data(0))


def test_in_the_context_of_the_mesh():
  with jax.set_mesh(layer(*EXPLICIT).group.mesh):
    check(program(*EXPLICIT), "otherwise", *EXPLICIT)


def test_axes_of_both_kinds():
  both = EXPLICIT[:1] + AUTO[:1]
  check(program(*both), "numpy", *both)


@pytest.mark.parametrize("place", ["numpy", "as_needed", "otherwise"])
def test_outside_of_jit(place, recwarn):
  """An array that JAX moves gives a warning that names it."""
  bound = layer(*EXPLICIT)
  out = everything(bound, PLACES[place](bound.group.mesh, inputs()))
  for name, want in expected()[0].items():
    assert_shards_close(out[name], want, 1e-5, 1e-5)
  moved = {str(w.message).split(" of shape")[0] for w in recwarn}
  names = {m.rpartition(": ")[2] for m in moved if "layer" in m}
  wrong = {"x", "tokens", "topk_idx", "topk_weights", "w_up", "w_gate"}
  assert names >= wrong if place == "otherwise" else not names


def test_gradients_outside_of_jit():
  """JAX itself demands the context for them, even for those of a sum."""
  with jax.set_mesh(layer(*EXPLICIT).group.mesh):
    check(with_grads(layer(*EXPLICIT)), "as_needed", *EXPLICIT)


def test_an_array_of_one_device_is_refused():
  """The error names the array and the sharding that the op needs."""
  x = jax.device_put(np.zeros((4 * T, K), np.int32), jax.local_devices()[0])
  words = r"topk_idx of shape.*the op needs NamedSharding.*\('dp', 'ep'\)"
  with pytest.raises(ValueError, match=words):
    ep.ep_prepare(layer(*EXPLICIT), x)


def test_no_collective_is_added_where_shardings_fit():
  def collectives(*axis_types):
    hlo = compiled(*axis_types).as_text()
    return collections.Counter(re.findall(r" (all-\w+|collective-\w+)\(", hlo))

  assert collectives(*EXPLICIT) == collectives(*AUTO)
