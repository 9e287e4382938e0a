# SPDX-License-Identifier: Apache-2.0
"""Bad input is an error that names the op, the layer, and what is wrong.

A mistake that the shapes show is refused when the program is traced. A mistake
that only the values show fails on every rank when the program runs, and the
group goes on working.
"""

import contextlib
import dataclasses
import itertools
import time

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
import numpy as np
import pytest

from cases import assert_same, Case, expected, global_view
from conftest import make_mesh, TIMEOUT_S
import ep
from groups import (
  bootstrap,
  E,
  failing,
  GPU,
  group,
  H,
  K,
  layer,
  not_with_xla,
  T,
)
from op_functions import combine, dispatch, everything, Ops, round_trip, sizes

N = 4 * T  # Tokens of all ranks.


def zeros(*shape, dtype=np.float32):
  return np.zeros(shape, dtype)


def ids(*shape, dtype=np.int32):
  return np.full(shape, -1, dtype)


def assert_refused(fn, *words):
  """Checks that tracing `fn` is enough to see the mistake."""
  with pytest.raises((ValueError, TypeError)) as error:
    jax.eval_shape(fn)
  for word in words:
    assert word in str(error.value)


@pytest.mark.parametrize(
  "topk_idx, words",
  [
    (ids(N), ["topk_idx", "(20,)", "top_k", "3"]),
    (ids(N, K + 1), ["topk_idx", "(20, 4)", "top_k", "3"]),
    (zeros(N, K), ["topk_idx", "float32", "int32"]),
    (zeros(N, K, dtype=np.uint32), ["topk_idx", "uint32", "int32"]),
    (ids(N + 4, K), ["max_tokens_per_rank", "6", "5"]),
    (ids(4, 2, 3, K), ["max_tokens_per_rank", "6", "5"]),
    (ids(N - 1, K), ["19", "4"]),
  ],
)
def test_prepare_refuses(topk_idx, words):
  config = layer(name="moe_3")
  assert_refused(
    lambda: ep.ep_prepare(config, topk_idx), "ep_prepare", '"moe_3"', *words
  )


@pytest.mark.parametrize(
  "tokens, weights, words",
  [
    (zeros(N), zeros(N, K), ["tokens", "(20,)"]),
    (
      zeros(N, H + 1),
      zeros(N, K),
      ["tokens", f"{H + 1}", "hidden_dim", f"{H}"],
    ),
    (zeros(N - 4, H), zeros(N, K), ["tokens", f"(16, {H})", "5"]),
    (zeros(4, T, H), zeros(N, K), ["tokens", f"(4, 5, {H})", "5"]),
    (zeros(N, H, dtype=np.int32), zeros(N, K), ["tokens", "int32", "float32"]),
    (zeros(N, H), zeros(N), ["topk_weights", "(20,)"]),
    (zeros(N, H), zeros(N, K - 1), ["topk_weights", "(20, 2)", "3"]),
    (zeros(N, H), zeros(N - 4, K), ["topk_weights", "(16, 3)", "5"]),
    (zeros(N, H), ids(N, K), ["topk_weights", "int32", "float"]),
  ],
)
def test_dispatch_refuses(tokens, weights, words):
  config = layer(name="moe_3")
  assert_refused(
    lambda: ep.ep_dispatch(ep.ep_prepare(config, ids(N, K)), tokens, weights),
    "ep_dispatch",
    '"moe_3"',
    *words,
  )


C = 4 * T * 2  # The worst case with two local experts.


@pytest.mark.parametrize(
  "rows, weights, words",
  [
    (zeros(4, H), None, ["expert_out", f"(4, {H})", "40"]),
    (zeros(4, C - 1, H), None, ["expert_out", f"(4, 39, {H})", "40"]),
    (zeros(2, C, H), None, ["expert_out", f"(2, 40, {H})", "4"]),
    (
      zeros(4, C, H + 1),
      None,
      ["expert_out", f"{H + 1}", "hidden_dim", f"{H}"],
    ),
    (zeros(4, C, H, dtype=np.int8), None, ["expert_out", "int8", "float32"]),
    (zeros(4, C, H), zeros(4, C, 1), ["weights", "4, 40, 1", "4, 40"]),
    (zeros(4, C, H), zeros(N, K), ["weights", "20, 3", "4, 40"]),
    (zeros(4, C, H), ids(4, C), ["weights", "int32", "float"]),
  ],
)
def test_combine_refuses(rows, weights, words):
  config = layer(name="moe_3")
  assert_refused(
    lambda: ep.ep_combine(ep.ep_prepare(config, ids(N, K)), rows, weights),
    "ep_combine",
    '"moe_3"',
    *words,
  )


