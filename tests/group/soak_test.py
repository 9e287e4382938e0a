# SPDX-License-Identifier: Apache-2.0
"""Long runs with changing routings keep their speed and leak no resources.

    python -m ep launch --num_processes=4 \
        -m pytest tests/group/soak_test.py --soak_steps=50000

All devices form one domain. Process 0 prints the figures.
"""

import collections
import statistics
import time

import jax
import numpy as np

from cases import assert_same, Case, expected, global_view
from conftest import make_mesh, TIMEOUT_S
import ep
from ep.testing._footprint import Footprint
from ep.testing._routings import draw
from groups import bootstrap
from op_functions import block_and_back

EXPERTS = 2  # per rank
TOKENS, TOP_K = 16, 3
IN_FLIGHT = 4  # steps

# A run has up to PARTS parts, and checks the last step of each part. INPUTS is
# a prime, so the checked steps have different inputs.
PARTS = 20
INPUTS = 23

# Limits on the growth after the first tenth of the steps. Each step in flight
# may need another worker thread.
MOST = Footprint(
  memory=4 << 10,
  heap=2 << 10,
  descriptors=0,
  threads=IN_FLIGHT * jax.local_device_count(),
)

# The speed of a run with fewer steps cannot be measured well.
TIMED_STEPS = 10_000
SLOWER = 0.1


class Steps:
  """Runs steps of a new group, whose routings repeat after `INPUTS` steps."""

  def __init__(self):
    ranks = jax.device_count()
    self.group = bootstrap(
      make_mesh({"ep": ranks}),
      num_experts=EXPERTS * ranks,
      max_tokens_per_rank=TOKENS,
      top_k=TOP_K,
      timeout_s=10 * TIMEOUT_S,  # many ranks may share a core
    )
    layer = ep.EpLayerConfig(self.group)
    self._program = jax.jit(global_view(layer, block_and_back))
    self._claims, self._inputs = [], []
    for seed in range(INPUTS):
      rng = np.random.default_rng(seed)
      odds = rng.choice([0, 1, 8], self.group.num_experts)  # 0: no tokens
      routing = draw(rng, (TOKENS * ranks, TOP_K), odds)
      case = Case(layer, routing, lead=(TOKENS,), whole=True)
      tokens = case.tokens() * np.float32(1 + seed % 8)
      arrays = tokens, case.weights(), case.tokens()
      self._claims.append((case, block_and_back, *arrays))
      self._inputs.append([*map(case.put, (routing, *arrays))])

  def seconds(self, steps):
    """Runs the steps, checks the last result, and returns the time."""
    start = time.monotonic()
    pending = collections.deque()
    for step in steps:
      pending.append(self._program(*self._inputs[step % INPUTS]))
      if len(pending) > IN_FLIGHT:
        jax.block_until_ready(pending.popleft())
    jax.block_until_ready(pending)
    assert_same(pending[-1], expected(*self._claims[step % INPUTS]))
    return time.monotonic() - start


def test_soak(request, capsys):
  steps = request.config.getoption("soak_steps")
  size = max(2 * IN_FLIGHT, steps // PARTS)
  parts = [range(i, i + size) for i in range(0, steps, size)]
  tenth = -(-len(parts) // 10)
  soak = Steps()
  with soak.group:
    soak.seconds(parts[0])  # The first call compiles.
    first = [soak.seconds(part) for part in parts[:tenth]]
    before = Footprint.now()
    rest = [soak.seconds(part) for part in parts[tenth:]]
    growth = before.check_now(MOST)
    rates = [size / statistics.median(x) for x in (first, rest[-tenth:])]
    figures = (
      f"{size * len(parts)} steps in {sum(first + rest):.0f} s, {rates[0]:.0f}"
      f" -> {rates[1]:.0f} steps/s, {growth}"
    )
    if steps >= TIMED_STEPS:
      speed = compare_with_new_group(soak, parts[-tenth:])
      figures += f", {speed:.2f} of the speed of a new group"
      assert speed > 1 - SLOWER, figures
  with capsys.disabled():
    if jax.process_index() == 0:
      print(f"\n{figures}")


def compare_with_new_group(old, parts):
  """Returns the speed of the group divided by the speed of a new group.

  The groups alternate, because the load of the machine may change.
  """
  new = Steps()
  with new.group:
    new.seconds(parts[0])  # The first call compiles.
    return statistics.median(
      new.seconds(part) / old.seconds(part) for part in parts
    )
