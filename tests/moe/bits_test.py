# SPDX-License-Identifier: Apache-2.0
"""The same bits on any mesh, in both views, for any placement of experts.

Tests compare meshes of equally many ranks, because the shapes of a rank's
arrays decide how XLA rounds. On 4 ranks, five experts have the slots
01 23 4- --. The test of examples/train_moe_lm.py trains deterministic layers
with empty slots.
"""

import contextlib
import dataclasses
import functools

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from conftest import assert_shards_equal, make_mesh, to_global
import ep
from groups import (
  BACKEND,
  E,
  failing,
  group,
  H,
  K,
  not_on_gpus,
  of_one_process,
  T,
)
from layer_steps import (
  assert_same_bits,
  draw_params,
  in_slots,
  put,
  run_forward,
  run_step,
  step_of,
  whole,
)
import quick_compiler

R = 4  # ranks
PLAIN = ep.MoEConfig(
  H, 6, E, K, biases=True, router_bias=True, shared_inner=3, score="sigmoid"
)
DETERMINISTIC = dataclasses.replace(PLAIN, deterministic=True)
STATE = ep.moe.State(np.linspace(-0.3, 0.3, E, dtype=np.float32))
ONE, TWO = ep.Placement(np.roll(np.arange(E), 3)), ep.Placement(range(E)[::-1])


def arrays(config=PLAIN, tokens=R * T):
  """Draws whole parameters, tokens and a cotangent."""
  rng = np.random.default_rng(0)
  params = draw_params(config, lambda shape: rng.normal(size=shape) / 2)
  return params, *rng.normal(size=(2, tokens, H)).astype(np.float32)


# Deterministic layers. Programs round alike with one flag of
# quick_compiler.py, but not with both.
QUICK_AND_ALIKE = quick_compiler.OPTIMIZED | {
  "xla_backend_optimization_level": 0
}
TRAINED = ep.MoEConfig(H, 6, E, K, shared_inner=3, deterministic=True)
TOKENS = 32  # of each rank


def train(layout, view, dtype, compiler_options):
  """Trains by gradient descent; returns all losses and the last parameters."""
  mesh_group = group(layout, max_tokens_per_rank=None)
  mesh, axes = mesh_group.mesh, mesh_group.token_axes
  layer = ep.MoE(dataclasses.replace(TRAINED, dtype=dtype), mesh_group)
  specs, tokens = layer.specs(), P(axes)

  def loss_fn(params, x):
    y, metrics = layer(params, x)
    loss = distance(y, x) / (R * TOKENS * H)
    return loss + 1e-2 * metrics.aux_loss

  def distance(y, x):
    return ep.ordered_psum(jnp.square(y - x[:, ::-1]).sum(), axes)

  if view == "global":
    distance = jax.shard_map(
      distance, mesh=mesh, in_specs=tokens, out_specs=P()
    )
  grad = jax.value_and_grad(loss_fn)
  if view == "local":
    in_specs, out_specs = (specs, tokens), (P(), specs)
    grad = jax.shard_map(
      grad, mesh=mesh, in_specs=in_specs, out_specs=out_specs
    )

  @functools.partial(
    jax.jit,
    out_shardings=NamedSharding(mesh, P()),
    compiler_options=compiler_options,
  )
  def run(params, x):
    def step(params, _):
      loss, grads = grad(params, x)
      return jax.tree.map(lambda p, g: p - 0.3 * g, params, grads), loss

    return lax.scan(step, params, length=20)

  params, x, _ = arrays(TRAINED, R * TOKENS)
  params, losses = jax.tree.map(np.asarray, run(*put(layer, params, x)))
  assert losses[-1] < losses[0]
  return losses, params


@not_on_gpus
def test_training_has_the_same_bits_on_meshes_and_in_views():
  """One process optimizes programs; several multiply in bfloat16.

  On another mesh, a row has another position, and its segment is beside other
  segments.
  """
  one = jax.process_count() == 1
  dtype, options = (
    (jnp.float32, quick_compiler.OPTIMIZED)
    if one
    else (jnp.bfloat16, QUICK_AND_ALIKE)
  )
  first = train("ep4", "global", dtype, options)
  second = train("dp4_ep1" if one else "dp2_ep2", "local", dtype, options)
  assert_same_bits(second, first)


def tree_sum(x):
  """Adds float32 x [4, n] in the documented order of `ordered_psum`."""
  return (x[0] + x[1]) + (x[2] + x[3])


