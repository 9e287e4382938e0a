# SPDX-License-Identifier: Apache-2.0
"""Compiles the kit's programs of backend "xla" for accelerators.

CI compiles small programs for a TPU and for GPUs. EP_TEST_TARGETS names
machines of benchmarks/targets.py for which the test compiles all programs:

    EP_TEST_TARGETS=v5e,v5p,v6e,tpu7x PYTHONPATH=.:tests \
        pytest tests/testing/compiled_kit_test.py

One process compiles for one kind of GPU.
"""

import dataclasses
import importlib.util
import os

import jax
from jax.sharding import NamedSharding
import numpy as np
import pytest
from testing_subjects import XLA

from benchmarks import targets
from benchmarks.workload import AXIS, SPEC
from ep.testing._round_trip import RoundTrip
from ep.testing._routings import ROUTINGS
from ep.testing._variants import Draw

TARGETS = os.environ.get("EP_TEST_TARGETS")
PRESENT = "v5e" if importlib.util.find_spec("libtpu") else "h100x4"
# One variant of each setting; routings share their programs.
VARIANTS = [*{x.setting(): x for x in Draw(XLA, 0).every_kind()}.values()]
SHORT = [x for x in VARIANTS if x.tokens < 1000]


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


@pytest.mark.parametrize("variant", VARIANTS if TARGETS else SHORT, ids=str)
@pytest.mark.parametrize("target", (TARGETS or PRESENT).split(","))
def test_programs_of_the_kit(target, variant):
  devices = targets.mesh(target).devices[: jax.device_count()]
  mesh = jax.sharding.Mesh(devices, (AXIS,))
  setting = dataclasses.replace(variant.setting(), mesh=mesh)
  trial, rng = RoundTrip(XLA, setting), np.random.default_rng(0)
  shape = mesh.size * setting.tokens, setting.top_k
  idx = ROUTINGS[variant.routing](rng, shape, setting.num_experts)
  oracle = trial.oracle(idx.astype(np.int32))
  inputs = oracle.inputs(rng, "normal")
  for name in ("forward", "pullback", "pushforward", "second_pullback"):
    program = _lower(name, trial, oracle, inputs).compile()
    assert "ragged-all-to-all" in program.as_text()
