# SPDX-License-Identifier: Apache-2.0
"""A job runs on two hosts, whose launchers start together and exit together."""

from concurrent import futures
import contextlib
import math
import socket
import time

from hosts import two_hosts
import pytest

from ep import launch
from ep.launch import _command as command
import programs

_PROGRAM = """
import conftest  # makes this process a rank
import ep
from cases import Case
from groups import group, layer
from op_functions import everything

for backend in None, "host":
  try:
    with ep.ep_bootstrap(group().mesh, num_experts=4, backend=backend) as new:
      print("picked", new.backend)
  except ValueError as e:
    print("refused", e)
case = Case(layer(), "skewed", whole=True)
inputs = case.inputs()
while True:
  case.check(everything, *inputs)
  print("stepped", flush=True)
"""


class Job:
  """A job on two hosts: logs, exit codes, and seconds from failure to exit."""

  def __init__(self, folder):
    program = folder / "program.py"
    program.write_text(_PROGRAM)
    with two_hosts() as hosts:
      self.logs = [folder / str(host.number) for host in hosts]
      outputs = [folder / f"output_{host.number}" for host in hosts]
      launchers = []
      for host, logs, output in zip(hosts, self.logs, outputs, strict=True):
        flags = [
          "--num_processes=1",
          "--devices_per_process=2",
          "--num_hosts=2",
          f"--host_id={host.number}",
          f"--coordinator={hosts[0].address}:1234",
          "--timeout=300",
          f"--log_dir={logs}",
        ]
        with output.open("wb") as file:
          options = dict(start=host.start, stdout=file, stderr=file)
          options["env"] = {"EP_TEST_BACKEND": "xla"}
          launchers.append(programs.start_launcher(*flags, program, **options))
      last = self.logs[1] / "rank_1.log"
      deadline = time.monotonic() + 200
      while not (last.exists() and "stepped" in last.read_text()):
        assert time.monotonic() < deadline, outputs[1].read_text()
        time.sleep(0.1)
      hosts[0].pull_the_cable()
      begin = time.monotonic()
      self.codes = [launcher.wait(100) for launcher in launchers]
      self.seconds = time.monotonic() - begin
      self.outputs = [output.read_text() for output in outputs]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
  """Runs a job, and pulls the cable in the middle of a step."""
  return Job(tmp_path_factory.mktemp("job"))


def test_the_default_backend_is_xla_and_host_says_why_not(job):
  for output, (me, other) in zip(job.outputs, [(0, 1), (1, 0)], strict=True):
    assert "picked xla\n" in output
    assert f"processes {me} and {other} run on different hosts" in output
    assert "refused ep_bootstrap: " in output


def test_a_pulled_cable_is_an_error_on_both_sides(job):
  """Before the cable is pulled, each rank compares a step with the oracle."""
  for rank, logs in enumerate(job.logs):
    assert "stepped" in (logs / f"rank_{rank}.log").read_text()
  assert job.codes == [1, 1]
  assert "host 1 (10.64.0.2) is out of reach" in job.outputs[0]
  assert "host 0 (10.64.0.1) is out of reach" in job.outputs[1]
  assert job.seconds < 60


def send(port, text):
  """Sends bytes to a launcher as soon as it listens; returns the connection."""
  while True:
    with contextlib.suppress(ConnectionRefusedError):
      connection = socket.create_connection(("127.0.0.1", port))
      with contextlib.suppress(ConnectionError):  # it dropped the connection
        connection.sendall(text)
      return connection


def launch_on(*hosts, argv=("-m", "this"), strangers=(), **options):
  """Runs one launcher per dict of options in `hosts`, all on this machine.

  Sends each of the `strangers` to host 0 before another host comes. Returns the
  exit code of each launcher, or its error, and the port.
  """
  address = programs.free_address()
  port = address.partition(":")[2]
  options |= dict(coordinator=address, timeout_s=60.0)

  def run(own):
    try:
      return launch.launch(
        argv, **dict(num_processes=1, num_hosts=2) | options | own
      )
    except RuntimeError as error:
      return str(error)

  with futures.ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
    ends = [pool.submit(run, hosts[0])]
    for text in strangers:
      stack.enter_context(send(port, text))
    ends += [pool.submit(run, host) for host in hosts[1:]]
    return [end.result() for end in ends], port


