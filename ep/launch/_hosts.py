# SPDX-License-Identifier: Apache-2.0
"""Connects the launchers of several hosts, which start and exit together.

Host 0 listens at the coordinator's address, and the others connect to it. All
messages are lines of JSON. Each host sends its arguments; host 0 answers with
an error, or with "" when all hosts have connected; and each host finally sends
its exit code. TCP reports a launcher that has died, and, by keepalive probes, a
host that is out of reach.
"""

from __future__ import annotations

from collections.abc import Mapping
import contextlib
import json
import select
import socket
import time
from typing import Any

_RETRY_S = 0.2
_HELLO_S = 5.0  # limit for the first message of a connected launcher
_PROBE_S, _PROBES = 5, 2  # a host that misses these probes is out of reach


class Host:
  """The launcher of another host, with the interface of a local `Process`."""

  def __init__(self, name: str, connection: socket.socket):
    self.name = name
    self.code: int | None = None  # exit code; None while the host runs
    self.end = ""  # describes a failure
    self.ended_at = 0.0
    # Empty, because the other host prints its cause and the path of its log.
    self.cause = ""
    self.where = ""
    self._is_told = False
    self._connection = connection
    self._lines = connection.makefile("rb")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in [
      ("TCP_KEEPIDLE", _PROBE_S),
      ("TCP_KEEPINTVL", _PROBE_S),
      ("TCP_KEEPCNT", _PROBES),
      ("TCP_USER_TIMEOUT", 1000 * _PROBE_S * (1 + _PROBES)),
    ]:
      if hasattr(socket, option):  # Linux has all of these options
        level = socket.IPPROTO_TCP
        connection.setsockopt(level, getattr(socket, option), value)

  @property
  def was_alone(self) -> bool:
    """Whether a rank of the host exited with 0 before joining other ranks."""
    return self.code == 0 and self.end != ""

  def running(self) -> bool:
    """Returns whether the host runs; sets `code`, `end` and `ended_at`."""
    connection = self._connection
    if self.code is None and select.select([connection], [], [], 0)[0]:
      try:
        self.code, self.end = self.receive()
      except ValueError:
        self.code, self.end = 1, "has ended without a word"
      except OSError as e:
        self.code, self.end = 1, f"is out of reach ({e.strerror})"
      self.ended_at = time.monotonic()
    return self.code is None

  def last_lines(self, count: int) -> list[str]:
    return []

  def tell(self, code: int, end: str) -> None:
    """Sends the result of this launcher; ignores later calls."""
    if not self._is_told:
      self._is_told = True
      self.send([code, end])

  def send(self, message: Any) -> None:
    with contextlib.suppress(OSError):  # `running` reports the error
      self._connection.sendall(json.dumps(message).encode() + b"\n")

  def receive(self, timeout_s: float | None = None) -> Any:
    """Returns the next message.

    Raises:
      ValueError: the connection is closed, or the message is not JSON.
      OSError: the host is out of reach, or the timeout has passed.
    """
    self._connection.settimeout(timeout_s)
    return json.loads(self._lines.readline())

  def close(self) -> None:
    self._lines.close()
    self._connection.close()


