# SPDX-License-Identifier: Apache-2.0
"""Snapshots outlive ranks, and half or damaged ones are never restored."""

from concurrent import futures
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import time

from hosts import two_hosts
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import ep
from ep import launch
from ep._tools.snapshots import memory, peers, source
import programs

_CASES = {
  "float32": jnp.arange(24.0).reshape(8, 3),
  "bfloat16": jnp.arange(16, dtype=jnp.bfloat16) / 3,
  "int32": jnp.int32(7),
}


def _state(spec=P("x")):
  """Returns arrays on all devices of this process."""
  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=auto)
  return {
    name: jax.device_put(x, NamedSharding(mesh, spec if x.ndim else P()))
    for name, x in _CASES.items()
  }


class Launcher:
  """The launcher of one rank: this process, again after each restart."""

  def __init__(self, monkeypatch):
    self.memory = memory.Memory()
    self._restarts = itertools.count()
    self._monkeypatch = monkeypatch

  def start(self):
    """Returns the snapshots of a new rank."""
    restart = next(self._restarts)
    ((env, fds),) = self.memory.begin(restart, 1, range(1), range(0))
    self._monkeypatch.setenv(memory.VARIABLE, env[memory.VARIABLE])
    assert json.loads(env[memory.VARIABLE])["own"] in fds
    return ep.Snapshots()

  def used(self):
    """Returns the restarts whose files have memory."""
    return [
      restart
      for restart, files in self.memory._attempts.items()
      if any(os.fstat(file.fd).st_size for file in files.values())
    ]


@pytest.fixture
def launcher(monkeypatch):
  launcher = Launcher(monkeypatch)
  with contextlib.closing(launcher.memory):
    yield launcher


def _take(snapshots, step, state):
  snapshots.take(step, state)
  snapshots.wait()


def _check(found, step, want):
  assert found is not None and found[0] == step
  for name, x in want.items():
    assert found[1][name].dtype == x.dtype
    assert found[1][name].sharding.is_equivalent_to(x.sharding, x.ndim)
    np.testing.assert_array_equal(found[1][name], x)


def _later(state):
  return jax.tree.map(lambda x: x + 1, state)


def test_the_newest_of_two_generations_is_restored(launcher):
  snapshots, state = launcher.start(), _state()
  assert snapshots.restore(state) is None
  for step in range(1, 5):
    _take(snapshots, step, state)
    before, state = state, _later(state)
  assert launcher.memory.step() == 4
  # After a restart, the ranks divide the arrays differently.
  like = _state(P())
  whole = _state(P())
  like = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
    whole,
  )
  want = jax.device_put(before, jax.tree.map(lambda x: x.sharding, whole))
  _check(launcher.start().restore(like), 4, want)


def test_a_state_may_be_donated_after_take(launcher):
  snapshots, state = launcher.start(), _state()
  want = jax.tree.map(np.asarray, state)
  snapshots.take(1, state)
  jax.block_until_ready(jax.jit(_later, donate_argnums=0)(state))
  snapshots.wait()
  found = launcher.start().restore(_state())
  for name, x in want.items():
    np.testing.assert_array_equal(found[1][name], x)


