# SPDX-License-Identifier: Apache-2.0
"""`ep stuck`, started as a separate process, names hanging ranks and ops."""

import os
import re
import signal
import threading
import time

import jax
import numpy as np
import pytest

from cases import Case
from conftest import assert_shards_equal, make_mesh
import ep
from ep._tools import stuck
from groups import bootstrap, not_with_xla, spec
import programs

LATE = 2  # A rank of the last process.
IS_LATE = jax.process_index() == jax.process_count() - 1
# Seconds until a hang fails the test; a busy machine starts programs slowly.
# Ranks wait longer than WAIT_S, so that an awaited state cannot disappear.
WAIT_S = 60

host_only = not_with_xla("no status of its ranks")


def output(*args):
  """Runs `ep stuck`, which must succeed, and returns its output."""
  code, text = programs.run(stuck.__file__, *args)  # Imports no JAX.
  assert code == 0, text
  return text


def wait_for(patterns, *args):
  """Returns the output of `ep stuck` once the output matches all patterns."""
  deadline = time.monotonic() + WAIT_S
  while True:
    is_last = time.monotonic() > deadline
    text = output(*args)
    if all(re.search(pattern, text) for pattern in patterns):
      return text
    assert not is_last, text


def wait_until(path):
  deadline = time.monotonic() + 3 * WAIT_S
  while True:
    # Read the clock before the path: SIGSTOP may stop this process in between.
    is_last = time.monotonic() > deadline
    if path.exists():
      return
    assert not is_last, f"no file {path}"
    time.sleep(0.02)


def names(*ranks):
  """Returns a pattern that matches the names of the ranks."""
  processes = jax.process_count()
  name = "rank {}" if processes == 1 else "rank {} (process {})"
  texts = [name.format(r, r * processes // 4) for r in ranks]
  return re.escape(", ".join(texts))


def op(name):
  return rf'ep_{name}\(layer "moe_3"\), step \d of "[a-z_]+#\d", op \d'


class Step:
  """A program whose rank LATE waits between two ops until `may_go_on`."""

  def __init__(self, group):
    config = ep.EpLayerConfig(group, name="moe_3")
    self.case = case = Case(config)
    self.is_late = threading.Event()
    self.may_go_on = threading.Event()
    self.may_go_on.set()
    specs = spec(config)
    late = jax.shard_map(
      self._late, in_specs=specs, out_specs=specs, check_vma=False
    )

    @jax.jit
    def step(topk_idx, tokens, weights):
      handle = ep.ep_prepare(config, topk_idx)
      rows, _ = ep.ep_dispatch(handle, late(tokens), weights)
      return rows

    self.arrays = case.tokens(), case.weights()
    self.args = [case.put(x) for x in (case.topk_idx, *self.arrays)]
    self.step = step

  def _late(self, x):
    number = jax.pure_callback(
      self.a_slow_callback,
      jax.ShapeDtypeStruct((), x.dtype),
      jax.lax.axis_index("ep"),
      x[0, 0],
    )
    return x.at[0, 0].set(number)

  def a_slow_callback(self, rank, number):
    if int(rank) == LATE:
      self.is_late.set()
      assert self.may_go_on.wait(3 * WAIT_S)
    return np.asarray(number)

  def launch(self):
    return self.step(*self.args)

  def check(self, rows):
    expected, _ = self.case.oracle.dispatch(*self.arrays)
    assert_shards_equal(rows, expected)


@host_only
def test_a_rank_that_is_late_is_named():
  """The report names op, layer and ranks, and shows the late rank's stack."""
  group = bootstrap(
    make_mesh({"ep": 4}), name="a late group", timeout_s=4 * WAIT_S
  )
  patterns = [
    'group "a late group", process',
    rf"{op('dispatch')}: {names(0, 1, 3)} waited \d+\.\d s for {names(LATE)}"
    rf" whose last op was {op('prepare')}\n",
    rf"{names(LATE)}: waits for no rank; last in {op('prepare')}, \d+\.\d s",
  ]
  stack = rf"process {os.getpid()} \(.*\): its Python stacks"
  with group, jax.set_mesh(group.mesh):
    step = Step(group)
    step.check(step.launch())
    if IS_LATE:
      step.may_go_on.clear()
    step.is_late.clear()
    rows = step.launch()
    try:
      if IS_LATE:
        assert step.is_late.wait(WAIT_S)
        wait_for([*patterns, stack, "in a_slow_callback"], os.getpid())
        wait_for(patterns)
    finally:
      step.may_go_on.set()
    step.check(rows)


@host_only
@pytest.mark.skipif(jax.process_count() == 1, reason="it would stop itself")
def test_a_stopped_process_is_named(folder):
  group = bootstrap(
    make_mesh({"ep": 4}), name="a stopped group", timeout_s=4 * WAIT_S
  )
  waits = (
    rf"{op('prepare')}: {names(0, 1)} waited \d+\.\d s for {names(2)} whose"
    rf" last op was {op('dispatch')}, {names(3)} whose last op was"
  )
  with group, jax.set_mesh(group.mesh):
    step = Step(group)
    step.check(step.launch())
    if IS_LATE:
      wait_for(["last in ep_dispatch"], os.getpid())
      (folder / "pid.draft").write_text(str(os.getpid()))
      (folder / "pid.draft").rename(folder / "pid")
      wait_until(folder / "go")
      rows = step.launch()
    else:
      wait_until(folder / "pid")
      pid = int((folder / "pid").read_text())
      os.kill(pid, signal.SIGSTOP)
      try:
        rows = step.launch()
        wait_for([waits], os.getpid())
        theirs = wait_for(["This is what process"], pid)
      finally:
        (folder / "go").touch()
        os.kill(pid, signal.SIGCONT)
    step.check(rows)
  if IS_LATE:
    return
  assert "it is stopped, by SIGSTOP or a debugger" in theirs
  assert f"kill -CONT {pid} lets it go on" in theirs
  last = rf"{names(2)}: waits for no rank; last in {op('dispatch')}"
  assert re.search(last, theirs), theirs
