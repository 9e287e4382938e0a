# SPDX-License-Identifier: Apache-2.0
"""Tests properties that only backend="xla" has.

The tests of the ops run on this backend with

    EP_TEST_BACKEND=xla python -m pytest tests/ops/dispatch_test.py
"""

import dataclasses
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import assert_same, Case, expected, lower, run
from conftest import make_mesh
import ep
from ep._src.backends import host
from ep._src.backends.xla import plans
from ep._src.base import compat
from ep._src.base.backend import CannotServe
from ep._src.native import ffi
from groups import bootstrap, group
from op_functions import (
  combine,
  dispatch,
  everything,
  handle_of,
  Ops,
  round_trip,
)


def layer(mesh="ep4", backend="xla", **options):
  return ep.EpLayerConfig(group(mesh, backend=backend), **options)


def test_needs_no_native_library(monkeypatch):
  """A group works even if the native library cannot be loaded."""

  def refuse(backend):
    raise AssertionError(f"loads the library of {backend}")

  monkeypatch.setattr(ffi, "library", refuse)
  with bootstrap(make_mesh({"ep": 4}), backend="xla") as group:
    Case(ep.EpLayerConfig(group)).check_round_trip()
    group.raise_failures()


# --- Bits equal to the oracle's ----------------------------------------------


@pytest.mark.parametrize(
  "mesh, dtype",
  [("ep4", jnp.float32), ("dp4_ep1", jnp.bfloat16)],
)
def test_the_bits_of_the_contract_in_an_optimized_program(mesh, dtype):
  options = dict(alignment=4, recv_capacity_per_rank=2 * 8 * 4, overflow="drop")
  case = Case(layer(mesh, **options), "skewed")
  claim = case, everything, *case.inputs(dtype)
  (actual,) = run(claim, optimized=True)
  assert_same(actual, expected(*claim))


def test_collectives_are_along_the_ep_axis():
  case = Case(layer("dp2_ep2"))
  claim = case, everything, *case.inputs()
  program = lower(claim).compile()
  ep.assert_no_hidden_collectives(program)
  groups = re.findall(r"replica_groups=(.+?), \w+=", program.as_text())
  # JAX 0.12 writes the axis.
  assert set(groups) in ({"{{0,1},{2,3}}"}, {"mesh['dp'=2,'ep'=2] {'ep'}"})
  args = jax.tree.map(case.put, [case.routing, *claim[2:]])
  assert_same(program(args), [expected(*claim)])


def test_choices_that_are_too_many_for_one_word(monkeypatch):
  """If expert and choice do not fit one uint32, the plan sorts two arrays."""
  monkeypatch.setattr(plans, "_WORDS", 0)
  case = Case(layer(name="many"), "skewed")
  case.check(dispatch, case.tokens(), case.weights())


# --- Ragged exchanges --------------------------------------------------------


@pytest.fixture
def ragged(monkeypatch):
  """Makes CPUs exchange rows as other platforms do, by `ep.lax`."""
  monkeypatch.setattr(compat, "is_for_cpus", lambda ctx: False)
  with ep.lax.install():
    yield


def test_ragged(ragged):
  # With this name, no other test has compiled a program for the layer.
  options = dict(recv_capacity_per_rank=12, overflow="drop", name="ragged")
  case = Case(layer("dp2_ep2", **options), "skewed", whole=True)
  case.check(everything, *case.inputs())


def test_ragged_where_the_platform_has_it():
  case = Case(layer())
  inputs = case.tokens(), case.weights()

  @jax.jit
  def program(handle, *inputs):
    return round_trip(Ops(handle), *inputs)

  traced = program.trace(case.run(handle_of), *map(case.put, inputs))
  for platform in "cpu", "tpu", "cuda", "rocm":
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    ragged, padded = "@ragged_all_to_all", "stablehlo.all_to_all"
    assert (ragged in text) == (platform != "cpu")
    assert (padded in text) == (platform == "cpu")
    # An exchange's output buffer must depend on an argument. XLA would move a
    # constant buffer out of a loop, and copy the buffer in each iteration.
    for call in re.finditer(rf"{ragged}\(%\w+, (%\w+),", text):
      makers = [*call.groups()]
      while not any(made.startswith("%arg") for made in makers):
        made = makers.pop()  # IndexError: the buffer is constant
        definition = re.findall(rf"{made} = (.*?) :", text[: call.start()])[-1]
        makers += re.findall(r"%(?!cst|c)\w+", definition)


