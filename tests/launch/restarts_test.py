# SPDX-License-Identifier: Apache-2.0
"""A job that loses ranks begins again with the others, or with new ones."""

import contextlib
import signal
import subprocess
import time

import pytest

from ep import launch
from ep.launch import _restarts as restarts
import programs

# Each rank says that it has joined, and how many ranks it sees.
_RANK = """
import os, signal, sys, time
rank = int(os.environ["JAX_PROCESS_ID"])
ranks = int(os.environ["JAX_NUM_PROCESSES"])
restart = int(os.environ["EP_LAUNCH_RESTART"])
state = os.environ["EP_LAUNCH_STATE"]
open(state + ".joined", "w").close()
print("restart", restart, "rank", rank, "of", ranks, flush=True)
def wait_for_all():
  folder, name = os.path.split(state)
  while len([f for f in os.listdir(folder) if f.endswith(".joined")]) < ranks:
    time.sleep(0.01)
"""
_KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture(autouse=True)
def without_wait(monkeypatch):
  """Ranks fail here sooner than 5 s after they have joined."""
  monkeypatch.setattr(restarts, "_HEALTHY_S", -1.0)


def _launch(code, tmp_path, **options):
  defaults = dict(num_processes=3, timeout_s=60.0, grace_s=0.5)
  options = defaults | dict(log_dir=tmp_path) | options
  return launch.launch(["-c", _RANK + code], **options)


def _ranks(folder, restart):
  """Returns the first line of each rank of an attempt."""
  logs = folder / f"restart_{restart}" if restart else folder
  texts = [log.read_text() for log in logs.glob("rank_*.log")]
  return sorted(text.partition("\n")[0] for text in texts)


def _all_of(restart, ranks):
  return [f"restart {restart} rank {r} of {ranks}" for r in range(ranks)]


@pytest.mark.parametrize("min_processes, ranks", [(None, 3), (2, 2)])
def test_the_others_go_on_without_a_killed_rank(
  tmp_path, capsys, min_processes, ranks
):
  code = f"""
wait_for_all()
if restart == 0:
  {_KILL} if rank == 1 else time.sleep(600)
"""
  options = dict(max_restarts=5, min_processes=min_processes)
  assert _launch(code, tmp_path, **options) == 0
  assert _ranks(tmp_path, 0) == _all_of(0, 3)
  assert _ranks(tmp_path, 1) == _all_of(1, ranks)
  output = capsys.readouterr().out
  assert output.count("ep.launch: restart ") == 1
  line = "ep.launch: restart 1 of 5, because rank 1 was killed by signal 9"
  assert line in output
  assert f": {ranks} ranks joined" in output


def test_all_places_are_used_again_if_too_few_are_left(tmp_path):
  code = f"""
wait_for_all()
if restart < 2:
  {_KILL} if rank == 0 else time.sleep(600)
"""
  assert _launch(code, tmp_path, max_restarts=2, min_processes=2) == 0
  for restart, ranks in enumerate([3, 2, 3]):
    assert _ranks(tmp_path, restart) == _all_of(restart, ranks)


@pytest.mark.parametrize(
  "limits, restarted",
  [
    (dict(max_restarts=2), 2),
    (dict(max_restarts=9, max_restarts_per_hour=1), 1),
  ],
  ids=["max_restarts", "max_restarts_per_hour"],
)
def test_restarts_have_a_limit(tmp_path, capsys, limits, restarted):
  """The exit code is the last attempt's."""
  assert _launch("sys.exit(10 + restart)", tmp_path, **limits) == 10 + restarted
  assert not (tmp_path / f"restart_{restarted + 1}").exists()
  name, value = list(limits.items())[-1]
  assert f"no restart is left ({name} = {value})" in capsys.readouterr().out


@pytest.mark.parametrize(
  "code",
  [
    # Rank 2 fails, and the others report it.
    """
wait_for_all()
if restart == 0:
  time.sleep(0.3 * (rank != 2))
  sys.exit(7 + rank)
""",
    # Rank 2 is stopped, and the others report it.
    """
wait_for_all()
if restart == 0:
  os.kill(os.getpid(), signal.SIGSTOP) if rank == 2 else time.sleep(0.5)
  sys.exit(1)
""",
    # Two ranks are killed, and the others abort.
    f"""
wait_for_all()
if restart == 0:
  if rank in (2, 3):
    {_KILL}
  time.sleep(0.3)
  os.abort()
""",
  ],
  ids=["raised", "stopped", "killed"],
)
def test_the_cause_of_a_failure_loses_its_place(tmp_path, code):
  """The place of a rank has a GPU, or here a variable."""
  ranks = 4 if "(2, 3)" in code else 3
  options = dict(num_processes=ranks, max_restarts=1, min_processes=2)
  assert _launch(code, tmp_path, **options) == 0
  assert _ranks(tmp_path, 1) == _all_of(1, 2)