@pytest.mark.parametrize("check_vma", [True, False])
def test_ordered_psum_and_its_derivatives(check_vma):
  """The bits equal the tree sum; other orders give other bits."""
  mesh = make_mesh({"dp": 2, "ep": 2})
  rng = np.random.default_rng(0)
  x, tangent, ct = rng.normal(size=(3, R, 64)).astype(np.float32)
  others = x[0] + (x[1] + (x[2] + x[3])), ((x[0] + x[1]) + x[2]) + x[3]
  assert all((tree_sum(x) != other).any() for other in others)

  @functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=P(("dp", "ep")),
    out_specs=P(("dp", "ep")),
    check_vma=check_vma,
  )
  def run(x, tangent, ct):
    psum = functools.partial(ep.ordered_psum, axis_name=("dp", "ep"))
    y, y_tangent = jax.jvp(psum, [x], [tangent])
    by_example = jax.vmap(psum, in_axes=2, out_axes=2)(x[..., None])[..., 0]
    # With check_vma, the cotangent of a sum must be the same on all ranks.
    _, vjp = jax.vjp(psum, x)
    (grad,) = vjp(ct if not check_vma else psum(ct))
    return [a.reshape(1, 64) for a in (y, y_tangent, by_example, grad)]

  args = [to_global(a, mesh, P(("dp", "ep"))) for a in (x, tangent, ct)]
  y, y_tangent, by_example, grad = jax.jit(run)(*args)
  for got, of in (y, x), (by_example, x), (y_tangent, tangent), (grad, ct):
    assert_shards_equal(got, np.broadcast_to(tree_sum(of), (R, 64)))


# Placements


@not_on_gpus
@of_one_process
@pytest.mark.parametrize(
  "config, mesh, view",
  [
    pytest.param(PLAIN, "ep4", "global", id="global"),
    pytest.param(DETERMINISTIC, "dp2_ep2", "local", id="deterministic"),
  ],
)
def test_placements_have_the_same_bits(config, mesh, view):
  """One program serves all placements; a call without placement agrees."""
  program = dict(view=view, optimized=True)
  layer = ep.MoE(config, group(mesh))
  params, *tokens = arrays()

  def run(placement, params):
    y, metrics, *grads = run_step(
      layer, params, *tokens, state=STATE, placement=placement, **program
    )
    return y, metrics._replace(max_rank_rows=None), *grads

  results = []
  for placement in ep.Placement(range(E)), ONE, TWO:
    *others, grads, grad_x = run(placement, in_slots(placement, params))
    by_expert = in_slots(ep.Placement(placement.slots), grads)
    results.append((*others, by_expert, grad_x))
  assert step_of(layer, **program)._cache_size() == 1
  if config is PLAIN:
    results.append(run(None, params))
  for got in results[1:]:
    jax.tree.map(np.testing.assert_array_equal, got, results[0])
  assert all(np.any(leaf) for leaf in jax.tree.leaves(results[0][2]))


# Ranks that do not divide the experts

FIVE = dataclasses.replace(PLAIN, num_experts=5)
SPECS = ep.moe.partition_specs(FIVE)
# The empty slots 5, 6 and 7 are not the last ones.
SPREAD = ep.Placement([5, 3, 0, 6, 4, 1, 7, 2])


@contextlib.contextmanager
def layer_on(axes, config=FIVE, **options):
  layer = ep.MoE(config, make_mesh(axes), backend=BACKEND, **options)
  with layer.group:
    yield layer


def cut(params):
  """Returns the parameters of 5 experts; the others must be zero."""
  for name, spec in SPECS.items():
    assert "ep" not in spec or not params[name][5:].any(), name
  return ep.moe.with_slots(params, SPECS, 5)


def test_init_and_move_know_empty_slots():
  def params_on(axes):
    with layer_on(axes) as layer:
      params = layer.init(jax.random.key(0))
      assert params["w_up"].shape == (layer.num_expert_slots, H, 6)
      if axes["ep"] == 1:
        return whole(params)
      args = dict(old=None, new=SPREAD)
      moved = ep.moe.move(layer.group, params, SPECS, **args)
      np.testing.assert_array_equal(
        whole(moved["w_up"]), whole(params["w_up"])[SPREAD.experts]
      )
      args = dict(old=SPREAD, new=None)
      return cut(whole(ep.moe.move(layer.group, moved, SPECS, **args)))

  assert_same_bits(params_on({"ep": 4}), params_on({"dp": 4, "ep": 1}))


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_with_slots_cuts_and_extends_stacked_experts(kind):
  stacked = {n: kind(np.stack([p, -p])) for n, p in arrays(FIVE)[0].items()}
  specs = ep.moe.partition_specs(FIVE, lead=1)
  more = ep.moe.with_slots(stacked, specs, 7)
  assert more["w_up"].shape == (2, 7, H, 6)
  assert type(more["b_up"]) is type(stacked["b_up"])
  assert not more["w_up"][:, 5:].any() and more["router"] is stacked["router"]
  with_others = P(None, ("dp", "ep"))
  assert ep.moe.with_slots(stacked["b_up"], with_others, 7).shape == (2, 7, 6)
  assert_same_bits(ep.moe.with_slots(more, specs, 5), stacked)


