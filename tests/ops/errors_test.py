# SPDX-License-Identifier: Apache-2.0
"""Wrong values in an array raise an error on every rank.

The error names the op, the layer and the mistake. The group continues to work.
In checked mode, the op that receives a wrong array reports the mistake.
"""

import dataclasses
import functools
import itertools
import runpy
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cases import assert_same, Case, expected
from conftest import make_mesh, TIMEOUT_S
import ep
from ep._src.base import contexts
from groups import (
  BACKEND,
  bootstrap,
  E,
  failing,
  GPU,
  H,
  K,
  layer,
  of_one_process,
  T,
)
from op_functions import (
  combine,
  dispatch,
  everything,
  handle_of,
  Ops,
  round_trip,
  sizes,
)

N = 4 * T  # Tokens of all ranks.


def with_id(value, at, dtype=np.int32, **options):
  """Returns a case whose routing has id `value` at `at`, (token, choice)."""
  good = Case(layer(name="moe_3", **options))
  bad = good.topk_idx.astype(dtype)
  bad[at] = value
  return Case(good.layer, bad)


@pytest.mark.parametrize("value", [E, -2])
def test_an_id_out_of_range(value):
  """One rank has a wrong id, and every rank's error gives the id's position."""
  words = [
    'ep_prepare(layer "moe_3")',
    "rank 2",
    f"topk_idx[3, 1] = {value}",
    "num_experts = 8",
    "-1..7",
  ]
  with_id(value, (2 * T + 3, 1)).check_error(words, sizes)


def test_an_int64_id_does_not_wrap():
  value = 2**40 + 1
  with jax.enable_x64(True):
    case = with_id(value, (2 * T + 3, 1), np.int64)
    case.check_error(["rank 2", f"topk_idx[3, 1] = {value}", "-1..7"], sizes)


def test_an_expert_twice_in_a_token():
  case = with_id(-1, (N - 1, 0))
  first = case.topk_idx[-1, 1]
  case.topk_idx[-1] = [-1, first, first]
  words = ["ep_prepare", '"moe_3"', "rank 3", f"topk_idx[4, 2] = {first}"]
  case.check_error([*words, "distinct"], sizes)


def test_an_error_reaches_every_rank_of_its_domain(capfd):
  """Ranks of other domains do not wait for the failed rank."""
  bad = with_id(E, (0, 0), mesh="dp2_ep2")
  words = ["ep_prepare", "moe_3", "rank 0", "topk_idx[0, 0] = 8"]
  for rank, error in bad.errors(sizes).items():
    for word in words if rank < 2 or error else []:
      assert word in error
  if bad.layer.group.backend == "host":
    # Every process prints the failure, because XLA terminates a process that
    # waits for the failed rank in a psum. A process of another domain may print
    # the failure after its own results arrive.
    printed = ""
    deadline = time.monotonic() + TIMEOUT_S
    while not all(word in printed for word in words):
      assert time.monotonic() < deadline, printed
      time.sleep(0.01)
      printed += capfd.readouterr().err
  Case(bad.layer).check(sizes)


def test_a_repeated_call_raises_an_ep_error():
  """JAX's C++ fast path may raise a ValueError, which EpError includes."""
  bad = with_id(E, (0, 0))
  program = jax.jit(lambda idx: ep.ep_prepare(bad.layer, idx).group_sizes)
  jax.block_until_ready(program(bad.put(Case(bad.layer).topk_idx)))
  for _ in range(3):
    with failing(bad.layer.group) as error:
      jax.block_until_ready(program(bad.put(bad.topk_idx)))
    assert "topk_idx[0, 0] = 8" in str(error.value)
  assert issubclass(jax.errors.JaxRuntimeError, ep.EpError)


def of_another_layer(handle, _):
  """Gives the handle a layer whose arrays have the same shapes."""
  config = layer(alignment=2, recv_capacity_per_rank=handle.layer.capacity)
  return dataclasses.replace(handle, layer=config)


def with_bytes(alter):
  """Returns a function of two handles that alters the first one's memory."""
  return lambda handle, other: dataclasses.replace(
    handle, mem=alter(handle.mem, other.mem)
  )


