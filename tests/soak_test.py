"""Long runs: every step has another routing, and what is kept stays as it is.

    python -m ep.launch --num_processes=4 \
        -m pytest tests/soak_test.py --soak_steps=50000

All devices of the world are one domain. Process 0 prints the figures.
"""

import collections
import statistics
import time

import jax
import numpy as np

from cases import assert_same, block_and_back, bootstrap, Case, draw, expected
from conftest import make_mesh, TIMEOUT_S
import ep
from footprint import Footprint

EXPERTS = 2  # of a rank
TOKENS, TOP_K = 16, 3
IN_FLIGHT = 4  # steps
SAMPLES = 100  # steps of which the results are looked at

MORE_MEMORY = 8 << 10  # KiB, in all steps after the warm-up

# Fewer steps than that are over too soon to say anything of their speed.
TIMED_STEPS = 10_000
SLOWER = 0.1


def step_case(layer, step):
  """Its routing, and its claim as of `cases.check`; the same in all ranks."""
  rng = np.random.default_rng(step)
  experts, tokens = layer.group.num_experts, TOKENS * layer.ep_size
  odds = rng.choice([0, 1, 8], experts)  # some have no tokens, some have many
  case = Case(
    layer, draw(rng, (tokens, TOP_K), odds), lead=(TOKENS,), whole=True
  )
  scale = np.float32(1 + step % 8)
  return (
    case,
    block_and_back,
    case.tokens() * scale,
    case.weights(),
    case.tokens(),
  )


def test_soak(request, capsys):
  steps = request.config.getoption("soak_steps")
  ranks = jax.device_count()
  with bootstrap(
    make_mesh({"ep": ranks}),
    num_experts=EXPERTS * ranks,
    max_tokens_per_rank=TOKENS,
    top_k=TOP_K,
    timeout_s=10 * TIMEOUT_S,  # there may be many ranks for each core
  ) as group:
    told = soak(ep.EpLayerConfig(group), steps)
  with capsys.disabled():
    if jax.process_index() == 0:
      print(f"\n{told}")


def soak(layer, steps):
  """Runs the steps, in as many parts as there are samples; returns figures."""
  pending = collections.deque()

  def wait(most):
    while len(pending) > most:
      jax.block_until_ready(pending.popleft())

  def run_part(part):
    for step in part:
      case, fn, *arrays = step_case(layer, step)
      pending.append(case.run(fn, *arrays))
      wait(IN_FLIGHT)
    assert_same(pending[-1], expected(case, fn, *arrays))

  tenth = SAMPLES // 10
  size = -(-steps // SAMPLES)
  run_part(range(size))  # compiles
  seconds = []
  for sample in range(SAMPLES):
    if sample == tenth:  # all threads and segments that it takes are there
      wait(0)
      before = Footprint.now()
    start = time.monotonic()
    run_part(range(sample * size, (sample + 1) * size))
    seconds.append(time.monotonic() - start)
  wait(0)
  # A step that overlaps with others may need a worker of its own.
  threads = IN_FLIGHT * jax.local_device_count()
  told = before.check_now(memory=MORE_MEMORY, threads=threads)
  first, last = (
    size / statistics.median(x) for x in (seconds[:tenth], seconds[-tenth:])
  )
  assert steps < TIMED_STEPS or last > (1 - SLOWER) * first
  return (
    f"{size * SAMPLES} steps in {sum(seconds):.0f} s; of the first tenth"
    f" {first:.1f} steps/s, of the last {last:.1f} ({last / first:.2f}); {told}"
  )