def test_the_id_of_an_empty_slot_is_refused():
  params, x, _ = arrays(FIVE, 24)
  ids = np.tile(np.arange(K), (24, 1))
  ids[7, 1] = 5
  with layer_on({"ep": 4}, name="uneven") as layer:
    params = ep.moe.with_slots(params, SPECS, 8)
    with failing(layer.group) as error:
      run_forward(layer, params, x, forced_idx=ids)
  words = 'ep_prepare(layer "uneven"), rank 1: topk_idx[1, 1] = 5'
  assert words in str(error.value)
  assert "num_experts = 5; valid ids are -1..4" in str(error.value)


# ep.moe.move

LAYERS = 3
STACKED = ep.Placement(
  [np.random.default_rng(i).permutation(E) for i in range(LAYERS)]
)
DTYPES = "bool int8 uint32 int32 float16 float8_e4m3fn bfloat16 float32".split()


def draw(shape, dtype):
  """Draws random bits, so floats include all NaNs and denormals."""
  dtype, rng = jnp.dtype(dtype), np.random.default_rng(1)
  if dtype.kind == "b":
    return rng.random(shape) < 0.5
  bits = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
  return bits.view(dtype)[..., 0]


def by_slot(x, placement):
  """Orders [E, ...] or [layers, E, ...] by slot."""
  if placement is None:
    return x
  if placement.experts.ndim == 1:
    return x[placement.experts]
  return np.stack([a[e] for a, e in zip(x, placement.experts, strict=True)])


def check_moved(got, expected):
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    assert_shards_equal(a, b, nan_bits=True)


@pytest.mark.parametrize(
  "mesh, view, placements, programs",
  [
    ("ep4", "global", [(ONE, TWO), (TWO, TWO)], 1),
    pytest.param(
      "dp2_ep2", "local", [(None, ONE), (TWO, None)], 2, marks=of_one_process
    ),
    pytest.param("ep4", "eager", [(None, ONE)], None, marks=of_one_process),
  ],
)
def test_move_permutes_expert_arrays_only(mesh, view, placements, programs):
  """All placements share a program; old=None or new=None needs another one."""
  here = group(mesh)
  dp = here.data_axes[0] if here.data_axes else None
  specs = {"w": P("ep", None, dp), "m": [P(None, "ep")], "router": P(None, dp)}
  w, router = draw((E, 3, 4), "float32"), draw((5, E), "int32")
  m = draw((LAYERS, E, 2), "bfloat16")

  def placed(placement):
    stacked = placement and ep.Placement([placement.experts] * LAYERS)
    return dict(w=by_slot(w, placement), m=[by_slot(m, stacked)], router=router)

  def run(arrays, old, new):
    return ep.moe.move(here, arrays, specs, old=old, new=new)

  if view == "local":
    sizes = dict(in_specs=(specs, P(), P()), out_specs=specs)
    run = jax.shard_map(run, mesh=here.mesh, **sizes)
  run = run if view == "eager" else jax.jit(run)
  for old, new in placements:
    arrays = jax.tree.map(
      lambda x, s: to_global(x, here.mesh, s), placed(old), specs
    )
    got = run(arrays, old, new)
    check_moved(got, placed(new))
    for a, b in zip(*map(jax.tree.leaves, (got, specs)), strict=True):
      assert a.sharding.is_equivalent_to(NamedSharding(here.mesh, b), a.ndim)
    if view == "eager":
      assert got["router"] is arrays["router"]
  assert view == "eager" or run._cache_size() == programs


@of_one_process
def test_all_dtypes_keep_their_bits_and_layers_their_placements():
  """Moves arrays of all dtypes, and arrays that have no elements."""
  here, spec = group("dp2_ep2"), P(None, "ep")
  arrays = [draw((LAYERS, E, 3), dtype) for dtype in DTYPES]
  arrays += [draw((LAYERS, E, *width), "float32") for width in [(0,), (2, 0)]]
  one_each = ep.Placement([ONE.experts] * LAYERS)
  stacked = [to_global(by_slot(x, STACKED), here.mesh, spec) for x in arrays]
  got = jax.jit(lambda xs, old: ep.moe.move(here, xs, spec, old=old, new=ONE))(
    stacked, STACKED
  )
  check_moved(got, [by_slot(x, one_each) for x in arrays])


@of_one_process
def test_move_on_explicit_axes():
  here, x = group("ep4", AxisType.Explicit), draw((E, 2), "float32")
  arrays = to_global(x, here.mesh, P("ep"))
  got = ep.moe.move(here, arrays, P("ep"), old=None, new=TWO)
  check_moved(got, x[TWO.experts])


@of_one_process
def test_the_gradient_moves_back():
  here = group("ep4")
  x, ct = (np.arange(2.0 * E).reshape(2, E) + 1).astype(np.float32)

  def loss(x, ct):
    y = ep.moe.move(here, x, P("ep"), old=ONE, new=TWO)
    return (y * y * ct).sum()

  args = (to_global(a, here.mesh, P("ep")) for a in (x, ct))
  got = jax.jit(jax.grad(loss))(*args)
  check_moved(got, (2 * x[ONE.slots] * ct[TWO.slots])[ONE.experts])
