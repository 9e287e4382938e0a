# SPDX-License-Identifier: Apache-2.0
"""ep.moe.move permutes expert weights and keeps all bits."""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from conftest import assert_shards_equal, to_global
import ep
from groups import E, group, of_one_process

LAYERS = 3
_rng = np.random.default_rng(0)
ONE, TWO = (ep.Placement(_rng.permutation(E)) for _ in range(2))
STACKED = ep.Placement([_rng.permutation(E) for _ in range(LAYERS)])


def draw(shape, dtype):
  """Draws random bits, so floats include all NaNs and denormals."""
  dtype = jnp.dtype(dtype)
  rng = np.random.default_rng(1)
  if dtype.kind == "b":
    return rng.random(shape) < 0.5
  bits = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
  return bits.view(dtype)[..., 0]


def in_slots(x, placement):
  """Orders [E, ...] or [layers, E, ...] by slot."""
  if placement is None:
    return x
  if placement.experts.ndim == 1:
    return x[placement.experts]
  return np.stack([a[e] for a, e in zip(x, placement.experts, strict=True)])


def put(mesh, arrays, specs):
  return jax.tree.map(lambda x, s: to_global(x, mesh, s), arrays, specs)


def check(got, expected):
  assert jax.tree.structure(got) == jax.tree.structure(expected)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    assert_shards_equal(a, b, nan_bits=True)


def mover(here, specs, view):
  def move(arrays, old, new):
    return ep.moe.move(here, arrays, specs, old=old, new=new)

  if view == "local":
    move = jax.shard_map(
      move, mesh=here.mesh, in_specs=(specs, P(), P()), out_specs=specs
    )
  return move if view == "eager" else jax.jit(move)


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
  whole = {
    "w": draw((E, 3, 4), "float32"),
    "m": [draw((LAYERS, E, 2), "bfloat16")],
    "router": draw((5, E), "int32"),
  }

  def placed(placement):
    stacked = placement and ep.Placement([placement.experts] * LAYERS)
    w, m = in_slots(whole["w"], placement), in_slots(whole["m"][0], stacked)
    return whole | {"w": w, "m": [m]}

  run = mover(here, specs, view)
  for old, new in placements:
    arrays = put(here.mesh, placed(old), specs)
    got = run(arrays, old, new)
    check(got, placed(new))
    for name, spec in specs.items():
      for a, b in zip(
        jax.tree.leaves(got[name]), jax.tree.leaves(spec), strict=True
      ):
        wanted = jax.sharding.NamedSharding(here.mesh, b)
        assert a.sharding.is_equivalent_to(wanted, a.ndim)
    if view == "eager":
      assert got["router"] is arrays["router"]
  assert view == "eager" or run._cache_size() == programs


DTYPES = "bool int8 uint32 int32 float16 float8_e4m3fn bfloat16 float32".split()


@of_one_process
def test_all_dtypes_keep_their_bits_and_layers_their_placements():
  """Moves arrays of all dtypes, and arrays that have no elements."""
  here = group("dp2_ep2")
  whole = [draw((LAYERS, E, 3), dtype) for dtype in DTYPES]
  whole += [draw((LAYERS, E, *width), "float32") for width in [(0,), (2, 0)]]
  specs = [P(None, "ep")] * len(whole)
  run = mover(here, P(None, "ep"), "global")
  one_each = ep.Placement([ONE.experts] * LAYERS)
  stacked = put(here.mesh, [in_slots(x, STACKED) for x in whole], specs)
  expected = [in_slots(x, one_each) for x in whole]
  check(run(stacked, STACKED, ONE), expected)


@of_one_process
def test_explicit_axes():
  here = group("ep4", AxisType.Explicit)
  x = draw((E, 2), "float32")
  arrays = to_global(x, here.mesh, P("ep"))
  check(ep.moe.move(here, arrays, P("ep"), old=None, new=TWO), x[TWO.experts])


@of_one_process
def test_the_gradient_moves_back():
  here = group("ep4")
  x, ct = (np.arange(2.0 * E).reshape(2, E) + 1).astype(np.float32)

  def loss(x, ct):
    y = ep.moe.move(here, x, P("ep"), old=ONE, new=TWO)
    return (y * y * ct).sum()

  args = (to_global(a, here.mesh, P("ep")) for a in (x, ct))
  got = jax.jit(jax.grad(loss))(*args)
  by_expert = x[ONE.slots]
  expected = (2 * by_expert * ct[TWO.slots])[ONE.experts]
  check(got, expected)


def test_nothing_moves_without_a_placement():
  """With old=None and new=None, `move` returns the arrays unchanged."""
  here = group("ep4", num_experts=E + 4)
  x = draw((E, 2), "float32")
  arrays = {"w": to_global(x, here.mesh, P("ep"))}
  got = ep.moe.move(here, arrays, P("ep"), old=None, new=None)
  check(got, {"w": x})


def test_move_refuses():
  here = group("ep4")
  x = {"w": to_global(np.zeros((E, 2), np.float32), here.mesh, P("ep"))}

  def move(arrays=x, specs=P("ep"), old=None, new=ONE):
    ep.moe.move(here, arrays, specs, old=old, new=new)

  for options, words in [
    (dict(specs=P(None, "ep")), r"arrays\['w'\] of shape \(8, 2\): has not 8"),
    (dict(specs=P(("dp", "ep"))), r"is split by \('dp', 'ep'\), but"),
    (dict(new=STACKED), r"a placement is of layers \(3,\), but .* \(\)"),
    (dict(new=ep.Placement(range(E + 1))), r"new has slots \(9,\), but"),
  ]:
    with pytest.raises(ValueError, match=words):
      move(**options)
  with pytest.raises(TypeError, match="old is a list, but an ep.Placement"):
    move(old=[0, 1])
