# SPDX-License-Identifier: Apache-2.0
"""`ep stuck` finds the records of processes, and reports damaged records."""

import json
import os
import signal
import struct
import subprocess
import sys
import threading

import pytest

from cases import Case
from conftest import make_mesh
import ep
from ep._tools import stuck
from groups import bootstrap, not_with_xla
import programs


def own_report():
  return "\n".join(stuck.report(stuck.find([os.getpid()])))


@not_with_xla("no status of its ranks")
def test_a_group_that_ended_is_not_printed():
  group = bootstrap(make_mesh({"ep": 4}), name="an ended group")
  with group:
    Case(ep.EpLayerConfig(group)).check(lambda ops: ops.sizes())
    assert 'group "an ended group"' in own_report()
  assert "an ended group" not in own_report()


def test_stacks_are_shown_without_a_group_of_host():
  group = bootstrap(make_mesh({"ep": 4}), backend="xla")
  del group
  assert "test_stacks_are_shown_without" in own_report()


def test_other_processes_are_refused(capsys):
  sleep = subprocess.Popen(["sleep", "60"])
  try:
    assert stuck.main([str(sleep.pid)]) == 0
    text = capsys.readouterr().out
    assert text == f"Process {sleep.pid} has no group of ep.\n"
  finally:
    sleep.kill()
    sleep.wait()
  for pid in sleep.pid, 0, "9" * 5000:
    refusal = stuck.main([str(pid)])
    assert refusal == f"ep stuck: there is no process {pid} on this host."
  with pytest.raises(SystemExit):
    stuck.main(["-1"])
  assert "'-1' is no process id" in capsys.readouterr().err


def test_another_user_is_refused(monkeypatch):
  """A fake user id makes this process belong to another user."""
  monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
  assert "is another user's; ask as that user" in stuck.main([str(os.getpid())])


def record(**fields):
  """Returns the bytes of a record with changed fields."""
  wait = dict(op="ep_x", waiting="rank 0", missing="rank 1", since=1.0)
  other = dict(rank="rank 1", last="", since=1.0)
  good = dict(pid=os.getpid(), time=2.0, group="g", job="", process=0)
  good |= dict(waits=[wait], others=[other], left_out=0)
  return json.dumps(good | fields).encode()


def memory(text, number=2, max_bytes=None, size=None, magic=b"ep_text1"):
  """Returns `text` in the format of shared_text.h, as text `number`."""
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
  """Returns what `stuck.find` finds while this process has a memfd of bytes."""
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


def test_a_pipe_is_no_record(tmp_path):
  """An open of a pipe without a writer would block."""
  os.mkfifo(tmp_path / "pipe")
  with pytest.raises(OSError):
    stuck._read_text(tmp_path / "pipe")


def test_what_is_printed_does_not_control_a_terminal():
  text = memory(record(group="\x1b[2J\n", others=[], job="bell\a"))
  (process,) = processes_with(text)
  assert not process.faults
  report = "\n".join(stuck.report([process]))
  assert 'group "?[2J?"' in report
  assert "\x1b" not in report


def test_a_record_of_another_process_is_not_taken():
  """Skips the parent's record, whose descriptor a forked child inherits."""
  found = processes_with(memory(record(pid=os.getppid(), group="theirs")))
  assert "theirs" not in [r.group for process in found for r in process.records]


def test_a_header_that_mixes_two_texts_is_read_again(monkeypatch):
  """One read may return the number of a text and the size of an older text."""
  text, pread = record(group="complete"), os.pread
  older, newer = (memory(text, n, size=s) for n, s in ((2, 5), (4, None)))
  file = os.memfd_create("ep_status")
  os.write(file, older)

  def mix(descriptor, count, at):
    if count == len(newer) - len(text) and pread(file, 16, 0) == older[:16]:
      os.pwrite(file, newer, 0)
      return newer[:16] + older[16:count]
    return pread(descriptor, count, at)

  monkeypatch.setattr(os, "pread", mix)
  try:
    (process,) = stuck.find([os.getpid()])
  finally:
    os.close(file)
  assert [r.group for r in process.records] == ["complete"]


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


def test_a_signal_that_the_program_handles_is_not_sent():
  """`ep stuck` shows no stacks if the program handles the signal."""
  program = """
import faulthandler, os, signal, time
signal.signal(signal.SIGRTMAX - 7, lambda *_: print("a signal"))
from ep._tools import stuck
from ep._src.group import stacks
stacks.offer()
assert stuck.find([os.getpid()]) == []
"""
  code, text = programs.run("-c", program)
  assert (code, text) == (0, "")


def test_a_process_that_the_signal_would_kill_gets_no_signal(capsys):
  """The process offers stacks but does not catch the signal."""
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
