# SPDX-License-Identifier: Apache-2.0
"""ep.watch names the cause of a stall, on one host and on two hosts.

Each job stands still once per test, in the order of the tests.
"""

import contextlib
import os
import pathlib
import re
import signal
import time

import pytest

import hosts
import programs

_PROGRAM = pathlib.Path(__file__).with_name("stalls.py")
_CAUSES = ["sleeping", "exchanging", "evaluating", "raising", "stopped"]
_LIMIT_S = 120


class Job:
  """Two processes that stand still for each of `_CAUSES`."""

  def __init__(self, folder, machines):
    self.machines, self.folder = machines, folder
    self._seen = [0, 0]
    self.logs = [folder / f"rank_{rank}.log" for rank in range(2)]
    argv = [_PROGRAM, folder, *_CAUSES]
    if machines:
      env = {"EP_TEST_BACKEND": "xla"}
      self.programs = hosts.start_ranks(
        machines, folder, *argv, devices=2, env=env
      )
    else:
      flags = ["--num_processes=2", "--devices_per_process=2"]
      flags += [f"--timeout={3 * _LIMIT_S}", f"--log_dir={folder}"]
      with (folder / "output").open("wb") as file:
        options = dict(env={"EP_TEST_BACKEND": "host"})
        options |= dict(stdout=file, stderr=file)
        launcher = programs.start_launcher(*flags, *argv, **options)
      self.programs = [launcher]

  def read(self, process, *patterns):
    """Waits until the new part of a log matches all patterns; returns it."""
    deadline = time.monotonic() + _LIMIT_S
    log = self.logs[process]
    while True:
      is_last = time.monotonic() > deadline
      text = log.read_text() if log.exists() else ""
      new = text[self._seen[process] :]
      if all(re.search(pattern, new, re.DOTALL) for pattern in patterns):
        self._seen[process] = len(text)
        return new
      assert not is_last, (patterns, new)
      time.sleep(0.1)

  def go_on(self, cause):
    (self.folder / cause).touch()

  def close(self):
    for program in self.programs:
      program.terminate()
      program.wait()


@pytest.fixture(scope="module", params=["one host", "two hosts"])
def job(request, tmp_path_factory):
  with contextlib.ExitStack() as stack:
    machines = ()
    if request.param == "two hosts":
      machines = stack.enter_context(hosts.two_hosts())
    folder = tmp_path_factory.mktemp("job")
    yield stack.enter_context(contextlib.closing(Job(folder, machines)))


def process(job, index):
  host = rf"host{index}" if job.machines else re.escape(os.uname().nodename)
  return rf"process {index} \({host}, pid \d+\): "


def waits(job):
  """Matches the lines of process 0, which waits in step 2 for the other."""
  stack = r', for \d+ s\. Python:\n    File "[^"]*", line \d+ in [^\n]*\n'
  what = r'(began|launched) step 2 \("train"\), [^\n]*'
  return process(job, 0) + what + stack


def test_a_sleeping_process_is_named(job):
  last = 'has not begun step 2; finished step 1 ("train")'
  patterns = [
    r"stands still for \d+ s\. Step 2 is the first",
    process(job, 1) + re.escape(last) + r", for \d+ s\. Python:\n"
    r'    File "[^"]*stalls.py", line \d+ in load_batch\n'
    r'    File "[^"]*stalls.py", line \d+ in sleeping\n',
    waits(job),
  ]
  for index in range(2):
    assert job.read(index, *patterns).count("Step 2 is") == 1
  job.go_on("sleeping")


@pytest.mark.parametrize(
  "cause, what",
  [
    ("exchanging", "has not begun step 2;.* in exchanging"),
    (
      "evaluating",
      r'(began|launched) step 2 \("evaluate"\), .*evaluating',
    ),
    (
      "raising",
      r"raised KeyError: 'shard 7' in step 2 \(\"train\"\).* in raising",
    ),
  ],
)
def test_a_process_that_does_something_else_is_named(job, cause, what):
  """It waits in an op or in another program, or its step raised an error."""
  for index in range(2):
    job.read(index, process(job, 1) + what, waits(job))
  job.go_on(cause)


def test_a_stopped_process_is_named(job):
  """Another host cannot see that the process is stopped."""
  what = "is silent: " if job.machines else r"is stopped, by SIGSTOP .*-CONT"
  patterns = process(job, 1) + what + ".* Its last record: "
  job.read(0, patterns, waits(job))
  if job.machines:  # nsenter stops with its child, and continues it
    job.programs[1].send_signal(signal.SIGCONT)
  else:
    os.kill(int((job.folder / "pid").read_text()), signal.SIGCONT)


def test_a_lost_host_is_named(job):
  if not job.machines:
    pytest.skip("one host")
  for index in range(2):
    job.read(index, "stepped")
  job.machines[0].pull_the_cable()
  job.read(0, process(job, 1) + "is silent: its host or network is gone")
  job.read(1, "The job's key-value store has not answered for")
  assert [program.wait(_LIMIT_S) for program in job.programs] == [70, 70]
