# SPDX-License-Identifier: Apache-2.0
"""ep stuck, in a process of its own, says what hangs and where."""

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

LATE = 2  # a rank, whose process is the last one
IS_LATE = jax.process_index() == jax.process_count() - 1

host_only = not_with_xla("nothing is known of its ranks")


def output(*args):
  """Returns what the command prints, which succeeds."""
  code, text = programs.run(stuck.__file__, *args)  # which imports no JAX
  assert code == 0, text
  return text


def wait_for(patterns, *args):
  """Returns the first output that has all patterns, within some seconds."""
  deadline = time.monotonic() + 20
  while True:
    text = output(*args)
    if all(re.search(pattern, text) for pattern in patterns):
      return text
    assert time.monotonic() < deadline, text


def wait_until(path):
  deadline = time.monotonic() + 30
  while not path.exists():
    assert time.monotonic() < deadline, f"{path} does not come"
    time.sleep(0.02)


def names(*ranks):
  """Returns a pattern of the names of ranks."""
  processes = jax.process_count()
  name = "rank {}" if processes == 1 else "rank {} (process {})"
  texts = [name.format(r, r * processes // 4) for r in ranks]
  return re.escape(", ".join(texts))


def op(name):
  return rf'ep_{name}\(layer "moe_3"\), step \d of "[a-z_]+#\d", op \d'


class Step:
  """A program whose rank LATE may be late between two ops."""

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
      assert self.may_go_on.wait(60)
    return np.asarray(number)

  def launch(self):
    return self.step(*self.args)

  def check(self, rows):
    """Checks that nothing has changed the result."""
    expected, _ = self.case.oracle.dispatch(*self.arrays)
    assert_shards_equal(rows, expected)


@host_only
def test_a_rank_that_is_late_is_named():
  """So are the op, its layer and the ranks that wait, and Python's stack."""
  group = bootstrap(make_mesh({"ep": 4}), name="a late group", timeout_s=120)
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
        assert step.is_late.wait(30)
        wait_for([*patterns, stack, "in a_slow_callback"], os.getpid())
        wait_for(patterns)
    finally:
      step.may_go_on.set()
    step.check(rows)


@host_only
@pytest.mark.skipif(jax.process_count() == 1, reason="it would stop itself")
def test_a_stopped_process_is_named(folder):
  group = bootstrap(make_mesh({"ep": 4}), name="a stopped group", timeout_s=120)
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
