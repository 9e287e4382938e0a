# SPDX-License-Identifier: Apache-2.0
"""python -m ep.stuck, in a process of its own, says what hangs and where."""

import json
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from cases import Case
from conftest import assert_shards_equal, make_mesh
import ep
from ep import stuck
from groups import bootstrap, not_with_xla, spec
import programs

LATE = 2  # a rank, whose process is the last one
IS_LATE = jax.process_index() == jax.process_count() - 1

host_only = not_with_xla("nothing is known of its ranks")


def output(*args):
  """Returns what the command prints, which succeeds."""
  code, text = programs.run("-m", "ep.stuck", *args)
  assert code == 0, text
  return text


def wait_for(words, *args):
  """Returns the first output that has these words, within some seconds."""
  deadline = time.monotonic() + 20
  while words not in (text := output(*args)):
    assert time.monotonic() < deadline, text
  return text


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
        text = wait_for("in a_slow_callback", os.getpid())
        everybody = output()
    finally:
      step.may_go_on.set()
    step.check(rows)
  if not IS_LATE:
    return
  waits = (
    rf"{op('dispatch')}: {names(0, 1, 3)} waited \d+\.\d s for {names(LATE)}"
    rf" whose last op was {op('prepare')}\n"
  )
  other = (
    rf"{names(LATE)}: waits for no rank; last in {op('prepare')}, \d+\.\d s ago"
  )
  for report in text, everybody:
    assert 'group "a late group", process' in report
    assert re.search(waits, report), report
    assert re.search(other, report), report
  assert re.search(rf"process {os.getpid()} \(.*\): its Python stacks", text)


@host_only
@pytest.mark.skipif(jax.process_count() == 1, reason="it would stop itself")
def test_a_stopped_process_is_named(folder):
  group = bootstrap(make_mesh({"ep": 4}), name="a stopped group", timeout_s=120)
  with group, jax.set_mesh(group.mesh):
    step = Step(group)
    step.check(step.launch())
    if IS_LATE:
      wait_for("last in ep_dispatch", os.getpid())
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
        text = wait_for("waited", os.getpid())
        theirs = wait_for("This is what process", pid)
      finally:
        (folder / "go").touch()
        os.kill(pid, signal.SIGCONT)
    step.check(rows)
  if IS_LATE:
    return
  assert re.search(
    rf"{op('prepare')}: {names(0, 1)} waited \d+\.\d s for {names(2)} whose"
    rf" last op was {op('dispatch')}, {names(3)} whose last op was",
    text,
  ), text
  assert "it is stopped, by SIGSTOP or a debugger" in theirs
  assert f"kill -CONT {pid} lets it go on" in theirs
  last = rf"{names(2)}: waits for no rank; last in {op('dispatch')}"
  assert re.search(last, theirs), theirs


@host_only
def test_a_group_that_ended_is_not_printed():
  group = bootstrap(make_mesh({"ep": 4}), name="an ended group")
  with group:
    Case(ep.EpLayerConfig(group)).check(lambda ops: ops.sizes())
    assert 'group "an ended group"' in output(os.getpid())
  assert "an ended group" not in output(os.getpid())


def test_stacks_are_shown_without_a_group_of_host():
  group = bootstrap(make_mesh({"ep": 4}), backend="xla")
  del group
  assert "test_stacks_are_shown_without" in output(os.getpid())


def test_other_processes_are_refused():
  sleep = subprocess.Popen(["sleep", "60"])
  try:
    assert output(sleep.pid) == f"Process {sleep.pid} has no group of ep.\n"
  finally:
    sleep.kill()
    sleep.wait()
  for pid in sleep.pid, 0, "9" * 5000:
    refusal = stuck.main([str(pid)])
    assert refusal == f"ep.stuck: there is no process {pid} on this host."
  code, text = programs.run("-m", "ep.stuck", "one", "two")
  assert (code, "usage: python -m ep.stuck" in text) == (1, True)


def test_another_user_is_refused(monkeypatch):
  """This process is then of another user."""
  monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
  assert "is another user's; ask as that user" in stuck.main([str(os.getpid())])


def record(**fields):
  """Returns the bytes of a record, with other fields."""
  wait = dict(op="ep_x", waiting="rank 0", missing="rank 1", since=1.0)
  other = dict(rank="rank 1", last="", since=1.0)
  good = dict(pid=os.getpid(), time=2.0, group="g", job="", process=0)
  good |= dict(waits=[wait], others=[other], left_out=0)
  return json.dumps(good | fields).encode()