def test_a_signal_ends_the_job_without_a_restart(tmp_path):
  """The ranks save when SIGTERM comes, and have `grace_s` for it."""
  program = tmp_path / "program.py"
  program.write_text(
    _RANK
    + """
def save(*_):
  time.sleep(0.5)
  print("saved", flush=True)
  sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(600)
"""
  )
  flags = ["--num_processes=2", "--max_restarts=3", "--grace=20"]
  flags += [f"--log_dir={tmp_path}"]
  launcher = programs.start_launcher(*flags, program)
  deadline = time.monotonic() + 60

  def texts():
    return [log.read_text() for log in tmp_path.glob("rank_*.log")]

  while sum("ready" in text for text in texts()) < 2:
    assert time.monotonic() < deadline
    time.sleep(0.05)
  launcher.send_signal(signal.SIGTERM)
  assert launcher.wait(30) == 128 + signal.SIGTERM
  assert all("saved" in text for text in texts())
  assert not (tmp_path / "restart_1").exists()


def test_restarts_after_early_failures_wait_longer_each_time(monkeypatch):
  clock = [0.0]

  def sleep(seconds):
    clock[0] += seconds

  monkeypatch.setattr(restarts.time, "monotonic", lambda: clock[0])
  monkeypatch.setattr(restarts.time, "sleep", sleep)
  monkeypatch.setattr(restarts, "_HEALTHY_S", 5.0)
  limits = restarts.Restarts(2000, None)
  waits = []
  for worked_s in [6.0, *[1.0] * 1100, 6.0]:
    limits.joined(restarts.hosts.Share(0, 0, 1, 1), step=None)
    before = clock[0] = clock[0] + worked_s
    clock[0] += 9.0  # until the other ranks have ended
    outcome = restarts.supervision.Outcome(1, "rank 0 failed", before)
    limits.begin(outcome, [])
    waits.append(round(clock[0] - before - 9.0, 1))
  assert waits == [0, 1, 2, 4, 8, 16, 32, *[60] * 1094, 0]


_ON_TWO_HOSTS = """
if ranks == 4 and restart == 0:
  time.sleep(600)
if restart == 1:
  while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
  sys.exit(1)
"""


class Hosts:
  """Starts launchers of two ranks each on two hosts, with logs in `folder`."""

  def __init__(self, folder, code, *flags):
    self.folder = folder
    program = folder / "program.py"
    program.write_text(_RANK + code)
    self._flags = ["--num_processes=2", "--num_hosts=2", "--max_restarts=5"]
    self._flags += ["--grace=1", "--timeout=100", *flags]
    self._flags += [f"--coordinator={programs.free_address()}"]
    self._program = [program, folder / "go"]

  def start(self, stack, host, logs):
    own = [f"--host_id={host}", f"--log_dir={self.folder / logs}"]
    pipe = dict(stdout=subprocess.PIPE, text=True)
    launcher = programs.start_launcher(
      *self._flags, *own, *self._program, **pipe
    )
    stack.enter_context(launcher)
    stack.callback(launcher.kill)
    return launcher

  def wait_for(self, logs, restart):
    deadline = time.monotonic() + 60
    while len(_ranks(self.folder / logs, restart)) < 2 or not all(
      _ranks(self.folder / logs, restart)
    ):
      assert time.monotonic() < deadline
      time.sleep(0.05)


def test_a_signal_ends_the_wait_for_a_lost_host(tmp_path):
  hosts = Hosts(tmp_path, "time.sleep(600)")
  with contextlib.ExitStack() as stack:
    zero, one = (hosts.start(stack, h, f"host_{h}") for h in range(2))
    hosts.wait_for("host_0", 0)
    one.kill()
    time.sleep(4)  # until host 0 has ended its ranks, and waits
    zero.send_signal(signal.SIGTERM)
    assert zero.wait(10) == 128 + signal.SIGTERM
    assert "ep.launch: ended by SIGTERM" in zero.stdout.read()


def test_a_host_goes_and_comes_back(tmp_path):
  """The launcher of host 1 is killed; a new one joins at the next restart."""
  hosts = Hosts(tmp_path, _ON_TWO_HOSTS, "--min_processes=2")
  with contextlib.ExitStack() as stack:
    zero, one = (hosts.start(stack, h, f"host_{h}") for h in range(2))
    hosts.wait_for("host_1", 0)
    hosts.wait_for("host_0", 0)
    one.kill()
    hosts.wait_for("host_0", 1)
    new = hosts.start(stack, 1, "new")
    time.sleep(1)
    (tmp_path / "go").touch()
    assert new.wait(60) == 0 and zero.wait(60) == 0
    output = zero.stdout.read()
  assert _ranks(tmp_path / "host_0", 1) == _all_of(1, 2)
  both = _ranks(tmp_path / "host_0", 2) + _ranks(tmp_path / "new", 2)
  assert both == _all_of(2, 3)  # a rank of host 0 caused the restart
  assert (
    "restart 1 of 5, because host 1 (127.0.0.1) has ended without a word"
    in output
  )