@pytest.mark.parametrize(
  "first, second, says",
  [
    (
      {},
      {"num_processes": 2},
      "host 1 was started with --num_processes=2, but host 0 with --num_pro",
    ),
    (
      {"num_hosts": 3, "join_timeout_s": 1.0},
      {"num_hosts": 3},
      "of 3 hosts these did not come to host 0 at 127.0.0.1, port {port},"
      " within 1 s: 2;",
    ),
  ],
  ids=["another number of processes", "a host is missing"],
)
def test_hosts_that_do_not_fit_say_so(tmp_path, first, second, says):
  ends, port = launch_on(first, second | {"host_id": 1}, log_dir=tmp_path)
  for end in ends:
    assert end.startswith(f"ep.launch: {says.format(port=port)}")


def test_host_0_drops_strangers(tmp_path):
  """Connections without a message, kept open, delay no host."""
  strangers = [b""] * 5 + [b'{"host_id": '] * 2
  strangers += [
    text + b"\n"
    for text in (
      b"GET / HTTP/1.1\r",
      b"[" * 4000,
      b"[" * 200_000,
      b'{"host_id": 1e999}',
      b'{"host_id": 2}',
      b'{"host_id": [1]}',
      b'{"host_id": "\xff"}',
    )
  ]
  options = dict(join_timeout_s=20.0, log_dir=tmp_path)
  one = {"host_id": 1}
  ends, _ = launch_on({}, one, strangers=strangers, **options)
  assert ends == [0, 0]


def test_two_hosts_with_one_number_say_so(tmp_path):
  """Host 0 waits for hosts 1 and 2, but two launchers have --host_id=1."""
  one = {"host_id": 1}
  ends, _ = launch_on({}, one, one, num_hosts=3, log_dir=tmp_path)
  for end in ends:
    assert "both started with --host_id=1" in end


def test_a_host_alone_names_the_missing_host(tmp_path, capsys):
  flags = ["--num_processes=1", "--num_hosts=2", "--host_id=1"]
  flags += ["--coordinator=127.0.0.1:1", "--join_timeout=1"]
  with pytest.raises(SystemExit) as end:
    command.main([f"--log_dir={tmp_path}", *flags, "-m", "this"])
  assert end.value.code == 1
  says = "ep.launch: host 0 did not come to 127.0.0.1, port 1, within 1 s"
  assert says in capsys.readouterr().err


def test_a_failure_stops_both_hosts(tmp_path, capsys):
  """Ranks are numbered across hosts: host 1 has ranks 2 and 3."""
  program = """
import os, sys, time
if os.environ["JAX_PROCESS_ID"] == "3":
  sys.exit(7)
time.sleep(600)
"""
  options = dict(num_processes=2, grace_s=0.5, log_dir=tmp_path)
  options["join_timeout_s"] = math.inf
  codes, _ = launch_on({}, {"host_id": 1}, argv=["-c", program], **options)
  assert codes == [7, 7]
  output = capsys.readouterr().out
  assert "host 1 (127.0.0.1) says: rank 3 failed with exit code 7" in output
  assert "ep.launch: rank 3 failed with exit code 7" in output


def test_a_rank_that_never_joins_stops_both_hosts(tmp_path, capsys):
  """Rank 0 waits for rank 1, which exits with code 0 before it joins."""
  program = """
import os, time
if os.environ["JAX_PROCESS_ID"] == "0":
  open(os.environ["EP_LAUNCH_STATE"] + ".joining", "w").close()
  time.sleep(600)
"""
  options = dict(grace_s=0.5, log_dir=tmp_path)
  codes, _ = launch_on({}, {"host_id": 1}, argv=["-c", program], **options)
  assert codes == [1, 1]
  output = capsys.readouterr().out
  says = "says: rank 1 ended with exit code 0 before it joined the other ranks"
  assert f"ep.launch: host 1 (127.0.0.1) {says}" in output
