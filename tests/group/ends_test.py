# SPDX-License-Identifier: Apache-2.0
"""However a rank ends, each other rank says so soon, and the job ends.

Each table has jobs by name. A job's program is the code of each rank, with the
functions of ending.py. The C++ process_test has ranks that die at any moment.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import re
import signal
import time
import types

import jax
import pytest

from ep._src.base import compat
from ep._src.group import liveness
import jobs

_AT_ONCE = 3  # jobs
_LIMIT_S = 120.0  # for a job

TIMEOUT_S = 3.0  # a timeout_s that a job reaches
EXIT_S = 1.0  # an exit_after_s that a job reaches


@dataclasses.dataclass(frozen=True)
class End:
  """Describes what the other ranks say about an end, and when."""

  says: str  # a regular expression
  who: set[int]
  after_s: float = 0.0
  within_s: float = 5.0


@dataclasses.dataclass(frozen=True)
class Job:
  """A job of ranks that end, and all that is known at its end."""

  program: list[str]  # the code of each rank; the last one is for all others
  codes: list[int | None]  # of all ranks; None: stopped by the launcher
  code: int | None = None  # of the launcher; None: nobody starts the ranks
  report: str = ""  # a regular expression for the launcher's output
  logs: dict[int, str] = dataclasses.field(default_factory=dict)
  ends: dict[str, End] = dataclasses.field(default_factory=dict)
  within_s: float = 60.0  # from the end of a rank to the end of the job
  grace: float = 20.0  # the launcher's options
  timeout: float = 100.0
  devices: int = 1
  signal: int | None = None  # for the launcher, when all ranks hang


def death(event, who):
  """Returns what `who` say if a rank dies in an op of a layer with a name."""
  rank, _, op, _ = event.split()
  return {event: End(rf'ep_{op}\(layer "moe_3"\).*process {rank}\b', who)}


_XLA = "ep: XLA's error names no process, but process {} {}; read its log.\n$"

DEATHS = {
  "of four processes": Job(
    [
      f"stop(2, timeout_s={TIMEOUT_S}, exit_after_s=5);"
      "death(3, 'KILL', 'prepare', 'during');"
      "death(2, 'SEGV', 'dispatch', 'during');"
      "death(1, 0, 'combine', 'before'); leave()"
    ],
    codes=[0, 0, -signal.SIGSEGV, -signal.SIGKILL],
    code=128 + signal.SIGKILL,
    ends={
      "stop": End(
        rf'ep_prepare\(layer "moe_3"\).* waited timeout_s = {TIMEOUT_S:g} s for'
        r" rank 2 \(process 2\) whose last op was",
        {0, 1, 3},
        after_s=TIMEOUT_S - 0.5,  # they may have come earlier
        within_s=3 * TIMEOUT_S,
      )
    }
    | death("3 KILL prepare during", {0, 1, 2})
    | death("2 SEGV dispatch during", {0, 1})
    | death("1 0 combine before", {0}),
    grace=60.0,
  ),
  "an exception": Job(
    [
      "run = prepare(); run(); expect_error('end', forever, run)",
      "run = prepare(); run(); die('raise')",
    ],
    codes=[0, 1],
    code=1,
    logs={1: "no data"},
    ends={"end": End(r"UNAVAILABLE.*process 1\b", {0})},
    report="rank 1 failed with exit code 1.*no data",
  ),
  "rank 0, and no other rank awaits another": Job(
    [
      "load_library(); die('KILL')",
      "load_library(); wait_for_death(); raise ValueError('no data')",
      "load_library(); wait_for_death(); time.sleep(1); print('alive')",
    ],
    codes=[-9, 1, 0],
    code=128 + 9,
    logs={1: "no data\n$", 2: "^alive\n$"},
  ),
}

EXITS = {
  "before an op that only the other rank ran": Job(
    [
      "run = prepare(); run(); note('goes_on'); run()",
      "run = prepare(); run(); wait_for('goes_on'); time.sleep(3); die(0)",
    ],
    codes=[1, 1],
    code=1,
    logs={
      0: r"UNAVAILABLE: ep_prepare.*rank 1 \(process 1\) finalized the group",
      1: r"At exit: ep_finalize: rank 0 \(process 0\) ran ep_prepare",
    },
    report="rank 1 failed with exit code 1",
  ),
  "with programs in flight": Job(
    [
      "run = prepare(timeout_s=1); x = sleep_on_device(6); note('slept')",
      "run = prepare(timeout_s=1); wait_for('slept'); time.sleep(0.5);"
      "x = sleep_on_device(6); sys.excepthook = sys.__excepthook__;"
      "die('raise')",
    ],
    codes=[1, 1],
    code=1,
    logs={
      0: "At exit: ep: programs that this process has",
      1: "^(?!.*At exit).*no data",
    },
  ),
}

PSUMS = {
  f"of {processes} processes": Job(
    [f"psum({EXIT_S})"],
    codes=[0, 70][-processes:],
    code=70,
    logs={
      processes - 1: r'ep_ffi: ep_prepare\(layer "moe_3"\): rank 0 needs 10'
      rf" receive rows.*ep_ffi: process {processes - 1} ends.*exit_after_s ="
      rf" {EXIT_S:g} s.*rank 0 needs 10 receive rows"
    },
    ends={"psum": End("rank 0 needs 10 receive rows", {0})}
    if processes == 2
    else {},
    report=f"rank {processes - 1} failed with exit code 70",
    devices=4 // processes,
  )
  for processes in (1, 2)
}

# The last line of the other ranks names the rank.
OF_XLA = {
  "stays away": Job(
    ["forever(xla('op'))", "xla('op'); hang()"],
    codes=[1, None],
    logs={0: _XLA.format(1, "has not run this program")},
  ),
  "exits": Job(
    ["forever(xla('op'))", "run = xla('op'); run(); die(0)"],
    codes=[1, 0],
    code=1,
    logs={0: _XLA.format(1, "has exited")},
    report="ep.launch: rank 1 ended with exit code 0 before the others.*"
    "ep.launch: rank 0 failed with exit code 1",
  ),
  "raises": Job(
    ["forever(xla('move'))", "run = xla('move'); run(); die('raise')"],
    codes=[1, 1],
    logs={0: _XLA.format(1, r"has failed \(ValueError: no data\)")},
  ),
  "dies, and two others notice": Job(
    ["forever(xla('psum'))"] * 2 + ["run = xla('psum'); run(); die('KILL')"],
    codes=[1, 1, -9],
    code=128 + 9,
    logs={rank: _XLA.format(2, "has died") for rank in range(2)},
  ),
}

_FIRST = r"^(?:(?!ep\.launch: ).)*ep\.launch: "  # the launcher's first line

OF_THE_LAUNCHER = {
  "a failure ends all": Job(
    ["hang()", "print('hello from', 1); wait_for('hangs'); die(7)"],
    codes=[None, 7],
    code=7,
    report=rf"{_FIRST}rank 1 failed with exit code 7.*  \| hello from 1.*"
    "rank 0 was still running after another's failure",
    logs={0: "most recent call first"},
    grace=0.5,
  ),
  "a rank that was killed is named before ranks that exit for this reason": Job(
    ["fail_after_death()"] * 2 + ["stop_launcher(); die('KILL')"],
    codes=[1, 1, -9],
    code=128 + 9,
    report=rf"(?!.*\| line 1){_FIRST}rank 2 was killed by signal 9; out of mem"
    + r".*rank [01] failed with exit code 1: rank [01] lost" * 2,
  ),
  "a rank that calls os._exit is named before ranks that exit for this": Job(
    ["fail_after_death()"] * 2
    + ["stop_launcher(); note('pid', str(os.getpid())); os._exit(75)"],
    codes=[1, 1, 75],
    code=75,
    report=rf"{_FIRST}rank 2 failed with exit code 75;"
    + r".*rank [01] failed with exit code 1: rank [01] lost" * 2,
  ),
  "the rank that began to exit first decides the code": Job(
    [
      "wait_for('exits'); tell_launcher('ending'); sys.exit('lost rank 1')",
      "tell_launcher('ending'); note('exits'); time.sleep(1); sys.exit(75)",
    ],
    codes=[1, 75],
    code=75,
    report="rank 1 failed with exit code 75.*"
    "rank 0 failed with exit code 1: lost rank 1",
  ),
  "the cause is an exception or a fatal error": Job(
    [
      "die(7)",
      "wait_for_death(); error = ValueError('as planned\\nin two lines');"
      "error.add_note('-' * 20); error.add_note('JAX hides frames.');"
      "raise error",
      "wait_for_death(); time.sleep(1);"
      "print('F1125 10:58:22.683026 180 client.h:80] Ends');"
      "os.abort()",
      "wait_for_death(); exec('1 +')",
    ],
    codes=[7, 1, -6, 1],
    code=7,
    report=_FIRST
    + "rank 0 failed with exit code 7;"
    + "(?=.*rank 1 failed with exit code 1: ValueError: as planned; its log)"
    + r"(?=.*rank 2 was killed by signal 6: F1125 10:58:22\.683026 180 client.h"
    + r":80\] Ends; its log).*rank 3 failed with exit code 1: SyntaxError: inv",
  ),
  "one rank does not join": Job(
    ["tell_launcher('joined')", ""],
    codes=[0, 0],
    code=1,
    report=r"of 2 ranks, these have not joined the others: 1\. .*"
    r"Call ep\.launch\.initialize\(\) before",
  ),
  "a rank exits before it joins a rank that waits": Job(
    # Without the launcher, JAX would let rank 0 wait for 300 s.
    ["initialize()", ""],
    codes=[None, 0],
    code=1,
    report="rank 1 ended with exit code 0 before it joined the other.*"
    "rank 0 was still running after another's failure.*"
    r"of 2 ranks, these have not joined the others: 1\.",
    grace=0.5,
  ),
  "a timeout": Job(
    # The launcher kills rank 2, which ignores SIGABRT.
    [
      "tell_launcher('joined'); hang()",
      "tell_launcher('joined')",
      "tell_launcher('joined'); hang(ignore=signal.SIGABRT)",
    ],
    codes=[None, 0, None],
    code=124,
    report=rf"{_FIRST}rank 1 ended with exit code 0 before the others"
    ".*rank 0 was still running at the timeout"
    ".*rank 2 was still running at the timeout",
    logs={0: "most recent call first.* in hang"},
    timeout=4.0,
  ),
  "SIGTERM": Job(
    # Without the launcher, JAX would catch it. Rank 1 uses some of `grace`.
    ["initialize(); hang()", "initialize(); stop_slowly(); hang()"],
    codes=[0, 0],
    code=128 + signal.SIGTERM,
    signal=signal.SIGTERM,
    logs={0: "^$", 1: "^stopped\n$"},
    report="ep.launch: ended by SIGTERM\n$",
    within_s=5.0,
  ),
  "SIGKILL of the launcher": Job(
    ["hang()"],
    codes=[0, 0],
    code=-signal.SIGKILL,
    signal=signal.SIGKILL,
    report="^$",
  ),
  "a child that would outlive its rank": Job(
    ["start_child(); tell_launcher('joined')"], codes=[0], code=0
  ),
}

# The first one waits for longer than all others run.
JOBS = OF_XLA | DEATHS | EXITS | PSUMS | OF_THE_LAUNCHER


def run(name, folder):
  """Runs a job, checks all that its row says, and returns its begin and end."""
  begin, begun = time.monotonic(), {}
  row, argv = JOBS[name], (jobs.ENDING, *JOBS[name].program)
  count = len(row.codes)
  if row.code is None:
    job = jobs.Plain(folder, *argv, hosts=[jobs.ThisHost] * count)
    with contextlib.closing(job):
      codes = job.codes(
        _LIMIT_S, [r for r in job.ranks if row.codes[r] is not None]
      )
      ended_at = time.monotonic()
    assert codes == [code for code in row.codes if code is not None]
  else:
    options = dict(grace=row.grace, timeout=row.timeout)
    job = jobs.Launched(
      folder, *argv, ranks=count, devices=row.devices, **options
    )
    if row.signal:
      jobs.wait_until(lambda: len([*folder.glob("hangs.*")]) == count)
      begun["end"] = time.monotonic()
      job.launcher.send_signal(row.signal)
    code, ended_at = job.wait(_LIMIT_S), time.monotonic()
    output = job.output()
    assert (code, job.codes()) == (row.code, row.codes), output
    assert re.search(row.report, output, re.DOTALL), output
  job.check_nothing_is_left()
  for rank, words in row.logs.items():
    assert re.search(words, job.log(rank), re.DOTALL), job.log(rank)
  check_ends(row, [*map(job.log, job.ranks)], begun, ended_at)
  return begin, ended_at


def check_ends(row, logs, begun, ended_at):
  """Checks what each rank said about each end, and when.

  `begun` has the times of the ends that the test has caused.
  """
  said = [
    (event, rank, float(at), text)
    for rank, log in enumerate(logs)
    for at, event, text in re.findall(r"^at (\S+): ([^:]*): (.*)$", log, re.M)
  ]
  begun |= {event: at for event, _, at, text in said if text == "happens"}
  if "end" in begun:
    assert ended_at - begun["end"] < row.within_s
  for event, end in row.ends.items():
    told = {
      rank: (at - begun[event], text)
      for name, rank, at, text in said
      if name == event and rank in end.who and text != "happens"
    }
    assert told.keys() == end.who, (event, logs)
    for rank, (seconds, text) in told.items():
      assert re.search(end.says, text), (event, rank, text)
      assert end.after_s <= seconds < end.within_s, (event, rank, seconds)


@pytest.fixture(scope="module")
def done(request, tmp_path_factory):
  """Runs the jobs of the selected tests, a few at a time."""
  shared_memory = set(os.listdir("/dev/shm"))
  names = [
    item.callspec.params["name"]
    for item in request.session.items
    if item.path == request.path and "name" in item.fixturenames
  ]
  with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
    yield {
      name: pool.submit(run, name, tmp_path_factory.mktemp("job"))
      for name in sorted(names, key=[*JOBS].index)
    }
    pool.shutdown(cancel_futures=True)
  assert set(os.listdir("/dev/shm")) <= shared_memory


def of(table):
  return pytest.mark.parametrize("name", table)


@of(DEATHS)
def test_a_rank_dies(done, name):
  done[name].result()


@of(EXITS)
def test_a_rank_exits(done, name):
  done[name].result()


@of(PSUMS)
def test_ranks_wait_in_a_psum_for_a_rank_that_failed(done, name):
  done[name].result()


@of(OF_XLA)
def test_a_rank_of_xla_is_missing(done, name):
  done[name].result()


@of(OF_THE_LAUNCHER)
def test_a_rank_ends_under_the_launcher(done, name):
  done[name].result()


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