def test_a_rank_by_itself_exchanges_nothing():
  """With P = 1, as on one GPU, dispatch is a permutation of the rows."""
  case = Case(layer("dp4_ep1"))
  claim = case, everything, *case.inputs()
  text = lower(claim, platforms=("cuda",)).as_text()
  assert "stablehlo.gather" in text
  assert not re.findall(r"stablehlo\.(?:all_|collective_|reduce_sc).*", text)
  assert "ragged_all_to_all" not in text


# --- Forged handles ----------------------------------------------------------


@pytest.fixture
def cannot_raise(monkeypatch):
  """Makes programs unable to raise errors, like exported programs."""
  monkeypatch.setattr(compat, "can_call_python", lambda ctx: False)


@jax.jit
def exchanged(handle, tokens, weights, rows):
  ops = Ops(handle)
  return dispatch(ops, tokens, weights), combine(ops, rows)


FORGERIES = {
  "garbage_after_the_header": lambda mem: mem.at[:, 64:].set(0x7F),
  # Both swapped choices stay in range, and the sum of choices stays the same.
  "two_choices_swapped": lambda mem: mem.at[:, 12:20].set(
    jnp.roll(mem[:, 12:20], 4, axis=1)
  ),
  "of_another_layer": None,
}


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_a_forged_handle_gives_nan(forge, cannot_raise):
  """With a forged handle, results are NaN, and no access is out of bounds."""
  case = Case(layer(alignment=4))
  inputs = case.tokens(), case.weights(), case.rows()
  handle = case.run(handle_of)
  if forge:
    handle = dataclasses.replace(handle, mem=forge(handle.mem))
  else:  # Use a layer with the same array shapes.
    other = layer(alignment=2, recv_capacity_per_rank=handle.layer.capacity)
    handle = dataclasses.replace(handle, layer=other)
  for leaf in jax.tree.leaves(exchanged(handle, *map(case.put, inputs))):
    for shard in leaf.addressable_shards:
      assert np.isnan(np.asarray(shard.data)).all()


def test_a_rank_with_a_forged_handle_sends_nan(cannot_raise):
  """Other ranks receive NaN only from the rank with the forged handle."""

  def forged(ops, tokens, weights):
    handle = ops.handle
    first = jnp.arange(handle.mem.shape[0])[:, None] == 0
    mem = handle.mem.at[:, 64:].set(0x7F)
    mem = jnp.where(first, mem, handle.mem)
    return dispatch(Ops(dataclasses.replace(handle, mem=mem)), tokens, weights)

  case = Case(layer(), "skewed")
  tokens, weights = case.tokens(), case.weights()
  actual = case.run(forged, tokens, weights)
  tokens[: len(tokens) // 4] = np.nan
  weights[: len(weights) // 4] = np.nan
  expected = [np.array(x) for x in case.oracle.dispatch(tokens, weights)]
  for x in expected:
    x[0] = np.nan
  assert_same(actual, tuple(expected))


def test_handles_of_two_routings_are_refused():
  case = Case(layer())

  def mixed(ops, tokens, weights):
    other = ep.ep_prepare(case.layer, case.topk_idx[::-1])
    first = jnp.arange(len(other.mem))[:, None] == 0
    mem = jnp.where(first, other.mem, ops.handle.mem)
    handle = dataclasses.replace(ops.handle, mem=mem)
    return dispatch(Ops(handle), tokens, weights)

  words = ["ep_dispatch", "disagree on the routing of the handle"]
  case.check_error(words, mixed, case.tokens(), case.weights())


# --- The default backend -----------------------------------------------------


def test_none_is_native_where_it_can_be(caplog):
  with bootstrap(make_mesh({"ep": 4}), backend=None) as group:
    assert group.backend == "host"
  assert not [r for r in caplog.records if r.name == "ep"]


def test_a_mesh_that_the_native_backend_cannot_serve(monkeypatch, caplog):
  def refuse(_, mesh, axis_name):
    raise CannotServe(f"needs another axis than {axis_name!r}")

  monkeypatch.setattr(host.HostBackend, "check_mesh", refuse)
  mesh = make_mesh({"ep": 4})
  with (
    caplog.at_level(logging.INFO, "ep"),
    bootstrap(mesh, backend=None) as group,
  ):
    assert group.backend == "xla"
  (record,) = [r for r in caplog.records if r.name == "ep"]
  for word in "xla", group.name, "needs another axis than 'ep'":
    assert word in record.getMessage()
  with pytest.raises(ValueError, match="another axis"):
    bootstrap(mesh, backend="host")
