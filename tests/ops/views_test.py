# SPDX-License-Identifier: Apache-2.0
"""The ops give the same results inside and outside of shard_map."""

import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np
import pytest

from cases import assert_same, Case, expected, global_view, local_view
from conftest import make_mesh, to_global
import ep
from groups import bootstrap, E, H, K, layer, of_one_process, spec, T
from layer_steps import draw_params
from op_functions import everything, Ops, round_trip

VIEWS = {
  "global": global_view,
  "local": local_view,
  "local_without_vma": functools.partial(local_view, check_vma=False),
}
BOTH_VIEWS = pytest.mark.parametrize("view", [global_view, local_view])


@pytest.mark.parametrize(
  "mesh, axis_type, view",
  [
    ("ep2_dp2", AxisType.Auto, "global"),
    ("dp2_ep2", AxisType.Explicit, "local"),
    ("ep4", AxisType.Auto, "local_without_vma"),
  ],
)
def test_views_agree(mesh, axis_type, view):
  """Every result is split over the ranks, and none is replicated."""
  config = layer(mesh, axis_type)
  case = Case(config, "with_unused_choices", whole=True)
  inputs = case.inputs()
  actual = case.run(everything, *inputs, view=VIEWS[view])
  assert_same(actual, expected(case, everything, *inputs))
  over_ranks = NamedSharding(config.group.mesh, spec(config))
  for leaf in jax.tree.leaves(actual):
    assert leaf.sharding.is_equivalent_to(over_ranks, leaf.ndim)


def test_resharding_an_array_gives_a_warning(recwarn):
  config = layer("dp2_ep2")
  case = Case(config, whole=True)
  mesh = config.group.mesh
  ep.ep_prepare(config, case.put(case.topk_idx))
  assert not [w for w in recwarn if "ep_prepare" in str(w.message)]
  resharded = to_global(case.topk_idx, mesh, PartitionSpec(("ep", "dp")))
  with pytest.warns(UserWarning) as warnings:
    handle = ep.ep_prepare(config, resharded)
  (warning,) = warnings
  assert warning.filename == __file__  # The warning points to the caller.
  message = str(warning.message)
  ends = "every call", "tp_axis"
  for word in ["ep_prepare", "('ep', 'dp')", "('dp', 'ep')", *ends]:
    assert word in message
  assert_same(Ops(handle).sizes(), case.oracle.sizes())


@of_one_process
@pytest.mark.parametrize("compiled", [False, True])
def test_an_axis_that_splits_parameters_gives_a_warning(compiled, recwarn):
  """The axis may have any name, and the program may be jitted.

  In a jitted program, JAX knows the sharding along Explicit axes.
  """
  axis_types = (AxisType.Explicit if compiled else AxisType.Auto,) * 2
  mesh = make_mesh({"ep": 2, "shards": 2}, axis_types)
  config = ep.MoEConfig(4, 4, num_experts=4, top_k=2)
  with bootstrap(mesh, num_experts=4) as group, jax.set_mesh(mesh):
    moe = ep.MoE(config, group)
    params = ep.moe.init(jax.random.key(0), config)

    def put(specs):
      places = {n: NamedSharding(mesh, spec) for n, spec in specs.items()}
      return jax.device_put(params, places)

    def messages(params):
      recwarn.clear()
      call = jax.jit(moe) if compiled else moe
      jax.block_until_ready(call(params, x))
      assert all(w.filename == __file__ for w in recwarn)
      return [str(w.message) for w in recwarn]

    x = to_global(np.ones((8, 4), np.float32), mesh, spec(moe.ep_layer))
    specs = moe.specs()
    assert not messages(put(specs))
    specs["w_down"] = PartitionSpec("ep", "shards")
    (message,) = messages(put(specs))
    for word in "w_down", "'shards'", "tp_axis", "fsdp_axis", "data_axes":
      assert word in message


@of_one_process
def test_copies_of_tokens_give_a_warning(recwarn):
  """Tokens are equal along an axis of any name that shards tokens."""
  mesh = make_mesh({"ep": 2, "copies": 2})
  ids = np.tile(np.arange(K, dtype=np.int32), (8, 1))

  def sizes(config, spec):
    def of_rank(ids):
      return ep.ep_prepare(config, ids).group_sizes

    specs = dict(in_specs=spec, out_specs=PartitionSpec(("ep", "copies")))
    jax.jit(jax.shard_map(of_rank, mesh=mesh, **specs))(ids)

  with bootstrap(mesh) as group:
    config = ep.EpLayerConfig(group)
    sizes(config, PartitionSpec(("ep", "copies")))
    assert not recwarn
    sizes(config, PartitionSpec("ep"))
  (warning,) = recwarn
  assert warning.filename == __file__
  for word in "ep_prepare", "topk_idx", "['copies']", "data_axes":
    assert word in str(warning.message)


@of_one_process
@BOTH_VIEWS
def test_arguments_that_all_ranks_share(view):
  """Constants are not varying in `shard_map`, and ops take them."""

  def with_constants(ops, tokens):
    ones = jnp.ones((*tokens.shape[:-1], K))
    recv, recv_weights = ops.dispatch(jnp.ones(tokens.shape), ones)
    return ops.combine(recv, recv_weights), ops.combine(jnp.ones_like(recv))

  case = Case(layer(), "with_unused_choices", whole=True)
  case.check(with_constants, case.tokens(), view=view)


