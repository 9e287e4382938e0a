# SPDX-License-Identifier: Apache-2.0
"""Only the processes of a group connect to it, whoever else tries."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time

import jax
import pytest

import ep
from ep._src.native import sockets

ME = os.getpid()
BECOME_NOBODY = (
  "import os; os.setgroups([]); os.setgid(65534); os.setuid(65534)"
)
# Root cannot become another user in Bazel's sandbox.
needs_root = pytest.mark.skipif(
  subprocess.run(
    [sys.executable, "-c", BECOME_NOBODY], capture_output=True
  ).returncode
  != 0,
  reason="ONLY ROOT MAY ACT AS ANOTHER USER, AND HERE ROOT MAY NOT",
)


@pytest.fixture
def short_limit(monkeypatch):
  monkeypatch.setattr(sockets, "_ACCEPT_S", 0.2)


def join(listener, number, pid=ME):
  """Connects as the process `number`."""
  options = dict(name="process 0", timeout_s=0.2)
  return sockets.connect(listener.address, pid, number, **options)


def hangs_up(peer):
  """Waits until the other end closes the connection without an answer."""
  peer.setblocking(True)
  try:
    return peer.recv(1) == b""
  except ConnectionResetError:  # it has not read our message
    return True


@contextlib.contextmanager
def another_user(program, *args):
  """Runs a program as the user nobody; yields its standard output."""
  lines = IMPORTS, BECOME_NOBODY, program
  argv = [sys.executable, "-c", "\n".join(lines), *args]
  with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
    try:
      yield process.stdout
    finally:
      process.kill()


IMPORTS = "import encodings.idna, pathlib, re, socket, sys, time"
CONNECT = """
peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
peer.connect("\\0" + sys.argv[1])
try:
  peer.send((1).to_bytes(4, "little"))
  print(len(peer.recv(1)), flush=True)
except (BrokenPipeError, ConnectionResetError):
  print(0, flush=True)
"""
LISTEN = """
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind("")
listener.listen()
print(listener.getsockname()[1:].decode(), flush=True)
print(len(listener.accept()[0].recv(1)), flush=True)
"""
# Connects to all listening sockets, binds similar names, and keeps 900 sockets.
DISTURB = """
held = []
print("begins", flush=True)
while True:
  found = pathlib.Path("/proc/net/unix").read_text()
  for name in re.findall("@(ep_ffi-.*)", found):
    for i in range(10):
      held += [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
      held[-1].setblocking(False)
      held[-1].connect_ex("\\0" + name)
      held += [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
      try:
        held[-1].bind("\\0" + name[:-1] + str(i))
      except OSError:
        pass
      held = held[-900:]
"""


def test_processes_connect():
  """The address vanishes, and a number is given once."""
  with sockets.Listener() as listener:
    name = listener.address
    ours = {number: join(listener, number) for number in (2, 1)}
    twice, unknown = join(listener, 2), join(listener, 5)
    found = listener.accept({1: ME, 2: 0})
    assert sorted(found) == [1, 2]
    for number, peer in found.items():
      peer.send(bytes([number]))
      assert ours[number].recv(9) == bytes([number])
  assert hangs_up(twice) and hangs_up(unknown)
  for peer in *ours.values(), *found.values():
    peer.close()
  assert name not in pathlib.Path("/proc/net/unix").read_text()


def test_a_number_has_its_process(short_limit):
  """A process of the same user is not in the group."""
  with sockets.Listener() as listener:
    impostor = join(listener, 1)
    with pytest.raises(RuntimeError, match="processes 1 of the group did not"):
      listener.accept({1: os.getppid()})
    assert hangs_up(impostor)
    with pytest.raises(
      RuntimeError, match="process 0: another process listens"
    ):
      join(listener, 1, pid=os.getppid())


def test_a_message_of_another_form_is_refused(short_limit):
  with sockets.Listener() as listener:
    for message in None, b"", b"abc":
      with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.connect(f"\0{listener.address}")
        if message is not None:
          stranger.send(message)
        with pytest.raises(RuntimeError, match="did not connect"):
          listener.accept({1: 0})


def test_a_process_that_left_or_is_busy_is_named():
  with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as busy:
    busy.bind("")
    busy.listen(0)
    name = busy.getsockname()[1:].decode()

    def connect(number):
      options = dict(name="process 0", timeout_s=0.2)
      return sockets.connect(name, ME, number, **options)

    waiting = connect(1)
    begin = time.monotonic()
    with pytest.raises(
      RuntimeError, match="connect to process 0: Resource tem"
    ):
      connect(2)
    assert time.monotonic() - begin > 0.2
    waiting.close()
  with pytest.raises(
    RuntimeError, match="connect to process 0: Connection ref"
  ):
    connect(1)


@needs_root
def test_another_user_is_turned_away():
  with sockets.Listener() as listener:
    with another_user(CONNECT, listener.address) as output:
      assert output.readline() == "0\n"
      ours = join(listener, 1)
      found = listener.accept({1: 0})
      found[1].send(b"x")
      assert ours.recv(1) == b"x"


@needs_root
def test_another_user_who_listens_gets_nothing():
  with another_user(LISTEN) as output:
    name = output.readline().strip()
    with pytest.raises(RuntimeError, match="another process listens"):
      sockets.connect(name, 0, 1, name="process 0", timeout_s=30)
    assert output.readline() == "0\n"


@needs_root
def test_another_user_cannot_stop_a_bootstrap():
  mesh = jax.make_mesh((jax.device_count(),), ("ep",))
  with another_user(DISTURB) as output:
    assert output.readline() == "begins\n"
    for _ in range(20):
      options = dict(num_experts=jax.device_count(), backend="host")
      ep.ep_finalize(ep.ep_bootstrap(mesh, **options))