def moe(config, n=N, array=np.asarray, topk_idx=None, **options):
  return ep.moe_layer(
    config,
    array(zeros(n, H)),
    array(ids(n, K)) if topk_idx is None else topk_idx,
    array(zeros(n, K)),
    w_up=array(zeros(E, H, 2)),
    w_down=array(zeros(E, 2, H)),
    **options,
  )


@pytest.mark.parametrize("array", [np.asarray, np.ndarray.tolist])
def test_arrays_of_numpy_and_lists(array):
  """Whatever `jnp.asarray` takes is an array."""

  def call():
    handle = ep.ep_prepare(layer(), array(ids(N, K)))
    rows, _ = ep.ep_dispatch(handle, array(zeros(N, H)), array(zeros(N, K)))
    out = ep.ep_combine(handle, array(zeros(*rows.shape)))
    return out, moe(layer(), array=array)

  for out in jax.eval_shape(call):
    assert (out.shape, out.dtype) == ((N, H), jnp.float32)


@pytest.mark.parametrize(
  "name, call",
  [
    ("topk_idx", lambda n: ep.ep_prepare(layer(), ids(n, K))),
    (
      "tokens",
      lambda n: ep.ep_dispatch(
        ep.ep_prepare(layer(), ids(N, K)), zeros(n, H), zeros(N, K)
      ),
    ),
    (
      "topk_weights",
      lambda n: ep.ep_dispatch(
        ep.ep_prepare(layer(), ids(N, K)), zeros(N, H), zeros(n, K)
      ),
    ),
    ("tokens", lambda n: moe(layer(), n)),
  ],
)
@pytest.mark.parametrize("n", [1, 6])
def test_a_batch_that_does_not_divide_over_the_ranks(call, name, n):
  """The error names the array, the ranks and what to do."""
  words = [name, f"({n}, ", "4 ranks", "multiple of 4", "-1", "pad=True"]
  assert_refused(lambda: call(n), *words)


def test_a_routing_of_other_tokens():
  config = layer(name="moe_3")
  for n in 8, 24:
    assert_refused(
      lambda n=n: ep.moe_layer(
        config,
        zeros(N, H),
        ids(n, K),
        zeros(n, K),
        w_up=zeros(E, H, 2),
        w_down=zeros(E, 2, H),
      ),
      *["moe_layer", "moe_3", "topk_idx", f"({N}, {H}), ({n}, {K})", "route"],
    )


def test_tokens_wider_than_the_group_allows():
  config = ep.EpLayerConfig(group(max_token_dtype=jnp.bfloat16), name="moe_3")
  assert_refused(
    lambda: ep.ep_dispatch(
      ep.ep_prepare(config, ids(N, K)), zeros(N, H), zeros(N, K)
    ),
    "ep_dispatch",
    '"moe_3"',
    "float32",
    "bfloat16",
    "max_token_dtype",
  )


@pytest.mark.parametrize(
  "call, words",
  [
    (
      lambda: ep.ep_prepare(group(), ids(N, K)),
      ["ep_prepare", "EpGroup", "EpLayerConfig(group"],
    ),
    (lambda: moe(group()), ["moe_layer", "EpGroup", "EpLayerConfig(group"]),
    (
      lambda: moe(layer(), activation="gelu"),
      ["moe_layer", "activation", "'gelu'", "str", "jax.nn.gelu"],
    ),
    (lambda: moe(layer(), activation="best"), ["'best'", "a function"]),
    (lambda: ep.describe(layer()), ["describe", "EpLayerConfig", "EpHandle"]),
    (
      lambda: ep.ep_dispatch(group(), zeros(N, H), zeros(N, K)),
      ["ep_dispatch", "EpGroup", "ep_prepare returned"],
    ),
    (
      lambda: ep.ep_combine(
        jax.tree.leaves(ep.ep_prepare(layer(), ids(N, K))), zeros(4, C, H)
      ),
      ["ep_combine", "list", "ep_prepare returned"],
    ),
    (
      lambda: ep.ep_dispatch(layer(), zeros(N, H), zeros(N, K)),
      ["ep_dispatch", "EpLayerConfig"],
    ),
    (
      lambda: ep.ep_combine(zeros(4, C, H), zeros(4, C, H)),
      ["ep_combine", "EpHandle"],
    ),
  ],
)
def test_arguments_that_were_mixed_up(call, words):
  assert_refused(call, *words)


