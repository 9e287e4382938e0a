# SPDX-License-Identifier: Apache-2.0
"""Our ops keep every rule of ep.testing, in settings that a seed draws.

    python -m pytest tests/ops/rules_test.py --draws=200 --draws_seed=7

A rule has a name, a statement and an oracle; see ep/testing/_rules.py. A draw
is a transport with one value of each option of `TABLE`, for which the kit draws
sizes, routings and numbers. In successive draws, each value of an option is
used once before any is used again. `--draws_first` leaves out earlier draws.
EP_TEST_BACKEND=xla selects a backend, and the process layout of the test gives
the number of ranks of a process. A failure prints the draw, its options and the
seed.
"""

import numpy as np
import pytest
from testing_subjects import DTYPES, HOST, NCCL, ours, XLA

import ep
from groups import BACKEND, GPU, of_one_process

NAME = BACKEND or ("nccl" if GPU else "host")
SUBJECT = {"host": HOST, "xla": XLA, "nccl": NCCL}[NAME]

IS_NCCL = NAME == "nccl"
DROPS = [("drop", "slot"), ("drop", "fair"), ("error", "slot")]
# nccl reports an overflow only in a later op, and aligns to powers of two.
TABLE = dict(
  view=["local", "global"],
  leading_dims=[False, True],
  weighted=[False, True],
  uneven=[False, True],
  tail=["unspecified", "zero"],
  drops=DROPS[:2] if IS_NCCL else DROPS,
  dtype=DTYPES,
  alignment=[1, 2, 4, 8, 16] if IS_NCCL else [1, 2, 3, 4, 8, 16],
)


def is_small(setting):
  """Returns whether all arrays are small. `test_rule` has large arrays."""
  sizes = setting.tokens, setting.hidden, setting.num_experts
  return max(sizes) <= 300 and setting.num_experts <= 20


def drawn(seed, index):
  """Returns the transport of a draw; equal arguments give equal transports."""

  def chosen_of(position, values):
    rng = np.random.default_rng([seed, position])
    for _ in range(1 + index // len(values)):
      order = rng.permutation(len(values))
    return values[order[index % len(values)]]

  chosen = {
    name: chosen_of(position, values)
    for position, (name, values) in enumerate(TABLE.items())
  }
  words = " ".join(f"{name}={value}" for name, value in chosen.items())
  overflow, drop_by = chosen.pop("drops")
  return ours(
    NAME,
    name=f"draw {index} of --draws_seed={seed} on {NAME}: {words}",
    supports=lambda x: is_small(x) and SUBJECT.supports(x),
    overflow=overflow,
    drop_by=drop_by,
    dtypes=(chosen.pop("dtype"),),
    alignments=(chosen.pop("alignment"),),
    **chosen,
  )


def pytest_generate_tests(metafunc):
  if "index" in metafunc.fixturenames:
    option = metafunc.config.getoption
    first, count = option("draws_first"), option("draws")
    # XLA compiles the programs of backend "xla" slowly.
    step = 4 if NAME == "xla" else 1
    metafunc.parametrize("index", range(first, first + count, step))


@of_one_process
@pytest.mark.parametrize("case", ep.testing.cases(SUBJECT))
def test_rule(case):
  case.check()


def test_draw(request, index):
  seed = request.config.getoption("draws_seed")
  report = ep.testing.check(drawn(seed, index), seed=seed + index)
  if not report.passed:
    pytest.fail(str(report))