# The last corruptions are of bytes that "nccl" does not check. The data of the
# native ops begins at byte 256 of `handle.mem`.
CORRUPTIONS = {
  "of_another_layer": of_another_layer,
  "of_another_rank": with_bytes(lambda mem, _: jnp.roll(mem, 1, axis=0)),
  "one_bit_flipped": with_bytes(
    lambda mem, _: mem.at[0, 128 + mem.shape[1] // 2].apply(lambda x: x ^ 128)
  ),
  "of_two_routings": with_bytes(lambda mem, other: mem.at[0].set(other[0])),
}


def dispatch_bwd(ops, *cotangents):
  zero = jnp.zeros((N, H)), jnp.zeros((N, K))
  return jax.vjp(ops.dispatch, *zero)[1](cotangents)


def combine_bwd(ops, cotangent):
  zero = jnp.zeros((4, ops.handle.capacity, H))
  return jax.vjp(ops.combine, zero)[1](cotangent)


@pytest.mark.parametrize(
  "op, corrupt",
  [
    *zip(itertools.cycle([dispatch, combine]), CORRUPTIONS),
    *((op, "one_bit_flipped") for op in (combine, dispatch_bwd, combine_bwd)),
  ],
)
def test_a_handle_that_was_not_prepared(corrupt, op):
  """The op checks a handle's bytes before using these bytes as addresses."""
  if GPU and corrupt not in [*CORRUPTIONS][:2]:
    pytest.skip("NCCL EP does not check its data in a handle")
  if BACKEND == "xla" and corrupt == "one_bit_flipped":
    pytest.skip("xla checks whose handle it is, and bounds, but not each bit")
  case, other = Case(layer(alignment=4)), Case(layer(alignment=4), "skewed")
  handles = [x.run(handle_of) for x in (case, other)]
  handle = jax.jit(CORRUPTIONS[corrupt])(*handles)
  inputs = {
    dispatch: (case.tokens(), case.weights()),
    combine: (case.rows(),),
    dispatch_bwd: (case.rows(), case.row_weights()),
    combine_bwd: (case.tokens(),),
  }[op]
  with failing(handle.layer.group) as error:
    jax.block_until_ready(applied_to_handle(op, handle, *map(case.put, inputs)))
  assert "handle" in str(error.value)
  assert GPU or f"ep_{op.__name__}" in str(error.value)


@functools.partial(jax.jit, static_argnums=0)
def applied_to_handle(op, handle, *inputs):
  return op(Ops(handle), *inputs)


def test_leaving_a_groups_context_waits_for_programs_in_flight():
  """`ep_finalize` instead fails programs in flight; see lifetime_test."""
  with bootstrap(make_mesh({"ep": 4})) as group:
    case = Case(ep.EpLayerConfig(group), whole=True)
    inputs = case.tokens(), case.weights()
    outs = [case.run(round_trip, *inputs) for _ in range(8)]
  for out in outs:
    assert_same(out, expected(case, round_trip, *inputs))


# --- Checked mode ------------------------------------------------------------


@pytest.fixture
def checked_mode():
  with ep.checked():
    yield


CHECKED = pytest.mark.usefixtures("checked_mode")


def rows_and_sizes(ops, tokens, narrow, weights, rows, g):
  return (
    ops.dispatch(tokens, weights),
    ops.dispatch(narrow, weights),
    ops.combine_bwd((rows,), g),
    ops.sizes(),
  )


@CHECKED
@of_one_process
def test_an_unspecified_tail_is_nan():
  """Checked mode fills unused rows with NaN, and changes no expert segment."""
  case = Case(layer(alignment=4, tail="unspecified"), "skewed")
  tokens, narrow, g = map(case.tokens, (np.float32, jnp.bfloat16, np.float16))
  inputs = tokens, narrow, case.weights(), case.rows(np.float16), g
  *actual, _ = case.run(rows_and_sizes, *inputs)
  *expected, sizes = rows_and_sizes(case.oracle, *inputs)
  used = np.asarray(sizes.group_sizes).sum(1)
  assert (used < case.layer.capacity).all()
  for got, want in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
    for shard in got.addressable_shards:
      rank = shard.index[0].start or 0
      rows = np.asarray(shard.data)[0].astype(np.float32)
      wanted = np.asarray(want)[rank].astype(np.float32)
      np.testing.assert_array_equal(rows[: used[rank]], wanted[: used[rank]])
      assert np.isnan(rows[used[rank] :]).all()


@CHECKED
def test_checked_mode_changes_no_good_result():
  case = Case(layer(alignment=4), "with_unused_choices")
  case.check(everything, *case.inputs())


@CHECKED
@pytest.mark.parametrize(
  "value, dtype", [(np.nan, np.float32), (np.inf, jnp.bfloat16)]
)
def test_a_combine_that_is_not_finite(value, dtype):
  """All errors name the element; the host backend's also the expert's row."""
  case = Case(layer(name="moe_3"), "uniform")
  rows = case.rows(dtype)
  rows[1, :, 3] = value  # Tokens of every rank sum these rows.
  words = ["ep_combine", '"moe_3"', ", 3]", "is not finite"]
  if BACKEND is None and not GPU:
    words += ["nor is expert_out[", "] of rank 1", "topk_idx[", "step "]
  case.check_error(words, combine, rows)
  case.check(combine, case.rows(dtype))


@CHECKED
def test_rows_that_no_token_sums_may_be_nan():
  case = Case(layer(name="moe_3"), "to_one_expert")
  rows = np.full_like(case.rows(), np.nan)
  rows[3] = case.rows()[3]  # The only chosen expert is on rank 3.
  case.check(combine, rows)


@CHECKED
@of_one_process
def test_jit_traces_again_when_the_mode_changes():
  case = Case(layer())
  infinite = np.full_like(case.rows(), np.inf)
  case.check_error(["is not finite"], combine, infinite)
  with ep.checked(False):
    case.check(combine, infinite)
  case.check_error(["is not finite"], combine, infinite)


@of_one_process
def test_the_environment_turns_checked_mode_on(monkeypatch):
  monkeypatch.setenv("EP_CHECKED", "1")
  assert runpy.run_path(contexts.__file__)["is_checked"]()
