# SPDX-License-Identifier: Apache-2.0
"""One job runs on two hosts, which start and end together."""

import os
import sys
import time

from hosts import two_hosts
import pytest

import ep_moe
import quick_compiler

_JOIN = """
import os, sys, time
from ep import launch
launch.initialize()
import jax, jax.numpy as jnp
import ep
mesh = jax.make_mesh((2,), ("ep",))
"""
_PICK = """
for backend in None, "host":
  try:
    with ep.ep_bootstrap(mesh, num_experts=4, backend=backend) as group:
      print("picked", group.backend)
  except ValueError as e:
    print("refused", e)
"""
_KIT = """
import testing_subjects
rules = "sizes rows weights tail output gradients repeatable".split()
report = ep.testing.check(testing_subjects.XLA, rules)
print(report)
sys.exit(not report.passed)
"""
_STEPS = """
layer = ep.EpLayerConfig(ep.ep_bootstrap(mesh, num_experts=4, top_k=1))
idx = jnp.zeros((2, 1), jnp.int32)
while True:
  jax.block_until_ready(ep.ep_prepare(layer, idx))
  print("stepped", flush=True)
"""
_FAIL = """
if jax.process_index() == 1:
  sys.exit(7)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def hosts():
  with two_hosts() as both:
    yield both


class Job:
  """A launcher on each host."""

  def __init__(self, hosts, folder, *argv, flags=({}, {})):
    path = os.pathsep.join(filter(None, sys.path))
    env = {**os.environ, "PYTHONPATH": path}
    env["XLA_FLAGS"] = quick_compiler.FLAGS
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES"):
      env.pop(name, None)
    self.outputs = [folder / f"output_{i}" for i in range(len(hosts))]
    self.launchers = []
    for host, output, own in zip(hosts, self.outputs, flags, strict=True):
      all_flags = {
        "num_processes": 1,
        "num_hosts": 2,
        "host_id": host.number,
        "coordinator": f"{hosts[0].address}:1234",
        "join_timeout": 60,
        "timeout": 300,
        "log_dir": output.with_name(output.name + "_logs"),
      } | own
      words = [f"--{name}={value}" for name, value in all_flags.items()]
      with output.open("wb") as file:
        self.launchers.append(
          host.start(
            [sys.executable, "-m", "ep.launch", *words, *map(str, argv)],
            env=env,
            stdout=file,
            stderr=file,
          )
        )

  def wait(self):
    """Returns the exit codes, and all that was written."""
    codes = [launcher.wait(330) for launcher in self.launchers]
    return codes, [output.read_text() for output in self.outputs]


def script(folder, text):
  path = folder / "program.py"
  path.write_text(_JOIN + text)
  return path


def test_the_backend_is_xla_and_host_says_why_not(hosts, tmp_path):
  codes, outputs = Job(hosts, tmp_path, script(tmp_path, _PICK)).wait()
  assert codes == [0, 0], outputs
  for output, (me, other) in zip(outputs, [(0, 1), (1, 0)], strict=True):
    assert "picked xla\n" in output
    assert f"processes {me} and {other} run on different hosts" in output
    assert "refused ep_bootstrap: " in output


def test_the_example_is_right(hosts, tmp_path):
  """Two processes of each host exchange rows with each other, too."""
  program = [ep_moe.__file__, "--num_processes=4", "--iters=1"]
  two = {"num_processes": 2}
  codes, outputs = Job(hosts, tmp_path, *program, flags=(two, two)).wait()
  assert codes == [0, 0], outputs
  assert "processes: 4" in outputs[0]
  assert "OK: no value deviates" in outputs[0]


def test_the_transport_is_conformant(hosts, tmp_path):
  codes, outputs = Job(hosts, tmp_path, script(tmp_path, _KIT)).wait()
  assert codes == [0, 0], outputs


@pytest.mark.parametrize(
  "flags, says",
  [
    (
      ({}, {"num_processes": 2}),
      "host 1 was started with --num_processes=2, but host 0 with --num_pro",
    ),
    (
      ({"num_hosts": 3, "join_timeout": 3}, {"num_hosts": 3}),
      "of 3 hosts these did not come to host 0 at 10.64.0.1, port 1234, within"
      " 3 s: 2;",
    ),
  ],
  ids=["another number of processes", "a host is missing"],
)
def test_hosts_that_do_not_fit_say_so(hosts, tmp_path, flags, says):
  codes, outputs = Job(hosts, tmp_path, "-m", "this", flags=flags).wait()
  assert codes == [1, 1], outputs
  for output in outputs:
    assert f"ep.launch: {says}" in output


def test_two_hosts_with_one_number_say_so(hosts, tmp_path):
  """Host 0 waits for two others; two launchers of one host come."""
  one, two = hosts
  flags = {"num_hosts": 3, "host_id": 1}
  all_flags = ({"num_hosts": 3}, flags, flags)
  job = Job((one, two, two), tmp_path, "-m", "this", flags=all_flags)
  codes, outputs = job.wait()
  assert codes == [1, 1, 1]
  assert "both started with --host_id=1" in outputs[0]


def test_a_host_alone_says_who_is_missing(hosts, tmp_path):
  """Host 1 says it here, and host 0 above."""
  flags = {"join_timeout": 2, "coordinator": "10.64.0.1:1234"}
  job = Job(hosts[1:], tmp_path, "-m", "this", flags=(flags,))
  codes, outputs = job.wait()
  assert codes == [1]
  says = "host 0 did not come to 10.64.0.1, port 1234, within 2 s"
  assert says in outputs[0]


def test_a_failure_ends_both_hosts(hosts, tmp_path):
  codes, outputs = Job(hosts, tmp_path, script(tmp_path, _FAIL)).wait()
  assert codes == [7, 7]
  assert "host 1 (10.64.0.2) says: rank 1 failed with exit code 7" in outputs[0]
  assert "ep.launch: rank 1 failed with exit code 7" in outputs[1]


def test_a_pulled_cable_is_an_error_on_both_sides(tmp_path):
  """In the middle of a step, each side names the other host."""
  with two_hosts() as hosts:
    job = Job(hosts, tmp_path, script(tmp_path, _STEPS))
    log = tmp_path / "output_1_logs/rank_1.log"
    deadline = time.monotonic() + 100
    while not (log.exists() and "stepped" in log.read_text()):
      assert time.monotonic() < deadline
      time.sleep(0.1)
    hosts[0].pull_the_cable()
    begin = time.monotonic()
    codes, outputs = job.wait()
  assert codes == [1, 1]
  assert "host 1 (10.64.0.2) is out of reach" in outputs[0]
  assert "host 0 (10.64.0.1) is out of reach" in outputs[1]
  assert time.monotonic() - begin < 60