def test_half_a_snapshot_is_not_restored(launcher, monkeypatch):
  """The rank dies while it writes the arrays of step 3."""
  snapshots, state = launcher.start(), _state()
  _take(snapshots, 1, state)
  _take(snapshots, 2, _later(state))
  write = memory._pwrite_all

  def die(fd, data, position):
    write(fd, data[: data.nbytes // 2], position)
    raise OSError("the rank died")

  monkeypatch.setattr(memory, "_pwrite_all", die)
  with pytest.raises(OSError, match="the rank died"):
    _take(snapshots, 3, _later(_later(state)))
  _check(launcher.start().restore(state), 2, _later(state))


@pytest.mark.parametrize("place", ["entry", "index", "arrays"])
def test_a_damaged_snapshot_is_not_restored(launcher, place):
  snapshots, state = launcher.start(), _state()
  _take(snapshots, 1, state)
  _take(snapshots, 2, _later(state))
  file = memory.inherited().own
  newest = file.generations()[0]
  at = {
    "entry": memory._ENTRY.size * (newest.begin != memory._PAGE) + 9,
    "index": newest.begin + 5,
    "arrays": newest.begin + newest.size - 1,
  }[place]
  (byte,) = os.pread(file.fd, 1, at)
  os.pwrite(file.fd, bytes([byte ^ 1]), at)
  _check(launcher.start().restore(state), 1, state)


def test_restarts_before_the_first_snapshot_lose_nothing(launcher):
  state = _state()
  _take(launcher.start(), 1, state)
  for _ in range(3):
    last = launcher.start()
  assert [*launcher.memory._attempts] == [0, 3]
  _check(last.restore(state), 1, state)
  _take(last, 2, _later(state))
  _check(launcher.start().restore(state), 2, _later(state))


def test_restarts_need_no_more_memory_each_time(launcher):
  """Two attempts have memory; one, when all ranks have a new snapshot."""
  state = _state()
  for restart in range(4):
    snapshots = launcher.start()
    snapshots.restore(state)
    _take(snapshots, restart, state)
    assert launcher.used() == [*range(max(restart - 1, 0), restart + 1)]
  _take(snapshots, 4, state)
  assert launcher.used() == [3]


def test_steps_are_integers_that_grow(launcher):
  snapshots, state = launcher.start(), _state()
  for step in jnp.int32(1), np.int64(2), 3:
    _take(snapshots, step, state)
  for step in 3, 2:
    with pytest.raises(ValueError, match=f"step = {step} after step 3, but"):
      snapshots.take(step, state)
  with pytest.raises(TypeError):
    snapshots.take(4.0, state)
  _check(launcher.start().restore(state), 3, state)


def test_threads_take_snapshots_one_after_another(launcher, monkeypatch):
  snapshots, state = launcher.start(), _state()
  writing, most = [], []
  write = memory.File.write

  def count(*args):
    writing.append(1)
    most.append(len(writing))
    time.sleep(0.1)
    write(*args)
    writing.pop()

  def take(step):
    with contextlib.suppress(ValueError):  # another thread was faster
      snapshots.take(step, state)

  monkeypatch.setattr(memory.File, "write", count)
  snapshots.take(0, state)
  with futures.ThreadPoolExecutor(4) as pool:
    list(pool.map(take, range(1, 5)))
  snapshots.wait()
  assert max(most) == 1


def test_a_rank_that_is_alone_cannot_take_snapshots(launcher, monkeypatch):
  """Without `ep.launch.initialize`, each rank would restore its own arrays."""
  env, _ = launcher.memory.begin(0, 2, range(2), range(0))[0]
  monkeypatch.setenv(memory.VARIABLE, env[memory.VARIABLE])
  with pytest.raises(RuntimeError, match=r"1 of 2 ranks.*initialize\(\)"):
    ep.Snapshots()


def test_a_program_that_a_rank_starts_writes_to_no_other_file(
  launcher, tmp_path
):
  """The program has the rank's variable, but another file of this number."""
  launcher.start()
  fd = memory.inherited().own.fd
  with (tmp_path / "file").open("w+b") as other:
    kept = os.dup(fd)
    os.dup2(other.fileno(), fd)
    snapshots = ep.Snapshots()
    _take(snapshots, 1, _state())
    os.dup2(kept, fd)
    os.close(kept)
    assert os.fstat(other.fileno()).st_size == 0
  assert snapshots.restore(_state()) is None


def test_ranks_with_different_numbers_in_one_place_are_an_error(launcher):
  state, parts = _state(), []
  for step, own in enumerate([state, state, _later(state)]):
    _take(launcher.start(), step, own)
    file = memory.inherited().own
    parts.append((file.generations()[0], file, 2))
  found = source.Source(1, parts[:2])
  np.testing.assert_array_equal(found.array("['int32']", state["int32"]), 7)
  with pytest.raises(ValueError, match=r"different numbers in \['"):
    source.Source(1, parts[1:])


def test_too_little_memory_is_an_error(launcher, monkeypatch):
  """Linux would kill a process that allocates more than there is."""
  snapshots = launcher.start()
  assert 1 << 20 < memory._available() < 1 << 50
  monkeypatch.setattr(memory, "_available", lambda: 1 << 12)
  with pytest.raises(OSError, match="need 0 MiB of memory, but 0 MiB are"):
    _take(snapshots, 1, _state())


def test_longer_checksums_fit_into_the_memory(launcher):
  launcher.start()
  file = memory.inherited().own
  for step, checksum in (1, 7), (2, 2**32 - 1), (3, 2**32 - 1):
    chunk = ["x", "float32", [], [], [], 4, checksum]
    file.write(step, {"chunks": [chunk] * 6000}, [])
  assert [each.step for each in file.generations()] == [3, 2]


def test_only_the_job_gets_an_answer(launcher):
  _take(launcher.start(), 1, _state())
  launcher.start()
  server = peers.Server("127.0.0.1", "secret", memory.inherited())
  request = b'{"get": [0, 0], "position": 0, "size": 8}\n'
  try:
    for token, answer in (
      (b"secret\n", b'""\nep_snap1'),
      (b"secret", b""),
      (b"secres\n", b""),
      (b"\xff\n", b""),
    ):
      with socket.create_connection(server.address) as connection:
        connection.sendall(token + request)
        connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
          assert connection.makefile("rb").read() == answer
  finally:
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("axis", [0, 1])
def test_a_dimension_may_have_empty_slots(launcher, axis):
  """9 slots of 8 experts on 3 ranks become 8 slots on 4, and 12 on 6."""
  one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  experts = jnp.arange(1.0, 65.0).reshape(8, 8)

  def with_slots(count):
    slots = [(0, 0), (0, 0)]
    slots[axis] = 0, count - 8
    return {"w": jax.device_put(jnp.pad(experts, slots), one)}

  _take(launcher.start(), 1, with_slots(9))
  for count in 8, 9, 12:
    want = with_slots(count)
    _check(launcher.start().restore(want), 1, want)
  fewer = jax.device_put(jnp.take(experts, jnp.arange(7), axis), one)
  with pytest.raises(ValueError, match="and not only zeros beyond"):
    launcher.start().restore({"w": fewer})


@pytest.mark.parametrize(
  "change, says",
  [
    (lambda s: s | {"new": s["int32"]}, "only the tree has ['new']"),
    (lambda s: {"int32": s["int32"]}, "only the snapshot has ['bfloat16']"),
    (
      lambda s: s | {"float32": s["float32"].T},
      "['float32'] is float32[8, 3] in the snapshot, but float32[3, 8] here",
    ),
    (lambda s: s | {"int32": jnp.float32(0)}, "['int32'] is int32[] in the"),
  ],
)
def test_another_state_is_an_error(launcher, change, says):
  state = _state()
  _take(launcher.start(), 1, state)
  with pytest.raises(ValueError, match=re.escape(says)):
    launcher.start().restore(change(state))


def test_leaves_are_arrays(launcher):
  for leaf in 3.0, jax.random.key(0):
    with pytest.raises(TypeError, match=r"\['x'\] is a "):
      launcher.start().take(1, {"x": leaf})


def test_without_a_launcher_nothing_is_kept(monkeypatch):
  monkeypatch.delenv(memory.VARIABLE, raising=False)
  snapshots = ep.Snapshots()
  snapshots.take(1, {})
  assert snapshots.restore({}) is None


def test_the_memory_is_private(launcher):
  _take(launcher.start(), 1, _state())
  file = memory.inherited().own
  assert os.fstat(file.fd).st_mode & 0o777 == 0o600


_PROGRAM = """
import os, signal, time
import ep
from ep import launch
launch.initialize()
import jax
import numpy as np
import jax.numpy as jnp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((jax.device_count(),), ("x",))
split, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
state = {"w": split, "n": whole}
state = jax.jit(
  lambda: {"w": jnp.arange(12.0), "n": jnp.int32(0)}, out_shardings=state
)()
step = jax.jit(lambda s: {"w": s["w"] * 1.25 + 1, "n": s["n"] + 1})
snapshots = ep.Snapshots()
done, state = snapshots.restore(state) or (0, state)
print("begins after", done, "of", jax.process_count())
restart = int(os.environ["EP_LAUNCH_RESTART"])
for n in range(done + 1, 31):
  state = jax.block_until_ready(step(state))
  if n % 3 == 0:
    snapshots.take(n, state)
  for victim, *place in KILLED:
    if place == [restart, n, jax.process_index()]:
      os.kill(victim(), signal.SIGKILL)
      time.sleep(60)  # the kernel kills this rank after its launcher
  multihost_utils.sync_global_devices("a step")
assert int(state["n"]) == 30
parts = [np.asarray(s.data) for s in state["w"].addressable_shards]
print([float(x).hex() for x in np.concatenate(parts)])
"""


def _check_result(folder, output, ranks, restart=2):
  """Checks the last numbers: they are those of one rank, in 30 steps."""
  want = np.arange(12, dtype=np.float32)
  for _ in range(30):
    want = want * np.float32(1.25) + np.float32(1)
  found = []
  for rank in range(ranks):
    log = (folder / f"restart_{restart}" / f"rank_{rank}.log").read_text()
    done = int(re.search(rf"begins after (\d+) of {ranks}", log)[1])
    assert done in (18, 21)  # a killed rank may not have finished step 21
    found += [float.fromhex(x) for x in re.findall(r"'(0x\S+)'", log)]
  np.testing.assert_array_equal(np.float32(found), want)
  assert re.search(
    f"{ranks} ranks joined .*, with a snapshot of step {done}", output
  )


def test_survivors_go_on_from_a_snapshot(tmp_path, capsys):
  """Four ranks, three, two."""
  killed = "KILLED = [(os.getpid, 0, 11, 1), (os.getpid, 1, 22, 0)]\n"
  options = dict(num_processes=4, max_restarts=2, min_processes=2)
  argv = ["-c", "import os\n" + killed + _PROGRAM]
  assert launch.launch(argv, log_dir=tmp_path, timeout_s=200, **options) == 0
  _check_result(tmp_path, capsys.readouterr().out, ranks=2)


def _start(folder, killed, host, address, start=subprocess.Popen):
  """Starts a launcher of two ranks on one of two hosts."""
  program = folder / f"program_{host}.py"
  program.write_text(f"import os, time\n{killed}\n{_PROGRAM}")
  flags = ["--num_processes=2", "--num_hosts=2", "--max_restarts=2"]
  flags += ["--min_processes=1", "--grace=5", "--timeout=200"]
  flags += [f"--coordinator={address}", f"--host_id={host}"]
  flags += [f"--log_dir={folder / str(host)}"]
  options = dict(start=start, stdout=subprocess.PIPE, text=True)
  return programs.start_launcher(*flags, program, **options)


def test_a_host_goes_on_from_copies(tmp_path):
  """Host 0 loses a rank, and then host 1, whose launcher is killed."""
  address = programs.free_address()
  killed = "KILLED = [(os.getpid, 0, 11, 1), (os.getppid, 1, 22, 2)]"
  launchers = [_start(tmp_path, killed, host, address) for host in range(2)]
  output, _ = launchers[0].communicate()
  launchers[1].communicate()
  assert launchers[0].returncode == 0, output
  assert launchers[1].returncode == -signal.SIGKILL, output
  assert "begins after 9 of 3" in output or "begins after 6 of 3" in output
  _check_result(tmp_path / "0", output, ranks=1)


def test_a_host_goes_on_when_the_other_is_cut_off(tmp_path):
  """Both ranks of host 0 go on, with a copy of the state of host 1."""
  cut = tmp_path / "cut"
  killed = f"""
def wait():
  open({str(cut)!r}, "w").close()
  time.sleep(600)
KILLED = [(wait, 0, 22, 2)]
"""
  with two_hosts() as both:
    address = f"{both[0].address}:1234"
    launchers = [
      _start(tmp_path, killed, host.number, address, host.start)
      for host in both
    ]
    deadline = time.monotonic() + 120
    while not cut.exists():
      assert time.monotonic() < deadline, launchers[0].poll()
      time.sleep(0.1)
    both[0].pull_the_cable()
    output, _ = launchers[0].communicate()
    assert launchers[1].wait(60) != 0
  assert launchers[0].returncode == 0, output
  assert "because host 1 (10.64.0.2) is out of reach" in output
  _check_result(tmp_path / "0", output, ranks=2, restart=1)
