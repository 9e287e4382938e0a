# SPDX-License-Identifier: Apache-2.0
"""ep.watch counts the steps of one process, and reads states of processes."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import conftest  # makes this process a rank
import ep
from ep._src.base import compat
from ep._src.group import liveness
import programs


def wait_until(holds):
  deadline = time.monotonic() + 30
  while not holds():
    assert time.monotonic() < deadline
    time.sleep(0.02)


def test_a_process_without_peers_reports_one_stall(capsys):
  """The main thread goes on while a program waits on one of four devices."""
  may_go_on = threading.Event()

  def wait(x):
    assert may_go_on.wait(30)
    return np.asarray(x)

  mesh = conftest.make_mesh({"x": 4})
  shard = conftest.PartitionSpec("x")

  def body(x):
    x = jax.lax.cond(
      jax.lax.axis_index("x") == 2,
      lambda x: jax.pure_callback(wait, jax.ShapeDtypeStruct((), x.dtype), x),
      lambda x: x,
      x[0],
    )
    return jax.lax.psum(x, "x")

  program = jax.jit(
    jax.shard_map(
      body,
      mesh=mesh,
      in_specs=shard,
      out_specs=conftest.PartitionSpec(),
      check_vma=False,
    )
  )
  x = conftest.to_global(np.ones(4, np.float32), mesh, shard)
  lines = []

  def has(text):
    lines.append(capsys.readouterr().err)
    return text in "".join(lines)

  with ep.watch(stall_s=0.5):

    def step():
      with ep.watch.step("train") as launched:
        launched(program(x)).block_until_ready()

    thread = threading.Thread(target=step)
    thread.start()
    wait_until(lambda: has("stands still"))
    time.sleep(1)
    assert not has("goes on")
    may_go_on.set()
    thread.join()
    wait_until(lambda: has("ep.watch: process 0 goes on."))
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
    wait_until(lambda: steps.finished == steps.begun)
    assert len(steps._pending) + len(steps._new) == 0
    with pytest.raises(jax.errors.JaxRuntimeError):
      with ep.watch.step() as launched:
        jax.block_until_ready(launched(program(x)))
    wait_until(lambda: steps.finished == steps.begun)
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
      wait_until(lambda begun=begun: steps.finished == begun)
      assert steps.launched == begun


def test_a_store_that_is_gone_delays_no_step(monkeypatch):
  is_over = threading.Event()
  client = types.SimpleNamespace(
    key_value_set=lambda *args, **kwargs: is_over.wait(60)
  )
  monkeypatch.setattr(compat, "distributed_client", lambda: client)
  begin = time.monotonic()
  with ep.watch():
    pass
  assert time.monotonic() - begin < 30
  is_over.set()


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


@pytest.mark.parametrize("pipe", ["full", "broken"])
def test_a_process_ends_although_it_cannot_print(pipe):
  """Nobody reads the pipe, so that the step stands still; or it is closed."""
  options = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
  argv = [sys.executable, "-c", _BLOCKED, pipe]
  child = subprocess.Popen(argv, env=programs.environment(), **options)
  with child.stdout as reader:
    assert reader.readline().endswith(b"ready\n")
    if pipe == "broken":
      reader.close()
    assert child.wait(60) == 70


def test_a_process_has_one_watch():
  with ep.watch.step() as launched:  # outside: no effect
    assert launched(5) == 5
  with ep.watch():
    with pytest.raises(RuntimeError, match="is watched already"):
      with ep.watch():
        pass
  with ep.watch():
    pass


def test_a_stopped_and_a_dead_process_are_told_apart(monkeypatch):
  store = {}
  client = types.SimpleNamespace(
    key_value_set=lambda k, v, allow_overwrite: store.update({k: v}),
    key_value_dir_get=lambda folder: [*store.items()],
  )
  monkeypatch.setattr(compat, "distributed_client", lambda: client)
  child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1)
  monkeypatch.setattr(os, "getpid", lambda: child.pid)
  liveness.announce()
  try:
    for number, state in (0, ""), (signal.SIGSTOP, "stopped"):
      child.send_signal(number)
      wait_until(lambda state=state: liveness.states(client) == {0: state})
  finally:
    child.kill()
  wait_until(lambda: liveness.states(client) == {0: "dead"})
  assert liveness.dead(client, [0, 1]) == [0]
  child.communicate()
  assert liveness.states(client) == {0: "dead"}
