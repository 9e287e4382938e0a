# SPDX-License-Identifier: Apache-2.0
"""ep.explain blames the rank and the layer of a planted cause.

    python -m ep launch --num_processes=4 \
        -m pytest tests/trace/blame_test.py --plants=100

plants 100 causes, and runs 100 times without a cause. Process 0 prints the
wrong blames. death_test covers dead ranks.
"""

import functools
import hashlib
import os
import signal
import subprocess
import time

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np
import pytest

from conftest import make_mesh, to_global
import ep
from groups import bootstrap
from op_functions import after

LAYERS = "a", "b"
EXPERTS, TOKENS, TOP_K, HIDDEN = 8, 32, 2, 8
STEPS = 8
LATE_S = 0.02
TIMEOUT_S = 3.0
# Experts sleep ROW_S per row instead of computing: the ranks of a test share
# cores, and a sleep simulates a device per rank.
ROW_S = 1e-4


class Cause:
  """A planted cause, which callbacks read, so all causes share a program."""

  def __init__(self, kind=None, rank=-1, layer=""):
    self.kind, self.rank, self.layer = kind, rank, layer

  def __str__(self):
    return f"{self.kind} at rank {self.rank}, layer {self.layer}"

  def delay(self, rank, layer):
    if (rank, layer) != (self.rank, self.layer):
      return
    until = time.monotonic() + LATE_S
    if self.kind == "sleep":
      time.sleep(LATE_S)
    if self.kind == "stop":
      stop(1.5 * TIMEOUT_S)
    while self.kind == "busy" and time.monotonic() < until:
      hashlib.sha256(bytes(1 << 16))  # Releases the GIL.

  def choices(self, rng, layer):
    """Draws all tokens' choices; a skew sends half to the planted rank."""
    scores = rng.random((4, TOKENS, EXPERTS))
    if (self.kind, self.layer) == ("skew", layer):
      mine = slice(2 * self.rank, 2 * self.rank + 2)
      scores[:, : TOKENS // 2, mine] += 1
    return scores.argsort()[..., -TOP_K:].reshape(-1, TOP_K).astype(np.int32)

  def strays(self, layer):
    """Returns the rank that runs another program before this layer, or -1."""
    is_here = (self.kind, self.layer) == ("stray", layer)
    return np.int32(self.rank if is_here else -1)

  def is_found(self, explanation):
    """Returns whether the explanation begins with this cause."""
    if self.kind in ("stop", "stray"):
      ranks = explanation.failure.ranks
      if self.kind == "stop" and len(ranks) > 1:  # All ranks of the process.
        return self.rank in ranks and len(ranks) == len(jax.local_devices())
      return ranks == (self.rank,)
    found = [
      (b.balanced_s is not None, b.rank, b.layer) for b in explanation.blames
    ]
    return found[:1] == [(self.kind == "skew", self.rank, self.layer)]


def stop(seconds):
  """Stops this process for `seconds`, or this thread if it is the only one."""
  if jax.process_count() == 1:
    return time.sleep(seconds)
  wake = f"sleep {seconds}; kill -CONT {os.getpid()}"
  with subprocess.Popen(["sh", "-c", wake]):
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.fixture
def run(folder):
  """Returns a function that traces steps with a cause and explains them."""
  cause = Cause()

  def delay(layer, rank):
    cause.delay(int(rank), layer)

  def work(rank, rows):
    time.sleep(int(rows) * ROW_S)

  mesh = make_mesh({"ep": 4})
  spec = jax.sharding.PartitionSpec("ep")
  with bootstrap(
    mesh,
    num_experts=EXPERTS,
    max_tokens_per_rank=TOKENS,
    hidden_dim=HIDDEN,
    timeout_s=TIMEOUT_S,
  ) as group:
    layers = {n: ep.EpLayerConfig(group, top_k=TOP_K, name=n) for n in LAYERS}

    @jax.jit
    @jax.shard_map(
      mesh=mesh,
      in_specs=(spec, spec, jax.sharding.PartitionSpec()),
      out_specs=spec,
      check_vma=False,
    )
    def step(x, choices, strays):
      rank = jax.lax.axis_index("ep")
      for name, layer in layers.items():
        x = after(functools.partial(delay, name), x)
        idx, x = jax.lax.optimization_barrier((choices[name], x))
        x += jax.lax.cond(
          rank == strays[name],
          lambda idx, layer=layer: (
            ep.ep_prepare(layer, idx).group_sizes[0] * 0.0
          ),
          lambda idx: jnp.float32(0),
          idx,
        )
        handle = ep.ep_prepare(layer, idx)
        weights = jnp.ones(idx.shape)
        rows, _ = ep.ep_dispatch(handle, x, weights)
        rows = after(work, rows, handle.total_recv_tokens[0])
        x = ep.ep_combine(handle, rows)
      return x

    x = to_global(np.ones((4 * TOKENS, HIDDEN), np.float32), mesh, spec)

    def steps(planted, seed):
      nonlocal cause
      cause = planted
      rng = np.random.default_rng(seed)
      traces = folder / f"{seed} {planted}"
      traces.mkdir(exist_ok=True)
      try:
        with ep.trace(group, traces / "steps.json.gz"):
          for _ in range(STEPS):
            choices = {
              name: to_global(cause.choices(rng, name), mesh, spec)
              for name in LAYERS
            }
            strays = {name: cause.strays(name) for name in LAYERS}
            jax.block_until_ready(step(x, choices, strays))
      except ep.EpError:
        multihost_utils.sync_global_devices("all have failed")
        if jax.process_index():  # Process 0 merges the parts.
          return None
      return ep.explain(traces)

    steps(cause, 0)  # compiles
    yield steps


def test_causes_are_found(run, request):
  """Misses at most 1 of 20 causes, and blames no rank without a cause."""
  count = request.config.getoption("--plants")
  wrong, blamed = [], []
  for seed in range(count):
    rng = np.random.default_rng(seed)
    kind = rng.choice(["sleep", "busy", "skew", "stop", "stray"])
    cause = Cause(kind, int(rng.integers(4)), str(rng.choice(LAYERS)))
    found = run(cause, seed)
    if found and not cause.is_found(found):
      wrong.append(f"{cause}:\n{found}")
    blamed += run(Cause(), seed).blames
  if jax.process_index() == 0:
    print(*wrong, *blamed, f"wrong: {len(wrong)} + {len(blamed)}", sep="\n")
  assert len(wrong) <= max(1, count // 20)
  assert not blamed
