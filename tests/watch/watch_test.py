# SPDX-License-Identifier: Apache-2.0
"""ep.watch names the cause of a stall, on one host and on two hosts.

The jobs run at the same time. Each job stands still once per test, in the order
of the tests.
"""

import contextlib
import os
import re
import signal

import pytest

import hosts
import jobs

_LIMIT_S = 120
# By cause: what the report of both processes says of process 1.
_CAUSES = {
  "sleeping": r'has not begun step 2; finished step 1 \("train"\), for \d+ s\.'
  r' Python:\n    File "[^"]*ending.py", line \d+ in load_batch\n'
  r'    File "[^"]*ending.py", line \d+ in sleeping\n',
  "evaluating": r'(began|launched) step 2 \("evaluate"\), .*evaluating',
  "raising": r"raised KeyError: 'shard 7' in step 2 \(\"train\"\), and began"
  " none since.* in raising",
}


# The name of a job, what its steps run, and whether it has two hosts.
_JOBS = {
  "one host, psum": ("xla('psum')", False),
  "one host, op": ("prepare()", False),
  "two hosts, psum": ("xla('psum')", True),
}


class Job(jobs.Plain):
  """Two processes that stand still for several causes."""

  def __init__(self, folder, run, machines):
    """Runs steps on `machines`, or on this one if there are none."""
    self.machines = machines
    self._seen = [0, 0]
    code = f"stand_still({run}, {', '.join(_CAUSES)}, stopped)"
    on = machines or [jobs.ThisHost] * 2
    super().__init__(folder, jobs.ENDING, code, hosts=on, devices=2)

  def read(self, index, *patterns):
    """Waits until the new part of a log matches all patterns; returns it."""

    def new():
      return self.log(index)[self._seen[index] :]

    def is_written():
      return all(re.search(pattern, new(), re.DOTALL) for pattern in patterns)

    jobs.wait_until(is_written, _LIMIT_S, lambda: (patterns, new()))
    text = new()
    self._seen[index] += len(text)
    return text


@pytest.fixture(scope="module")
def started(tmp_path_factory):
  """Starts all jobs, and returns a function that returns a job by its name."""
  with contextlib.ExitStack() as stack:

    def start(run, has_two_hosts):
      machines = ()
      if has_two_hosts:
        try:
          machines = stack.enter_context(hosts.two_hosts())
        except pytest.skip.Exception as e:
          return e
      job = Job(tmp_path_factory.mktemp("job"), run, machines)
      return stack.enter_context(contextlib.closing(job))

    yield {name: start(*row) for name, row in _JOBS.items()}


@pytest.fixture
def job(request, started):
  job = started[request.param]
  if not isinstance(job, Job):
    raise job
  return job


# All jobs stand still at the same time.
of_each_job = pytest.mark.parametrize("job", _JOBS, indirect=True)


def process(job, index):
  host = rf"host{index}" if job.machines else re.escape(os.uname().nodename)
  return rf"process {index} \({host}, pid \d+\): "


def waits(job):
  """Matches the lines of process 0, which waits in step 2 for the other."""
  stack = r', for \d+ s\. Python:\n    File "[^"]*", line \d+ in [^\n]*\n'
  what = r'(began|launched) step 2 \("train"\), [^\n]*'
  return process(job, 0) + what + stack


@of_each_job
@pytest.mark.parametrize("cause, what", _CAUSES.items(), ids=list(_CAUSES))
def test_a_process_that_is_elsewhere_is_named(job, cause, what):
  """It sleeps, runs another program, or its step raised an error."""
  first = r"stands still for \d+ s\. Step 2 is the first"
  for index in range(2):
    text = job.read(index, first, process(job, 1) + what, waits(job))
    assert text.count("Step 2 is") == 1
  (job.folder / cause).touch()


@of_each_job
def test_a_stopped_process_is_named(job):
  """Another host cannot see that the process is stopped."""
  what = "is silent: " if job.machines else r"is stopped, by SIGSTOP .*-CONT"
  patterns = process(job, 1) + what + ".* Its last record: "
  job.read(0, patterns, waits(job))
  # nsenter(1), which runs the process on another host, stops and goes on with
  # its process.
  job[1].send_signal(signal.SIGCONT)


@of_each_job
def test_an_ended_process_or_a_lost_host_is_named(job):
  for index in range(2):
    job.read(index, "stepped")
  if job.machines:
    job.machines[0].pull_the_cable()
    job.read(0, process(job, 1) + "is silent: its host or network is gone")
    job.read(1, "The job's key-value store has not answered for")
    assert job.codes(_LIMIT_S) == [70, 70]
  else:
    job[1].kill()
    # An op of ep, and often a psum, fails if a process ends.
    waits_or_failed = r"(raised JaxRuntimeError: |launched|began)"
    job.read(
      0,
      process(job, 1) + r"is dead\. Its last record: ",
      process(job, 0) + waits_or_failed + r'[^\n]* \("train"\)',
    )
    assert job.codes(_LIMIT_S) == [70, -signal.SIGKILL]
