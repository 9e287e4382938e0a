# SPDX-License-Identifier: Apache-2.0
"""ep.watch counts steps, reads states of processes, and reports a stall."""

import dataclasses
import re
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import conftest  # noqa: F401  (It makes this process a rank.)
import ep
from ep._tools.watch.report import report
from ep._tools.watch.sharing import Record
import jobs
import programs


def test_a_process_without_peers_reports_one_stall(capsys):
  """The main thread goes on while a program waits."""
  may_go_on = threading.Event()

  def wait(x):
    assert may_go_on.wait(30)
    return np.asarray(x)

  program = jax.jit(lambda x: jax.pure_callback(wait, x, x))
  lines = []

  def has(text):
    lines.append(capsys.readouterr().err)
    return text in "".join(lines)

  with ep.watch(stall_s=0.5):

    def step():
      with ep.watch.step("train") as launched:
        launched(program(jnp.ones(4))).block_until_ready()

    thread = threading.Thread(target=step)
    thread.start()
    jobs.wait_until(lambda: has("stands still"))
    time.sleep(1)
    assert not has("goes on")
    may_go_on.set()
    thread.join()
    jobs.wait_until(lambda: has("ep.watch: process 0 goes on."))
  text = "".join(lines)
  assert text.count("process 0 of 1 stands still for") == 1
  assert re.search(r'(began|launched) step 0 \("train"\).* for \d s\.', text)
  assert re.search(r'steps_test.py", line \d+ in step', text)


def test_donated_results_and_failed_programs_count(capsys):
  add = jax.jit(lambda x: x + 1, donate_argnums=0)

  def fail(x):
    raise KeyError("a failing program")

  program = jax.jit(lambda x: jax.pure_callback(fail, x, x))
  with ep.watch(stall_s=0.5) as watch:
    steps = watch._steps
    x = jnp.zeros(1000)
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
      with ep.watch.step() as launched:
        x = launched(add(x))
    assert steps.begun == int(x[0]) > 2
    jobs.wait_until(lambda: steps.finished == steps.begun)
    assert len(steps._pending) + len(steps._new) == 0
    with pytest.raises(jax.errors.JaxRuntimeError):
      with ep.watch.step() as launched:
        jax.block_until_ready(launched(program(x)))
    jobs.wait_until(lambda: steps.finished == steps.begun)
    assert steps.raised.startswith("JaxRuntimeError: INTERNAL: CpuCallback")
    with ep.watch.step():
      pass
    assert steps.raised == ""
  assert "stands still" not in capsys.readouterr().err


def test_a_step_inside_another_ends_with_it():
  with ep.watch() as watch:
    steps = watch._steps
    for begun in 2, 4:
      with ep.watch.step("outer") as outer:
        with ep.watch.step("inner") as inner:
          inner(jnp.zeros(1))
        steps.poll()
        assert (steps.begun, steps.finished) == (begun, begun - 2)
        outer(jnp.zeros(1))
      jobs.wait_until(lambda begun=begun: steps.finished == begun)
      assert steps.launched == begun


_BLOCKED = """
import os, sys, time
import ep
with ep.watch(stall_s=0.5, exit_after_s=0.5):
  with ep.watch.step():
    sys.stdout.write("buffered")
    print("ready", file=sys.stderr, flush=True)
    if "full" in sys.argv:
      while True:
        sys.stdout.write(1000 * "x")
    time.sleep(600)
"""


def test_a_process_ends_although_it_cannot_print():
  """Nobody reads one pipe, so that the step stands still; another is closed."""
  options = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
  children = [
    subprocess.Popen(
      [sys.executable, "-c", _BLOCKED, pipe],
      env=programs.environment(),
      **options,
    )
    for pipe in ("full", "broken")
  ]
  for child in children:
    assert child.stdout.readline().endswith(b"ready\n")
  children[1].stdout.close()
  assert [child.wait(60) for child in children] == [70, 70]
  children[0].stdout.close()


def test_a_process_has_one_watch():
  with ep.watch.step() as launched:  # outside: no effect
    assert launched(5) == 5
  with ep.watch():
    with pytest.raises(RuntimeError, match="is watched already"):
      with ep.watch():
        pass
  with ep.watch():
    pass


_WAITS = Record(
  host="a", pid=10, time=0.0, still_s=60.0, begun=6, launched=6, finished=5,
  name="train", raised="", has_left=False, stack='File "t.py", line 1 in f',
)  # fmt: skip


def with_values(**changes):
  return dataclasses.replace(_WAITS, **changes)


def test_equal_processes_have_one_entry():
  records = {p: with_values(pid=10 + p) for p in (0, 1, 2, 4)}
  records[3] = with_values(
    host="b", pid=7, begun=5, launched=5, stack="\x1b[2J"
  )
  assert [*report(0, 6, records, "")] == [
    "ep.watch: process 0 of 6 stands still for 60 s. Step 5 is the first that"
    " some process has not finished:",
    '  process 3 (b, pid 7): has not begun step 5; finished step 4 ("train"),'
    " for 60 s. Python:",
    "    ?[2J",
    '  processes 0-2, 4 (a, pid 10, 11, 12, 14): launched step 5 ("train"), but'
    " step 5 has not finished, for 60 s. Python:",
    '    File "t.py", line 1 in f',
    "  process 5: unknown; no record of ep.watch.",
  ]


def test_ends_of_processes_are_told_apart():
  """The old record of a silent process does not count as the job's step."""
  records = {
    0: _WAITS,
    1: with_values(
      begun=3, launched=3, finished=3, silent_s=90.0, state="dead"
    ),
    2: with_values(begun=5, launched=5, has_left=True, stack=""),
    3: with_values(raised="KeyError: 1", finished=6, has_left=True, stack=""),
    4: with_values(begun=9, launched=8),
    5: with_values(begun=9, launched=9, finished=8, name="b"),
  }
  text = "\n".join(report(0, 6, records, ""))
  assert "Step 5 is the first" in text
  for line in (
    "process 1 (a, pid 10): is dead. Its last record: has not begun step 3;"
    ' finished step 2 ("train"), for 90 s.',
    "process 2 (a, pid 10): left ep.watch, after 5 steps, for 60 s.",
    "process 3 (a, pid 10): left ep.watch by KeyError: 1, after 6 steps",
    'process 4 (a, pid 10): launched step 8 ("train"), but step 5 has not',
    'process 5 (a, pid 10): has finished step 5, and began step 8 ("b")',
  ):
    assert line in text
