# SPDX-License-Identifier: Apache-2.0
"""Ops take arrays of NumPy and lists, and refuse a foreign mesh or view.

Calls outside `jax.jit` compile each program once and keep no group open.
"""

import contextlib
import types
import weakref

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec
import numpy as np
import pytest

from cases import Case, global_view
from conftest import make_mesh, refused, to_global
import ep
from groups import bootstrap, E, group, H, K, layer, T
from op_functions import round_trip

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


def moe(array=np.asarray, topk_idx=None):
  return ep.moe_layer(
    layer(),
    array(zeros(N, H)),
    array(IDS) if topk_idx is None else topk_idx,
    array(WEIGHTS),
    w_up=array(zeros(E, H, 2)),
    w_down=array(zeros(E, 2, H)),
  )


def test_arrays_of_numpy_and_lists():
  """Ops take any array or list that `jnp.asarray` takes."""

  def variable(array):  # like a variable of Keras
    x = jnp.array(array)
    return types.SimpleNamespace(__jax_array__=lambda: x, __array__=x.__array__)

  def call():
    handle = prepare(IDS.tolist())
    rows, _ = ep.ep_dispatch(handle, zeros(N, H).tolist(), WEIGHTS.tolist())
    out = ep.ep_combine(handle, np.zeros(rows.shape, np.float32).tolist())
    return out, moe(array=np.ndarray.tolist), moe(array=variable)

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


@pytest.mark.parametrize(
  "shape, call",
  [
    ((N, K), prepare),
    ((N, K), lambda ids: ep.route_topk(zeros(N, E), K, forced_idx=ids)),
    ((N, K), lambda ids: ep.route_topk(zeros(N, E), K, captured_idx=ids)),
    ((N, K), lambda ids: ep.load_balancing_loss(zeros(N, E), ids)),
    ((N, K), lambda ids: moe(topk_idx=ids)),
    ((2,), lambda n: ep.grouped_matmul(zeros(3, 4), zeros(2, 4, 5), n)),
    ((4,), exchange),
  ],
)
def test_no_integer_of_numpy_or_python_wraps(shape, call):
  """JAX would keep the low 32 bits, and turn a large uint32 into -1."""
  jax.eval_shape(lambda: call(np.zeros(shape, np.int64)))
  for wide, form in [
    (2**32 + 2, np.ndarray.tolist),
    (np.uint32(2**32 - 1), np.asarray),
  ]:
    array = form(np.full(shape, wide))
    assert_refused(lambda array=array: call(array), f" holds {wide}", "2^31")


@pytest.mark.parametrize("name", ["forced_idx", "captured_idx"])
def test_no_integer_of_a_program_wraps(name):
  """A program turns an integer beyond 32 bits into an invalid id or size."""
  route = jax.jit(lambda i: ep.route_topk(zeros(1, E), 1, **{name: i})[0])
  multiply = jax.jit(ep.grouped_matmul)
  with jax.enable_x64(True):
    wide = jnp.int64(2**32 + 3)
    idx = route(wide.reshape(1, 1))
    assert idx.dtype == jnp.int32 and not -1 <= idx[0, 0] < E
    with pytest.raises(ep.EpError, match="group_sizes"):
      jax.block_until_ready(multiply(zeros(4, 2), zeros(1, 2, 3), wide[None]))


# --- Calls outside of jit ----------------------------------------------------

F = 6  # inner size of an expert

_COMPILED = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def compilations():
  """Yields a list that gets an entry for each program compiled in the block."""
  found = []

  def listen(event, duration, **_):
    if event == _COMPILED:
      found.append(duration)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield found
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)


def grad(fn):
  def call(*args):
    out, vjp = jax.vjp(fn, *args)
    return out, vjp(out)

  return call


def of_ops(case):
  """Returns a function of ops, and its arguments: a routing and arrays."""
  inputs = case.topk_idx, case.tokens(), case.weights()
  return global_view(case.layer, round_trip), [*map(case.put, inputs)]


def of_layer(case):
  def call(topk_idx, tokens, weights, experts):
    return ep.moe_layer(case.layer, tokens, topk_idx, weights, **experts)

  group = case.layer.group
  rng = np.random.default_rng(1)
  experts = {
    name: to_global(
      rng.normal(size=shape).astype(np.float32),
      group.mesh,
      PartitionSpec(group.axis_name),
    )
    for name, shape in dict(w_up=(E, H, F), w_down=(E, F, H)).items()
  }
  return call, [*of_ops(case)[1], experts]


def transformed(transform, fn):
  """Returns a function that transforms a new closure of `fn` in each call."""

  def call(topk_idx, *arrays):
    return transform(lambda *x: fn(topk_idx, *x))(*arrays)

  return call


@pytest.mark.parametrize("of", [of_ops, of_layer])
def test_a_second_call_compiles_nothing(of):
  fn, inputs = of(Case(layer("dp2_ep2"), "with_unused_choices", whole=True))
  fn = transformed(grad, fn)
  with compilations() as found:
    fn(*inputs)
  assert found  # fails if JAX has renamed the event
  with compilations() as found:
    fn(*inputs)
  assert not found


def test_a_repeated_layer_is_traced_once():
  calls = []

  def activation(x):
    calls.append(x)
    return jax.nn.silu(x)

  def calls_of(repeats, inner):
    calls.clear()
    config = ep.MoEConfig(H, inner, E, K, activation=activation)
    moe = ep.MoE(config, group())

    def step(params, x):
      for _ in range(repeats):
        x, _ = moe(params, x)
      return x

    params = jax.eval_shape(lambda: ep.moe.init(jax.random.key(0), config))
    jax.jit(step).trace(params, zeros(N, H))
    return len(calls)

  once = calls_of(1, inner=4)
  assert 0 < calls_of(3, inner=6) <= once


def test_a_group_closes_with_its_last_reference():
  """No program and no reference cycle keeps the group alive."""
  group = bootstrap(make_mesh({"ep": 4}))
  case = Case(ep.EpLayerConfig(group), whole=True)
  fn, inputs = of_ops(case)
  of_a_layer, inputs_of_layer = of_layer(case)
  jax.block_until_ready(transformed(grad, fn)(*inputs))
  jax.block_until_ready(of_a_layer(*inputs_of_layer))
  jax.block_until_ready(jax.jit(fn)(*inputs))
  lost = weakref.ref(group)
  del group, case, fn, of_a_layer
  assert lost() is None
