# SPDX-License-Identifier: Apache-2.0
"""Compiles the kit's programs of backend "xla" for accelerators.

CI compiles small programs for a TPU and for GPUs. EP_TEST_TARGET names a
machine of tests/targets.py for which the test compiles all programs:

    EP_TEST_TARGET=v6e PYTHONPATH=.:tests \
        pytest tests/testing/compiled_kit_test.py
"""

import dataclasses
import os

import jax
from jax.sharding import NamedSharding
import numpy as np
import pytest
from testing_subjects import XLA

from benchmarks import compiled
from benchmarks.workload import AXIS, SPEC
from ep.testing._round_trip import RoundTrip
from ep.testing._routings import ROUTINGS
from ep.testing._variants import Draw
import targets

PRESENT = "v5e" if targets.has_compiler("v5e") else "h100x4"
TARGET = os.environ.get("EP_TEST_TARGET")
# One variant of each setting; routings share their programs.
VARIANTS = [*{x.setting: x for x in Draw(XLA, 0).every_kind()}.values()]
# The exchanges of rows and weights in each program. Dispatch and its backward
# pass exchange both; combine and its backward pass exchange rows.
EXCHANGES = {
  "forward": 2 + 1,
  "pullback": 2 + 1 + 2,
  "pushforward": 2 * 2 + 1,
  "second_pullback": 2 * 2 + 1 + 1 + 2,
}
SHORT = [x for x in VARIANTS if x.setting.tokens < 1000]


def _lower(name, trial, oracle, inputs):
  """Lowers the program of one method of a trial."""
  tokens, _ = inputs
  more = {
    "forward": [],
    "pullback": [tokens],
    "pushforward": [inputs],
    "second_pullback": [tokens, inputs],
  }
  sharding = NamedSharding(trial.setting.mesh, SPEC)
  (program,) = getattr(trial, name).args
  args = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
    (oracle.route, inputs, *more[name]),
  )
  return program.lower(*args)


@pytest.mark.skipif(
  not targets.has_compiler(TARGET or PRESENT),
  reason="needs libtpu or JAX's CUDA plugin",
)
@pytest.mark.parametrize("variant", VARIANTS if TARGET else SHORT, ids=str)
def test_programs_of_the_kit(variant):
  devices = targets.mesh(TARGET or PRESENT).devices[: jax.device_count()]
  mesh = jax.sharding.Mesh(devices, (AXIS,))
  setting = dataclasses.replace(variant.setting, mesh=mesh)
  trial, rng = RoundTrip(XLA, setting), np.random.default_rng(0)
  oracle = trial.routed(ROUTINGS[variant.routing], rng)
  inputs = oracle.inputs(rng, "normal")
  for name, exchanges in EXCHANGES.items():
    program = _lower(name, trial, oracle, inputs).compile()
    found = compiled.operations(program.as_text())
    assert found["ragged-all-to-all"] == exchanges
    # `ep_prepare` exchanges the numbers of rows.
    assert found["others"] == 1