def memory(text, number=2, max_bytes=None, size=None, magic=b"ep_text1"):
  """Returns the bytes that shared_text.h describes; text 2 is in buffer 0."""
  max_bytes = len(text) if max_bytes is None else max_bytes
  size = len(text) if size is None else size
  head = struct.pack("=8sQQQQ", magic, number, max_bytes, size, 0)
  return head + text


BAD = {
  "empty": b"",
  "a part of a header": b"ep_text1\1\0",
  "other bytes": bytes(range(256)),
  "another version": memory(record(), magic=b"ep_text2"),
  "no text yet": memory(record(), number=0),
  "a text larger than its buffer": memory(record(), max_bytes=3),
  "a huge buffer": memory(record(), max_bytes=1 << 60, size=1 << 59),
  "a buffer that is not there": memory(record(), number=3, max_bytes=1 << 25),
  "no JSON": memory(b"{"),
  "no UTF-8": memory(b'{"pid": "\xff"}'),
  "no object": memory(b"[1]"),
  "deep JSON": memory(b"[" * 100000),
  "a number as a text": memory(record(pid="1")),
  "no time": memory(record(time=float("nan"))),
  "no list": memory(record(waits={})),
  "a wait without fields": memory(record(waits=[{}])),
  "a rank of another type": memory(record(others=[["rank 0", "", 1.0]])),
}


def processes_with(bytes_of_memory):
  """Returns what is found if this process has such a record."""
  file = os.memfd_create("ep_status")
  try:
    os.write(file, bytes_of_memory)
    return stuck.find([os.getpid()])
  finally:
    os.close(file)


@pytest.mark.parametrize("name", BAD)
def test_bad_bytes_are_a_sentence(name):
  (process,) = processes_with(BAD[name])
  assert len(process.faults) == 1
  assert f"cannot be read: {process.faults[0]}" in "\n".join(
    stuck.report([process])
  )


def test_what_is_printed_does_not_control_a_terminal():
  text = memory(record(group="\x1b[2J\n", others=[], job="bell\a"))
  (process,) = processes_with(text)
  assert not process.faults
  report = "\n".join(stuck.report([process]))
  assert 'group "?[2J?"' in report
  assert "\x1b" not in report


def test_a_record_of_another_process_is_not_taken():
  """As a forked child has the descriptors of its parent."""
  found = processes_with(memory(record(pid=os.getppid(), group="theirs")))
  assert "theirs" not in [r.group for process in found for r in process.records]


def test_a_process_is_found_while_it_opens_and_closes_files():
  is_done = threading.Event()

  def open_and_close():
    while not is_done.is_set():
      files = [os.open("/dev/null", os.O_RDONLY) for _ in range(20)]
      for file in files:
        os.close(file)

  thread = threading.Thread(target=open_and_close)
  thread.start()
  try:
    for _ in range(50):
      (process,) = processes_with(memory(record(group="found")))
      assert "found" in [r.group for r in process.records]
  finally:
    is_done.set()
    thread.join()


def test_the_signal_of_a_program_stays_its_own():
  """Stacks are then not shown, and nothing is sent."""
  program = """
import faulthandler, os, signal, time
signal.signal(signal.SIGRTMAX - 7, lambda *_: print("a signal"))
from ep import stuck
from ep._src.group import stacks
stacks.offer()
assert stuck.find([os.getpid()]) == []
"""
  code, text = programs.run("-c", program)
  assert (code, text) == (0, "")


def test_stacks_are_not_asked_of_who_would_end(capsys):
  """A process that does not catch the signal gets none, whatever it has."""
  number = signal.SIGRTMAX - 7
  program = f"""
import os, time
name = "ep_stacks_{int(number)}_" + str(os.getpid())
file = os.memfd_create(name)
print(flush=True)
time.sleep(60)
"""
  child = subprocess.Popen(
    [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
  )
  try:
    child.stdout.readline()
    assert stuck.main([str(child.pid)]) == 0
    assert "does not catch the signal" in capsys.readouterr().out
    assert child.poll() is None
  finally:
    child.kill()
    child.wait()
    child.stdout.close()
