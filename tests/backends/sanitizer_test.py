# SPDX-License-Identifier: Apache-2.0
"""The ops run without an error of the sanitizer.

Other tests check the results. This file has few and small cases, because native
code is slow under a sanitizer.
"""

import dataclasses
import os

import jax
import numpy as np
import pytest

from cases import assert_same, Case, expected, large_case
import ep
from groups import layer
from op_functions import dispatch, everything, Ops, round_trip

pytestmark = pytest.mark.skipif(
  "TEST_TARGET" not in os.environ, reason="only Bazel sets a sanitizer up"
)


@pytest.fixture
def case():
  return Case(layer("ep2", top_k=2, alignment=4), "skewed", whole=True)


def test_this_process_has_the_runtime():
  """Without the sanitizer's runtime, the other tests would check nothing."""
  assert "san.so" in os.environ["LD_PRELOAD"]


def test_every_op(case):
  case.check(everything, *case.inputs())


def test_threads_share_large_rows():
  large_case("uniform", "ep2").check_round_trip()


def test_launches_in_flight(case):
  inputs = case.tokens(), case.weights()
  outs = [case.run(round_trip, *inputs) for _ in range(16)]
  for out in outs:
    assert_same(out, expected(case, round_trip, *inputs))


def test_a_handle_with_flipped_bits(case):
  """If a handle has a flipped bit, ops raise or access only their buffers."""
  handle = case.run(lambda ops: ops.handle)
  mem = np.asarray(handle.mem)
  use = jax.jit(
    lambda mem, *x: dispatch(Ops(dataclasses.replace(handle, mem=mem)), *x)
  )
  inputs = [case.put(x) for x in (case.tokens(), case.weights())]
  rng = np.random.default_rng(0)
  failed = 0
  for _ in range(50):
    flipped = mem.copy()
    flat = flipped.reshape(-1)
    flat[rng.integers(flat.size)] ^= 1 << rng.integers(8)
    try:
      jax.block_until_ready(use(case.put(flipped), *inputs))
    except ep.EpError:
      failed += 1
  assert 0 < failed < 50
  assert_same(
    use(case.put(mem), *inputs),
    expected(case, dispatch, *map(np.asarray, inputs)),
  )
