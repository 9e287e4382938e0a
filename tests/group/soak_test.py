# SPDX-License-Identifier: Apache-2.0
"""Long runs with changing routings keep their speed and use no more resources.

    python -m ep.launch --num_processes=4 \
        -m pytest tests/group/soak_test.py --soak_steps=50000

All devices of the world form one domain. Process 0 prints the figures.
"""

import collections
import statistics
import time

import jax
import numpy as np

from cases import assert_same, Case, expected, run
from conftest import make_mesh, TIMEOUT_S
import ep
from ep.testing._footprint import Footprint
from ep.testing._routings import draw
from groups import bootstrap
from op_functions import block_and_back

EXPERTS = 2  # of each rank
TOKENS, TOP_K = 16, 3
IN_FLIGHT = 4  # steps

# A run is divided into so many parts, or fewer if it is short. The results of
# the last step of each part are checked.
PARTS = 100

# Limits on the growth after the first tenth of the steps. A step that overlaps
# with others may need a worker thread of its own.
MOST = Footprint(
  memory=4 << 10,
  heap=2 << 10,
  descriptors=0,
  threads=IN_FLIGHT * jax.local_device_count(),
)

# Runs of fewer steps are too short to measure their speed.
TIMED_STEPS = 10_000
SLOWER = 0.1


def make_group():
  ranks = jax.device_count()
  return bootstrap(
    make_mesh({"ep": ranks}),
    num_experts=EXPERTS * ranks,
    max_tokens_per_rank=TOKENS,
    top_k=TOP_K,
    timeout_s=10 * TIMEOUT_S,  # there may be many ranks for each core
  )


def claim(group, step):
  """Returns the claim of a step, the same on all ranks; see cases.py."""
  rng = np.random.default_rng(step)
  odds = rng.choice([0, 1, 8], group.num_experts)  # 0: gets no tokens
  routing = draw(rng, (TOKENS * group.ep_size, TOP_K), odds)
  layer = ep.EpLayerConfig(group)
  case = Case(layer, routing, lead=(TOKENS,), whole=True)
  tokens = case.tokens() * np.float32(1 + step % 8)
  return case, block_and_back, tokens, case.weights(), case.tokens()


def seconds(group, steps):
  """Runs the steps, checks the results of the last, and returns the time."""
  start = time.monotonic()
  pending = collections.deque()
  for step in steps:
    last = claim(group, step)
    pending.append(run(last))
    if len(pending) > IN_FLIGHT:
      jax.block_until_ready(pending.popleft())
  jax.block_until_ready(pending)
  (out,) = pending[-1]
  assert_same(out, expected(*last))
  return time.monotonic() - start


def test_soak(request, capsys):
  steps = request.config.getoption("soak_steps")
  size = max(2 * IN_FLIGHT, steps // PARTS)
  parts = [range(i, i + size) for i in range(0, steps, size)]
  tenth = -(-len(parts) // 10)
  with make_group() as group:
    seconds(group, parts[0])  # compiles
    first = [seconds(group, part) for part in parts[:tenth]]
    before = Footprint.now()
    rest = [seconds(group, part) for part in parts[tenth:]]
    growth = before.check_now(MOST)
    rates = [size / statistics.median(x) for x in (first, rest[-tenth:])]
    figures = (
      f"{size * len(parts)} steps in {sum(first + rest):.0f} s, {rates[0]:.0f}"
      f" -> {rates[1]:.0f} steps/s, {growth}"
    )
    if steps >= TIMED_STEPS:
      speed = compare_with_new_group(group, parts[-tenth:])
      figures += f", {speed:.2f} of the speed of a new group"
      assert speed > 1 - SLOWER, figures
  with capsys.disabled():
    if jax.process_index() == 0:
      print(f"\n{figures}")


def compare_with_new_group(group, parts):
  """Returns the speed of the group divided by that of a new one.

  The two run in turns, since the load of the machine may change.
  """
  with make_group() as new:
    seconds(new, parts[0])  # compiles
    return statistics.median(
      seconds(new, part) / seconds(group, part) for part in parts
    )