def in_shard_map(axes, manual=None):
  """Returns a call of prepare in a `shard_map` over another mesh."""
  size = np.prod(list(axes.values()))
  mesh = jax.make_mesh(
    tuple(axes.values()),
    tuple(axes),
    axis_types=(AxisType.Auto,) * len(axes),
    devices=jax.devices()[:size],
  )
  config = layer("dp2_ep2", name="moe_3")
  spec = PartitionSpec(manual or tuple(axes))
  return lambda: jax.shard_map(
    lambda idx: ep.ep_prepare(config, idx).group_sizes,
    mesh=mesh,
    in_specs=spec,
    out_specs=spec,
    axis_names={manual} if manual else set(axes),
  )(ids(N, K))


@pytest.mark.parametrize(
  "axes, manual, words",
  [
    ({"ep": 4}, None, ["4", "2"]),
    ({"ep": 1}, None, ["1", "2"]),
    ({"x": 4}, None, ["x", "ep"]),
    ({"x": 2, "ep": 2}, None, ["x", "dp", "ep_bootstrap"]),
    ({"dp": 2, "ep": 2}, "ep", ["dp", "manual"]),
  ],
)
def test_a_mesh_that_is_not_the_groups(axes, manual, words):
  assert_refused(
    in_shard_map(axes, manual), "ep_prepare", '"moe_3"', "mesh", *words
  )


def with_id(value, at, dtype=np.int32, **options):
  """Returns a case whose routing has this id at `at`, (token, choice)."""
  good = Case(layer(name="moe_3", **options))
  bad = good.topk_idx.astype(dtype)
  bad[at] = value
  return Case(good.layer, bad)


@pytest.mark.parametrize("value", [E, -2, 2**31 - 1, -(2**31)])
def test_an_id_out_of_range(value):
  """Rank 2 alone has the id, and the error of every rank says where it is."""
  words = [
    'ep_prepare(layer "moe_3")',
    "rank 2",
    f"topk_idx[3, 1] = {value}",
    "num_experts = 8",
    "-1..7",
  ]
  with_id(value, (2 * T + 3, 1)).check_error(words, sizes)


@pytest.mark.parametrize("value", [2**32, 2**32 - 1, 2**40 + 1, -(2**63)])
def test_an_int64_id_does_not_wrap(value):
  with jax.enable_x64(True):
    case = with_id(value, (2 * T + 3, 1), np.int64)
    case.check_error(["rank 2", f"topk_idx[3, 1] = {value}", "-1..7"], sizes)


def exchanged(offsets):
  def move():
    rows, zero = zeros(3, H), ids(4) * 0
    return ep.lax.ragged_all_to_all(
      rows, rows, offsets, zero, zero, zero, axis_name="ep"
    )

  specs = dict(in_specs=(), out_specs=PartitionSpec("ep"))
  return jax.shard_map(move, mesh=group().mesh, **specs)()


def applied(ids):
  config = ep.MoEConfig(H, 2, E, K)
  params = ep.moe.init(jax.random.key(0), config)
  return ep.MoE(config, group())(params, zeros(N, H), forced_idx=ids)


@pytest.mark.parametrize(
  "shape, call",
  [
    ((N, K), lambda ids: ep.ep_prepare(layer(), ids)),
    ((N, K), lambda ids: ep.route_topk(zeros(N, E), K, forced_idx=ids)),
    ((N, K), lambda ids: ep.load_balancing_loss(zeros(N, E), ids)),
    ((N, K), lambda ids: moe(layer(), topk_idx=ids)),
    ((N, K), applied),
    ((2,), lambda n: ep.grouped_matmul(zeros(3, 4), zeros(2, 4, 5), n)),
    ((4,), exchanged),
  ],
)
def test_no_integer_of_numpy_or_python_wraps(shape, call):
  """JAX would keep the low 32 bits of each, or the bits of a uint32 as -1."""
  jax.eval_shape(lambda: call(np.zeros(shape, np.int64)))
  for wide in [2**32 + 2, -(2**33) + 1, np.uint32(2**32 - 1), np.uint64(2**63)]:
    array = np.full(shape, wide)
    for form in array, array.tolist():
      assert_refused(lambda form=form: call(form), f" holds {wide}", "2^31")