def join(
  stack: contextlib.ExitStack,
  host_id: int,
  coordinator: str,
  common: Mapping[str, int],
  timeout_s: float,
) -> list[Host]:
  """Waits for all hosts; returns the launchers that this launcher talks to.

  Host 0 talks to all other hosts, and each other host to host 0.

  Args:
    stack: closes the connections.
    coordinator: an address of host 0 and a port, as host:port.
    common: arguments by name that must be equal on all hosts, with "num_hosts".
    timeout_s: the limit for all hosts to connect.

  Raises:
    RuntimeError: on every connected host, if the hosts do not fit together or
      not all have connected.
    ValueError: the coordinator's address is invalid.
  """
  name, _, port = coordinator.rpartition(":")
  try:
    family, *_, address = socket.getaddrinfo(
      name.strip("[]"), port, type=socket.SOCK_STREAM
    )[0]
  except OSError as e:
    raise ValueError(
      f"ep.launch: coordinator = {coordinator!r} ({e.strerror}), but it must be"
      " host 0's address and a free port there, as in 10.0.0.1:1234."
    ) from e
  end = time.monotonic() + timeout_s
  if host_id == 0:
    return _gather(stack, family, address, common, end, timeout_s)
  host = Host(f"host 0 ({address[0]})", _connect(address, end, timeout_s))
  stack.enter_context(contextlib.closing(host))
  host.send({"host_id": host_id, **common})
  try:
    wrong = host.receive(timeout_s)
  except (OSError, ValueError):
    wrong = (
      f"the launcher of host 0 at {coordinator} let this host wait, or has"
      " ended; see what it says, and start all hosts again."
    )
  if wrong:
    raise RuntimeError(f"ep.launch: {wrong}")
  return [host]


def _connect(
  address: tuple[Any, ...], end: float, timeout_s: float
) -> socket.socket:
  while True:
    left = end - time.monotonic()
    try:
      return socket.create_connection(address[:2], max(left, 0.01))
    except OSError as e:
      if left < _RETRY_S:
        raise RuntimeError(
          f"ep.launch: host 0 did not come to {address[0]}, port {address[1]},"
          f" within {timeout_s:g} s ({e.strerror or e}); start the same command"
          " there with --host_id=0, and open the port in its firewall."
        ) from e
      time.sleep(_RETRY_S)


def _gather(
  stack: contextlib.ExitStack,
  family: int,
  address: tuple[Any, ...],
  common: Mapping[str, int],
  end: float,
  timeout_s: float,
) -> list[Host]:
  """Waits until all other hosts have connected to host 0."""
  joined: dict[int, Host] = {}
  wrong = ""
  at = f"{address[0]}, port {address[1]}"
  try:
    server = socket.create_server(address[:2], family=family)
  except OSError as e:
    raise RuntimeError(
      f"ep.launch: host 0 cannot listen at {at} ({e.strerror}); the coordinator"
      " is an address of the host whose --host_id is 0, with a free port."
    ) from e
  with server:
    while not wrong and len(joined) < common["num_hosts"] - 1:
      server.settimeout(max(end - time.monotonic(), 0.001))
      try:
        connection, (ip, *_) = server.accept()
      except TimeoutError:
        late = set(range(1, common["num_hosts"])) - joined.keys()
        wrong = (
          f"of {common['num_hosts']} hosts these did not come to host 0 at"
          f" {at}, within {timeout_s:g} s: {', '.join(map(str, sorted(late)))};"
          " start the same command there, each with its own --host_id."
        )
        break
      host = stack.enter_context(contextlib.closing(Host(ip, connection)))
      try:
        theirs = host.receive(_HELLO_S)
        number = theirs.pop("host_id")
      except (OSError, ValueError, KeyError, AttributeError):
        continue  # the sender is no launcher
      wrong = _difference(common, number, theirs)
      if number in joined:
        wrong = (
          f"{joined[number].name} and host {ip} were both started with"
          f" --host_id={number}; each host needs another number."
        )
        host.send(wrong)
      host.name = f"host {number} ({ip})"
      joined.setdefault(number, host)
  for host in joined.values():
    host.send(wrong)
  if wrong:
    raise RuntimeError(f"ep.launch: {wrong}")
  return list(joined.values())


def _difference(
  common: Mapping[str, int], number: int, theirs: Mapping[str, int]
) -> str:
  """Describes the first argument in which host `number` differs from host 0."""
  for name, value in common.items():
    if theirs.get(name) != value:
      return (
        f"host {number} was started with --{name}={theirs.get(name)}, but host"
        f" 0 with --{name}={value}; run the same command on every host, with"
        " another --host_id."
      )
  return ""
