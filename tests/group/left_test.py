# SPDX-License-Identifier: Apache-2.0
"""If a process leaves, the others say so when a collective of XLA fails.

XLA's errors name no process. Each process runs this file as a program:
left_test.py WHAT HOW. All processes run WHAT; then the last process leaves.
"""

import json
import os
import signal
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ep
from ep import launch
from ep._src.base import compat
from ep._src.group import liveness
import hosts


def move(group, x):
  placement = ep.Placement([*range(group.num_experts)][::-1])
  spec = jax.P("ep")
  return ep.moe.move(group, x, spec, old=None, new=placement)


def op(group, x):
  ids = jax.lax.broadcasted_iota(np.int32, (len(x), 1), 0)
  layer = ep.EpLayerConfig(group, top_k=1)
  return ep.ep_prepare(layer, ids % group.num_experts).mem


def step(group, x):
  return jax.jit(jnp.sum)(x)


def leave(how):
  if how == "raise":
    raise ValueError("no data")
  if how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
  sys.exit()


def main(what, how):
  launch.initialize(exit_at_once=True)
  ranks = jax.device_count()
  mesh = jax.make_mesh((ranks,), ("ep",))
  group = ep.ep_bootstrap(mesh, num_experts=ranks, backend="xla")
  sharding = jax.NamedSharding(mesh, jax.P("ep"))
  x = jax.make_array_from_callback(
    (ranks, 4), sharding, lambda i: np.zeros((ranks, 4), np.float32)[i]
  )
  is_last = jax.process_index() == jax.process_count() - 1
  if is_last and how == "sleep":
    time.sleep(600)
  run = dict(move=move, op=op, step=step)[what]
  with jax.set_mesh(mesh):
    for _ in range(2):
      jax.block_until_ready(run(group, x))
    if is_last:
      leave(how)
    for _ in range(1000):
      jax.block_until_ready(run(group, x))


def run_with_launcher(folder, count, *args):
  """Returns the logs of the ranks that stay."""
  options = dict(num_processes=count, timeout_s=100.0, grace_s=30.0)
  assert launch.launch([__file__, *args], log_dir=folder, **options) > 0
  return read_logs(folder, count - 1)


def run_without_launcher(folder, count, *args):
  """Starts ranks that know only an address, as on a cluster."""
  ranks = hosts.start_ranks([hosts.ThisHost] * count, folder, __file__, *args)
  try:
    for rank in ranks[:-1]:
      rank.wait(100)
  finally:
    for rank in ranks:
      rank.kill()
      rank.wait()
  return read_logs(folder, count - 1)


def read_logs(folder, count):
  return [(folder / f"rank_{rank}.log").read_text() for rank in range(count)]


@pytest.mark.parametrize(
  "run, what, how, text",
  [
    (run_with_launcher, "move", "exit", "has exited"),
    (run_with_launcher, "op", "exit", "has exited"),
    (run_with_launcher, "step", "raise", "has failed (ValueError: no data)"),
    (run_without_launcher, "step", "kill", "has died"),
    (run_without_launcher, "move", "raise", "has failed (ValueError: no data)"),
    (run_without_launcher, "op", "sleep", "has not run this program"),
  ],
)
def test_a_missing_process_is_named(run, what, how, text, tmp_path):
  (log,) = run(tmp_path, 2, what, how)
  assert "Gloo" in log
  message = "ep: XLA's error names no process, but process 1 "
  assert log.splitlines()[-1] == f"{message}{text}; read its log.", log


def test_the_process_that_left_first_is_named(tmp_path):
  """Another process may fail because the first one left."""
  for log in run_with_launcher(tmp_path, 3, "step", "kill"):
    assert " but process 2 has died; read its log." in log.splitlines()[-1], log


STORE = {
  1: "has died",
  2: "has failed (ValueError: UNKNOWN: Gloo AllGather failed)",
  3: "has exited",
}


def unanswered(folder):
  raise jax.errors.JaxRuntimeError("UNAVAILABLE: Socket closed")


@pytest.mark.parametrize(
  "left, text",
  [
    ((1, 2, 3), "but process 1 has died, process 3 has exited; read their"),
    ((2,), "but process 2 has failed (ValueError: UNKNOWN: Gloo"),
    ((), "and none is known to have left; read the logs of all."),
    (range(4, 14), "process 11 has exited, 2 more; read their logs."),
    (None, "service of jax.distributed, by default in process 0, does not"),
  ],
)
def test_all_that_left_are_named(left, text, monkeypatch):
  """A process that failed because others left is named only if it is alone."""

  def states(folder):
    return [
      (f"{folder}{p}", json.dumps(dict(left=STORE.get(p, "has exited"))))
      for p in left
    ]

  client = types.SimpleNamespace(
    key_value_dir_get=unanswered if left is None else states
  )
  monkeypatch.setattr(compat, "distributed_client", lambda: client)
  monkeypatch.setattr(liveness, "_VISIBLE_S", 0.0)
  assert text in liveness.blame("UNKNOWN: Gloo AllReduce failed: Read error")
  assert not liveness.blame("INVALID_ARGUMENT: an id is out of range")


if __name__ == "__main__":
  main(*sys.argv[1:])
