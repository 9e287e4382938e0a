# SPDX-License-Identifier: Apache-2.0
"""Each process needs few requests and bytes to bootstrap with the others.

A store in memory simulates 16384 processes. Clients of a real coordination
service simulate processes that fail.
"""

import collections
from concurrent import futures
import json
import socket
import subprocess
import time

from jax._src.lib import _jax
import pytest

from ep._src.group import rendezvous
from ep._src.native import processes

TERMS = {f"field {n}": "x" * 40 for n in range(30)} | {"top_k": "2"}
TIMEOUT_S = 60.0


class Counted:
  """A client that counts its requests and their bytes."""

  def __init__(self, client):
    self.client = client
    self.requests, self.bytes = 0, 0

  def __getattr__(self, name):
    def call(*args, **kwargs):
      self.requests += 1
      result = getattr(self.client, name)(*args, **kwargs)
      self.bytes += len(json.dumps([args, result]))
      return result

    return call


class Store:
  """Simulates the service after all processes have published; no call waits."""

  def __init__(self):
    self._values = {}
    self._folders = collections.defaultdict(dict)

  def key_value_set(self, key, value):
    self._values[key] = value
    self._folders[key.rpartition("/")[0] + "/"][key] = value

  def key_value_dir_get(self, folder):
    return list(self._folders[folder].items())

  def key_value_try_get(self, key):
    return self._values[key]

  def blocking_key_value_get(self, key, timeout_ms):
    return self._values[key]

  def key_value_delete(self, folder):
    self._values = {k: v for k, v in self._values.items() if folder not in k}

  def __len__(self):
    return len(self._values)


def meetings(clients, timeout_s=TIMEOUT_S, folder="m/0"):
  members = range(len(clients))
  return [
    rendezvous.Meeting("ep_test", c, folder, members, me, timeout_s)
    for me, c in enumerate(clients)
  ]


def introduction(m):
  return dict(address=f"process {m.me}", id="x" * 128)


@pytest.fixture
def clients():
  """Yields the clients of four processes, connected to a new service."""
  with socket.socket() as s:
    s.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{s.getsockname()[1]}"
  service = _jax.get_distributed_runtime_service(address, 4)
  clients = [
    _jax.get_distributed_runtime_client(
      address, n, init_timeout=60, shutdown_timeout=60, use_compression=True
    )
    for n in range(4)
  ]
  together(clients, lambda client: client.connect())
  yield clients
  together(clients, lambda client: client.shutdown())
  service.shutdown()


def together(items, function):
  """Calls `function` in one thread per item; returns results or exceptions."""
  with futures.ThreadPoolExecutor(len(items)) as pool:
    calls = [pool.submit(function, item) for item in items]
    return [call.exception() or call.result() for call in calls]


def test_the_bytes_of_a_process_do_not_grow_with_their_number():
  count, store = 16384, Store()
  clients = [store if n % 512 else Counted(store) for n in range(count)]
  every = meetings(clients)
  for m in every:
    m.publish(TERMS, introduction(m), m.me // 8)
  for m in every[::512]:
    m.settle(TERMS)
    assert len(m.introductions(m.me // 8)) == 8
  first, *others = clients[::512]
  assert {c.requests for c in others} == {5}
  assert max(c.bytes for c in others) < 5000
  assert first.requests == 6
  assert first.bytes < 5000 + 60 * count
  every[0].delete(["m/0"])
  assert len(store) == 0


def fail(m):
  raise m.fail(ValueError("no library")) or ValueError("no library")


def stay_away(m):
  raise TimeoutError


def die(m):
  """Publishes the identity of a process that has exited."""
  ended = subprocess.Popen(["true"])
  ended.wait()
  identity = dict(namespace=processes.namespace(), pid=ended.pid, start=1)
  m.client.key_value_set(f"ep/process/{m.me}", json.dumps(identity))
  raise TimeoutError


def meet(m, terms=TERMS):
  m.publish(terms, introduction(m), 0)
  m.settle(terms)


def differ(m):
  meet(m, TERMS | {"top_k": "3"})


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize(
  "act, error, words",
  [
    (differ, ValueError, "top_k = {0} on process 0, but {1} on process"),
    (fail, RuntimeError, "process {odd} failed: no library"),
    (stay_away, RuntimeError, "process {odd} did not come within timeout_s"),
    (die, RuntimeError, "process {odd} died; restart"),
  ],
)
def test_all_processes_raise_the_error_of_one(
  clients, odd, act, error, words, monkeypatch
):
  monkeypatch.setattr(rendezvous, "_PATIENT_S", 0.5)
  timeout_s = 0.5 if act is stay_away else TIMEOUT_S
  every = meetings(clients, timeout_s)

  begin = time.monotonic()
  errors = together(every, lambda m: act(m) if m.me == odd else meet(m))
  assert time.monotonic() - begin < 10
  words = words.format(*(("3", "2") if odd == 0 else ("2", "3")), odd=odd)
  for m, found in zip(every, errors, strict=True):
    if m.me != odd or act is differ:
      assert isinstance(found, error), found
      assert f"ep_test: {words}" in str(found)