@pytest.mark.parametrize("value", [2**32 + 3, -(2**40) + 3, 2**32 - 1])
def test_no_integer_of_a_program_wraps(value):
  """A value that is refused when it runs is not a valid id or size."""
  with jax.enable_x64(True):
    wide = jnp.int64(value)
    route = jax.jit(lambda i: ep.route_topk(zeros(1, E), 1, forced_idx=i)[0])
    idx = route(wide.reshape(1, 1))
    assert idx.dtype == jnp.int32 and not -1 <= idx[0, 0] < E
    multiply = jax.jit(ep.grouped_matmul)
    with pytest.raises(ep.EpError, match="group_sizes"):
      jax.block_until_ready(multiply(zeros(4, 2), zeros(1, 2, 3), wide[None]))


def test_an_expert_twice_in_a_token():
  case = with_id(-1, (N - 1, 0))
  first = case.topk_idx[-1, 1]
  case.topk_idx[-1] = [-1, first, first]
  words = ["ep_prepare", '"moe_3"', "rank 3", f"topk_idx[4, 2] = {first}"]
  case.check_error([*words, "distinct"], sizes)


def test_an_error_reaches_every_rank_of_its_domain(capfd):
  """Ranks of other domains do not wait for it, and may succeed before."""
  bad = with_id(E, (0, 0), mesh="dp2_ep2")
  words = ["ep_prepare", "moe_3", "rank 0", "topk_idx[0, 0] = 8"]
  for rank, error in bad.errors(sizes).items():
    for word in words if rank < 2 or error else []:
      assert word in error
  if bad.layer.group.backend == "host":
    # Every process prints the failure, because XLA ends a process that waits
    # for the failed rank in a psum. Another domain's processes may print it
    # later than their own results arrive.
    printed = ""
    deadline = time.monotonic() + TIMEOUT_S
    while not all(word in printed for word in words):
      assert time.monotonic() < deadline, printed
      time.sleep(0.01)
      printed += capfd.readouterr().err
  Case(bad.layer).check(sizes)


def test_a_call_that_jax_has_seen_before_fails_with_an_ep_error():
  """JAX's C++ call path may raise a ValueError, which EpError includes."""
  bad = with_id(E, (0, 0))
  program = jax.jit(lambda idx: ep.ep_prepare(bad.layer, idx).group_sizes)
  jax.block_until_ready(program(bad.put(Case(bad.layer).topk_idx)))
  for _ in range(3):
    with failing(bad.layer.group) as error:
      jax.block_until_ready(program(bad.put(bad.topk_idx)))
    assert "topk_idx[0, 0] = 8" in str(error.value)
  assert issubclass(jax.errors.JaxRuntimeError, ep.EpError)


def test_the_group_works_after_errors():
  for _ in range(3):
    bad = with_id(E, (2 * T, 0))
    bad.check_error(["topk_idx[0, 0] = 8"], everything, *bad.inputs())
    good = Case(bad.layer, "skewed", whole=True)
    good.check(everything, *good.inputs())


def test_an_error_leaves_programs_in_flight_alone():
  bad, good = with_id(E, (0, 0)), Case(layer(), "skewed")
  inputs = good.tokens(), good.weights()
  outs = []
  for _ in range(4):
    outs.append(good.run(round_trip, *inputs))
    bad.check_error(["topk_idx[0, 0] = 8"], sizes)
  for out in outs:
    assert_same(out, round_trip(good.oracle, *inputs))


def of_another_layer(handle, _):
  """Gives the handle a layer whose arrays have the same shapes."""
  config = layer(alignment=2, recv_capacity_per_rank=handle.layer.capacity)
  return dataclasses.replace(handle, layer=config)


def of_another_group(handle, _):
  """Gives the handle a group of the same sizes, except for its experts."""
  larger = group(
    num_experts=2 * E,
    alignment=4,
    recv_capacity_per_rank=handle.layer.capacity,
  )
  return dataclasses.replace(handle, layer=ep.EpLayerConfig(larger))


def with_bytes(alter):
  """Returns a corruption that alters the memory of the handle."""

  def corrupt(handle, other):
    mem = alter(handle.mem, other.mem)
    return dataclasses.replace(handle, mem=mem)

  return corrupt


def first_rank_of_another_routing(mem, other):
  return jnp.where(jnp.arange(mem.shape[0])[:, None] == 0, other, mem)