def test_an_orthogonal_axis_makes_separate_domains():
  """Each `tp` index can have other tokens and another routing."""
  with bootstrap(make_mesh({"ep": 2, "tp": 2}), data_axes=()) as group:
    config = ep.EpLayerConfig(group)
    cases = [Case(config, routing) for routing in ("uniform", "skewed")]
    inputs = [
      (case.topk_idx, (1 + i) * case.tokens(), case.weights())
      for i, case in enumerate(cases)
    ]

    specs = PartitionSpec("tp", "ep")

    @jax.jit
    @functools.partial(
      jax.shard_map, mesh=group.mesh, in_specs=specs, out_specs=specs
    )
    def local(*args):
      topk_idx, *arrays = (x[0] for x in args)
      return round_trip(Ops(ep.ep_prepare(config, topk_idx)), *arrays)[None]

    stacked = (np.stack(x) for x in zip(*inputs, strict=True))
    actual = local(*(to_global(x, group.mesh, specs) for x in stacked))
    domains = [
      expected(case, round_trip, *arrays)
      for case, (_, *arrays) in zip(cases, inputs, strict=True)
    ]
    assert_same(actual, np.stack(domains))


# --- Explicit axes, the default of `jax.make_mesh` ---------------------------

OVER_RANKS = PartitionSpec(("dp", "ep"))


@of_one_process
@pytest.mark.parametrize(
  "axes, compiled",
  [
    (OVER_RANKS, True),
    (PartitionSpec(("ep", "dp")), True),
    (PartitionSpec("dp"), False),
    (PartitionSpec(), True),
    (OVER_RANKS, False),
  ],
  ids=str,
)
def test_arguments_of_any_sharding(axes, compiled, recwarn):
  """Gradients have the sharding of the arguments.

  Outside of jit, a warning names each array that JAX reshards.
  """
  config = layer("dp2_ep2", AxisType.Explicit)
  case, mesh = Case(config, whole=True), config.group.mesh

  def with_grads(topk_idx, *primals):
    def fn(*primals):
      return round_trip(Ops(ep.ep_prepare(config, topk_idx)), *primals)

    out, vjp = jax.vjp(fn, *primals)
    return out, vjp(out)

  def of_oracle(ops, *primals):
    out, vjp = jax.vjp(lambda *x: round_trip(ops, *x), *primals)
    return out, vjp(out)

  arrays = case.tokens(), np.ceil(4 * case.weights())
  args = [to_global(x, mesh, axes) for x in (case.topk_idx, *arrays)]
  with jax.set_mesh(mesh):
    if not compiled:
      global_view(config, round_trip)(*args)
    out, grads = (jax.jit(with_grads) if compiled else with_grads)(*args)
  assert_same((out, grads), expected(case, of_oracle, *arrays))
  for grad, arg in zip(grads, args[1:], strict=True):
    assert grad.sharding.is_equivalent_to(arg.sharding, arg.ndim)
  words = " ".join(str(w.message) for w in recwarn)
  for name in "topk_idx", "tokens":
    is_moved = not compiled and axes != OVER_RANKS
    assert (f": {name} of shape" in words) == is_moved


CONFIG = ep.MoEConfig(H, 4, E, K, shared_inner=2)


@of_one_process
@pytest.mark.parametrize(
  "axes",
  [PartitionSpec("dp"), PartitionSpec("ep"), PartitionSpec(), OVER_RANKS],
  ids=str,
)
def test_the_output_of_a_layer_has_the_sharding_of_its_tokens(axes):
  """The layer reshards only where it must, by collectives with a name."""
  bound = layer("dp2_ep2", AxisType.Explicit)
  mesh = bound.group.mesh
  rng = np.random.default_rng(0)
  params = draw_params(CONFIG, lambda shape: rng.normal(size=shape) / 3)
  specs = ep.moe.partition_specs(CONFIG)
  params = {n: to_global(p, mesh, specs[n]) for n, p in params.items()}
  x = rng.normal(size=(4, T, H)).astype(np.float32)
  x = to_global(x, mesh, axes)

  def block(x, params):
    return x + ep.MoE(CONFIG, bound.group)(params, x)[0]

  def step(x, params):
    out, vjp = jax.vjp(block, x, params)
    assert jax.typeof(out).sharding.spec == jax.typeof(x).sharding.spec
    return out, vjp(out)

  with jax.set_mesh(mesh):
    compiled = jax.jit(step).lower(x, params).compile()
    jax.block_until_ready(compiled(x, params))
  ep.assert_no_hidden_collectives(compiled, allow=["all-reduce"])
  is_moved = re.search(r"all-gather.*ep_reshard", compiled.as_text())
  assert bool(is_moved) == (axes != OVER_RANKS)


def moved(bound, x, matrix):
  spec = PartitionSpec("ep")
  new = ep.Placement([*range(bound.group.num_expert_slots)][::-1])
  return ep.moe.move(bound.group, matrix, spec, old=None, new=new)


def matrices_of_a_layer(bound, x, matrix):
  ids = jnp.zeros((len(x), 1), jnp.int32)
  matrices = dict(w_up=matrix, w_down=matrix.mT)
  return ep.moe_layer(bound, x, ids, jnp.ones_like(x[:, :1]), **matrices)


@of_one_process
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
