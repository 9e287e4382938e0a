# SPDX-License-Identifier: Apache-2.0
"""Ops take arrays of NumPy and lists, and refuse a foreign mesh or view."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec
import numpy as np
import pytest

from conftest import refused
import ep
from groups import E, group, H, K, layer, T

N = 4 * T  # Tokens of all ranks.
C = 4 * T * 2  # The worst case with two local experts.


def zeros(*shape, dtype=np.float32):
  return np.zeros(shape, dtype)


def ids(*shape, dtype=np.int32):
  return np.full(shape, -1, dtype)


def assert_refused(fn, *words):
  """Checks that tracing `fn` raises an error with all words."""
  with refused(*words):
    jax.eval_shape(fn)


IDS, WEIGHTS = ids(N, K), zeros(N, K)


def prepare(topk_idx=IDS, config=None):
  return ep.ep_prepare(config or layer(name="moe_3"), topk_idx)


def dispatch(tokens, weights=WEIGHTS, config=None):
  return ep.ep_dispatch(prepare(config=config), tokens, weights)


def combine(rows, weights=None):
  return ep.ep_combine(prepare(), rows, weights)


def moe(config, n=N, array=np.asarray, topk_idx=None, routed=None, **options):
  routed = routed or n
  return ep.moe_layer(
    config,
    array(zeros(n, H)),
    array(ids(routed, K)) if topk_idx is None else topk_idx,
    array(zeros(routed, K)),
    w_up=array(zeros(E, H, 2)),
    w_down=array(zeros(E, 2, H)),
    **options,
  )


@pytest.mark.parametrize("array", [np.asarray, np.ndarray.tolist])
def test_arrays_of_numpy_and_lists(array):
  """Ops take any array or list that `jnp.asarray` takes."""

  def call():
    handle = prepare(array(ids(N, K)))
    rows, _ = ep.ep_dispatch(handle, array(zeros(N, H)), array(zeros(N, K)))
    out = ep.ep_combine(handle, array(zeros(*rows.shape)))
    return out, moe(layer(), array=array)

  for out in jax.eval_shape(call):
    assert (out.shape, out.dtype) == ((N, H), jnp.float32)


@pytest.mark.parametrize("op", [ep.ep_dispatch, ep.ep_combine])
def test_a_handle_of_the_other_view(op):
  """Backends would read the bytes of another rank, or refuse a shape."""
  ranks, specs = PartitionSpec("ep"), dict(mesh=group().mesh)
  local = jax.shard_map(
    lambda idx: ep.ep_prepare(layer(), idx),
    in_specs=ranks,
    out_specs=ranks,
    **specs,
  )

  def inside(handle, *arrays):
    specs["in_specs"] = (PartitionSpec(), *[ranks] * len(arrays))
    return jax.shard_map(op, out_specs=ranks, **specs)(handle, *arrays)

  arrays = [zeros(N, H), WEIGHTS] if op is ep.ep_dispatch else [zeros(4 * C, H)]
  name = op.__name__
  assert_refused(
    lambda: inside(prepare(), *arrays), name, "handle.mem is uint8 [4, "
  )
  assert_refused(
    lambda: op(local(IDS), *arrays), name, "but uint8 [4, ", "outside"
  )


@pytest.mark.parametrize(
  "axes, manual, words",
  [
    ({"ep": 4}, {"ep"}, ["4", "2"]),
    ({"x": 4}, {"x"}, ["x", "ep"]),
    ({"x": 2, "ep": 2}, {"x", "ep"}, ["x", "dp", "ep_bootstrap"]),
    ({"dp": 2, "ep": 2}, {"ep"}, ["dp", "manual"]),
  ],
)
def test_a_mesh_that_is_not_the_groups(axes, manual, words):
  devices = np.array(jax.devices()[:4]).reshape(*axes.values())
  mesh = Mesh(devices, [*axes], axis_types=(AxisType.Auto,) * len(axes))
  config = layer("dp2_ep2", name="moe_3")
  over_ranks = PartitionSpec(tuple(axis for axis in axes if axis in manual))
  call = jax.shard_map(
    lambda idx: prepare(idx, config).group_sizes,
    mesh=mesh,
    in_specs=over_ranks,
    out_specs=over_ranks,
    axis_names=manual,
  )
  words = "ep_prepare", '"moe_3"', "mesh", *words
  assert_refused(lambda: call(ids(N, K)), *words)


def exchange(offsets):
  def move():
    rows, zero = zeros(3, H), ids(4) * 0
    return ep.lax.ragged_all_to_all(
      rows, rows, offsets, zero, zero, zero, axis_name="ep"
    )

  specs = dict(in_specs=(), out_specs=PartitionSpec("ep"))
  return jax.shard_map(move, mesh=group().mesh, **specs)()


def whole_layer(ids):
  config = ep.MoEConfig(H, 2, E, K)
  params = jax.eval_shape(lambda: ep.moe.init(jax.random.key(0), config))
  return jax.eval_shape(
    lambda params: ep.MoE(config, group())(params, zeros(N, H), forced_idx=ids),
    params,
  )


@pytest.mark.parametrize(
  "shape, call",
  [
    ((N, K), prepare),
    ((N, K), lambda ids: ep.route_topk(zeros(N, E), K, forced_idx=ids)),
    ((N, K), lambda ids: ep.route_topk(zeros(N, E), K, captured_idx=ids)),
    ((N, K), lambda ids: ep.load_balancing_loss(zeros(N, E), ids)),
    ((N, K), lambda ids: moe(layer(), topk_idx=ids)),
    ((N, K), whole_layer),
    ((2,), lambda n: ep.grouped_matmul(zeros(3, 4), zeros(2, 4, 5), n)),
    ((4,), exchange),
  ],
)
def test_no_integer_of_numpy_or_python_wraps(shape, call):
  """JAX would keep the low 32 bits, and turn a large uint32 into -1."""
  jax.eval_shape(lambda: call(np.zeros(shape, np.int64)))
  for wide, form in [
    (-(2**33) + 1, np.asarray),
    (2**32 + 2, np.ndarray.tolist),
    (np.uint32(2**32 - 1), np.asarray),
    (np.uint64(2**63), np.ndarray.tolist),
  ]:
    array = form(np.full(shape, wide))
    assert_refused(lambda array=array: call(array), f" holds {wide}", "2^31")


@pytest.mark.parametrize("name", ["forced_idx", "captured_idx"])
def test_no_integer_of_a_program_wraps(name):
  """A program turns an integer beyond 32 bits into an invalid id or size."""
  route = jax.jit(lambda i: ep.route_topk(zeros(1, E), 1, **{name: i})[0])
  multiply = jax.jit(ep.grouped_matmul)
  for value in 2**32 + 3, -(2**40) + 3, 2**32 - 1:
    with jax.enable_x64(True):
      wide = jnp.int64(value)
      idx = route(wide.reshape(1, 1))
      assert idx.dtype == jnp.int32 and not -1 <= idx[0, 0] < E
      with pytest.raises(ep.EpError, match="group_sizes"):
        jax.block_until_ready(multiply(zeros(4, 2), zeros(1, 2, 3), wide[None]))