CORRUPTIONS = {
  "of_another_layer": of_another_layer,
  "of_another_group": of_another_group,
  "of_another_rank": with_bytes(lambda mem, _: jnp.roll(mem, 1, axis=0)),
  "cut_short": with_bytes(lambda mem, _: mem[:, :-64]),
  "garbage": with_bytes(lambda mem, _: jnp.full_like(mem, 7)),
  "garbage_after_the_header": with_bytes(
    lambda mem, _: mem.at[:, 64:].set(0x7F)
  ),
  "zeroed": with_bytes(lambda mem, _: jnp.zeros_like(mem)),
  "one_bit_flipped": with_bytes(
    lambda mem, _: mem.at[0, mem.shape[1] // 2].apply(lambda x: x ^ 128)
  ),
  # Each of the two routes is valid for the other choice.
  "two_routes_swapped": with_bytes(
    lambda mem, _: mem.at[:, 64:80].set(jnp.roll(mem[:, 64:80], 8, axis=1))
  ),
  "of_two_routings": with_bytes(first_rank_of_another_routing),
}


def dispatch_bwd(ops, *cotangents):
  zero = zeros(N, H), zeros(N, K)
  return jax.vjp(ops.dispatch, *map(jnp.asarray, zero))[1](cotangents)


def combine_bwd(ops, cotangent):
  zero = jnp.zeros((4, ops.handle.capacity, H))
  return jax.vjp(ops.combine, zero)[1](cotangent)


@pytest.mark.parametrize(
  "op, corrupt",
  [
    *zip(itertools.cycle([dispatch, combine]), CORRUPTIONS),
    *((op, "one_bit_flipped") for op in (dispatch, dispatch_bwd, combine_bwd)),
  ],
)
def test_a_handle_that_was_not_prepared(corrupt, op):
  """The bytes of a handle are checked before they are used as addresses."""
  if GPU and corrupt not in [*CORRUPTIONS][:5]:
    pytest.skip("NCCL EP trusts its part of a handle")
  corrupt = CORRUPTIONS[corrupt]
  case, other = Case(layer(alignment=4)), Case(layer(alignment=4), "skewed")
  handles = [x.run(lambda ops: ops.handle) for x in (case, other)]
  inputs = {
    dispatch: (case.tokens(), case.weights()),
    combine: (case.rows(),),
    dispatch_bwd: (case.rows(), case.row_weights()),
    combine_bwd: (case.tokens(),),
  }[op]

  @jax.jit
  def program(handle, other, *inputs):
    return op(Ops(corrupt(handle, other)), *inputs)

  with failing(jax.eval_shape(corrupt, *handles).layer.group) as error:
    jax.block_until_ready(program(*handles, *map(case.put, inputs)))
  assert "handle" in str(error.value)
  assert GPU or f"ep_{op.__name__}" in str(error.value)


@pytest.mark.parametrize(
  "compiled_before",
  [
    False,
    pytest.param(
      True, marks=not_with_xla("a compiled program needs nothing of a group")
    ),
  ],
)
def test_an_op_after_finalize(compiled_before):
  closed = bootstrap(make_mesh({"ep": 4}), name=f"closed_{compiled_before}")
  case = Case(ep.EpLayerConfig(closed))
  inputs = case.tokens(), case.weights()
  program = jax.jit(global_view(case.layer, round_trip))
  placed = [case.put(x) for x in (case.topk_idx, *inputs)]
  if compiled_before:
    jax.block_until_ready(program(*placed))
  ep.ep_finalize(closed)
  with pytest.raises(ep.EpError) as error:
    jax.block_until_ready(program(*placed))
  for word in ["ep_prepare", "finalized", closed.name]:
    assert word in str(error.value)


@pytest.mark.parametrize("waits", [True, False])
def test_the_end_of_a_group_while_programs_are_in_flight(waits):
  """The end of `with` waits for them. ep_finalize fails those not done yet."""
  with bootstrap(make_mesh({"ep": 4})) as group:
    case = Case(ep.EpLayerConfig(group), whole=True)
    inputs = case.tokens(), case.weights()
    outs = [case.run(round_trip, *inputs) for _ in range(8)]
    if not waits:
      # It raises where ranks wait for a process that has ended the group.
      with contextlib.suppress(ep.EpError):
        ep.ep_finalize(group)
  for out in outs:
    try:
      jax.block_until_ready(out)
    except ep.EpError as error:
      assert not waits and "finalized" in str(error)
    else:
      assert_same(out, expected(case, round_trip, *inputs))
