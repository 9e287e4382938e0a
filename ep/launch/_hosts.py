# SPDX-License-Identifier: Apache-2.0
"""Connects the launchers of several hosts, which start and exit together.

Host 0 listens at the coordinator's address, and the others connect to it. All
messages are lines of JSON:

    {"host_id": 1, ...}   the arguments of a host, when it connects
    "", or an error       the answer of host 0, when all hosts have connected
    {"restart": 0, ...}   the share of a host in the next attempt, from host 0
    [code, "end"]         the result of a host in an attempt, to its peers
    {"places": 8, ...}    the losses of a host, before a restart

TCP reports a launcher that has died, and, by keepalive probes, a host that is
out of reach. Host 0 drops a connection whose first message is no host's. It
does not authenticate hosts (SECURITY.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import json
import select
import socket
import time
from typing import Any, NamedTuple

_RETRY_S = 0.2
_LONGEST_S = 1e6  # sockets refuse waits of 2^31 ms or more
_MESSAGE_S = 1.0  # limit for the rest of a message
_MESSAGE_BYTES = 1 << 12
_STRANGERS = 64  # connections without a message, at most
_PROBE_S, _PROBES = 5, 2  # a host that misses these probes is out of reach
_REPLACEMENT_S = 2.0  # wait for replacements while enough ranks are left


class Host:
  """The launcher of another host, with the interface of a local `Process`."""

  def __init__(self, name: str, connection: socket.socket):
    self.name = name
    # Empty, because the other host prints its cause and the path of its log.
    self.cause = ""
    self.where = ""
    self._connection = connection
    self._received = b""
    self.begin()
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

  def begin(self) -> None:
    """Forgets the result of the attempt before."""
    self.code: int | None = None  # exit code; None while the host runs
    self.end = ""  # describes a failure
    self.ended_at = 0.0
    self._is_told = False

  @property
  def was_alone(self) -> bool:
    """Whether a rank of the host exited with 0 before joining other ranks."""
    return self.code == 0 and self.end != ""

  def running(self) -> bool:
    """Returns whether the host runs; sets `code`, `end` and `ended_at`."""
    if self.code is None and (
      b"\n" in self._received or select.select([self], [], [], 0)[0]
    ):
      try:
        self.code, self.end = self.receive(list, _MESSAGE_S)
      except ValueError:
        self.code, self.end = 1, "has ended without a word"
      except OSError as e:
        self.code, self.end = 1, f"is out of reach ({e.strerror or e})"
      self.ended_at = time.monotonic()
    return self.code is None

  def last_lines(self, count: int) -> list[str]:
    return []

  def tell(self, code: int, end: str) -> None:
    """Sends the result of this launcher; ignores later calls of the attempt."""
    if not self._is_told:
      self._is_told = True
      self.send([code, end])

  def send(self, message: Any) -> None:
    with contextlib.suppress(OSError):  # `receive` reports the error
      self._connection.sendall(json.dumps(message).encode() + b"\n")

  def receive(
    self, kind: type, timeout_s: float, signals: Sequence[int] = ()
  ) -> Any:
    """Returns the next message of type `kind`; skips other messages.

    Raises:
      ValueError: the connection is closed, or the message is not JSON.
      OSError: the host is out of reach, the timeout has passed, or this process
        has got one of the `signals`.
    """
    end = time.monotonic() + timeout_s
    while True:
      while b"\n" not in self._received:
        left = end - time.monotonic()
        if signals or left <= 0:
          raise TimeoutError("no message came")
        if not select.select([self], [], [], min(left, _RETRY_S))[0]:
          continue
        more = self._connection.recv(_MESSAGE_BYTES)
        if not more or len(self._received) > _MESSAGE_BYTES:
          raise ValueError("the connection is closed, or the message too long")
        self._received += more
      line, _, self._received = self._received.partition(b"\n")
      try:
        message = json.loads(line)
      except RecursionError as e:
        raise ValueError("the message is nested too deeply") from e
      if isinstance(message, kind):
        return message

  def fileno(self) -> int:
    return self._connection.fileno()

  def close(self) -> None:
    self._connection.close()


class Share(NamedTuple):
  """The ranks that a host runs in an attempt."""

  restart: int  # the number of restarts so far
  first: int  # the first rank of the host
  ranks: int
  total: int  # ranks of all hosts


class Losses(NamedTuple):
  """The ranks of a host before a restart."""

  places: int
  lost: int = 0  # ranks that may have caused the failure
  is_sure: bool = False  # whether they have


class Hosts:
  """The hosts of a job, as this host knows them.

  Host 0 talks to all other hosts, and each other host to host 0.

  Args:
    stack: closes the connections.
    host_id: index of this host.
    coordinator: an address of host 0 and a port, as host:port.
    common: arguments by name that must be equal on all hosts, with "num_hosts",
      "num_processes" and "min_processes".
    timeout_s: the limit for all hosts to connect.

  Raises:
    RuntimeError: on every connected host, if the hosts do not fit together or
      not all have connected.
    ValueError: the coordinator's address is invalid.
  """

  def __init__(
    self,
    stack: contextlib.ExitStack,
    host_id: int,
    coordinator: str,
    common: Mapping[str, int],
    timeout_s: float,
  ):
    self._stack, self._is_first = stack, host_id == 0
    self._common, self._timeout_s = common, min(timeout_s, _LONGEST_S)
    self._hosts: dict[int, Host] = {}  # by index
    if common["num_hosts"] == 1:
      return
    name, _, port = coordinator.rpartition(":")
    try:
      found = socket.getaddrinfo(
        name.strip("[]"), port, type=socket.SOCK_STREAM
      )
    except OSError as e:
      raise ValueError(
        f"ep.launch: coordinator = {coordinator!r} ({e.strerror}), but it must"
        " be host 0's address and a free port there, as in 10.0.0.1:1234."
      ) from e
    self._family: int = found[0][0]
    self._address: tuple[Any, ...] = found[0][-1][:2]
    self._at = "{}, port {}".format(*self._address)
    if self._is_first:
      self._accept_all()
    else:
      self._hosts[0] = self._connect(host_id)

  @property
  def peers(self) -> list[Host]:
    return list(self._hosts.values())

  def divide(
    self, restart: int, losses: Losses, signals: Sequence[int]
  ) -> Share:
    """Agrees with the other hosts on the ranks of an attempt.

    Args:
      restart: the number of restarts so far.
      losses: the losses of this host.
      signals: the signals of this process, which end the wait for other hosts.

    Raises:
      RuntimeError: host 0 has gone, or too few ranks are left.
    """
    for host in self.peers:
      host.begin()
    if not self._is_first:
      if restart:
        self._hosts[0].send(losses._asdict())
      try:
        wait_s = 2 * self._timeout_s
        return Share(**self._hosts[0].receive(dict, wait_s, signals))
      except (OSError, ValueError, TypeError) as e:
        raise RuntimeError("ep.launch: host 0 starts no further ranks.") from e
    told, before = {0: losses}, len(self._hosts)
    for index, host in [*self._hosts.items()]:
      try:
        theirs = losses._asdict()
        if restart:
          theirs = host.receive(dict, self._timeout_s, signals)
        told[index] = Losses(**theirs)
      except (OSError, ValueError, TypeError):
        self._hosts.pop(index).close()
    lefts = _left(told, is_host_lost=len(self._hosts) < before)
    needed, whole = self._common["min_processes"], self._common["num_processes"]
    if len(told) < self._common["num_hosts"]:
      is_enough = sum(lefts.values()) >= needed
      wait_s = _REPLACEMENT_S if is_enough else self._timeout_s
      for number, host, wrong in self._arrivals(wait_s, signals):
        host.send(wrong)
        if not wrong:
          self._hosts[number] = host
      lefts |= dict.fromkeys(self._hosts.keys() - lefts.keys(), whole)
    if sum(lefts.values()) < needed:
      lefts = dict.fromkeys(lefts, whole)
    total = sum(lefts.values())
    if total < needed:
      raise RuntimeError(
        f"ep.launch: {total} ranks are left, but min_processes = {needed}; no"
        f" other host came within {self._timeout_s:g} s."
      )
    first, shares = 0, {}
    for index, ranks in sorted(lefts.items()):
      shares[index] = Share(restart, first, ranks, total)
      first += ranks
    if len(lefts) == 1:
      return shares[0]
    for index, host in self._hosts.items():
      host.send(shares[index]._asdict())
    return shares[0]

  def _connect(self, host_id: int) -> Host:
    """Connects to host 0, and waits for its answer.

    While ranks run, JAX's coordination service has the port, and closes the
    connection. So this method tries again, and this host replaces another one.
    """
    end = time.monotonic() + self._timeout_s
    while True:
      left, host = max(end - time.monotonic(), 0.01), None
      try:
        connection = socket.create_connection(self._address, left)
        host = Host(f"host 0 ({self._address[0]})", connection)
        host.send({"host_id": host_id, **self._common})
        wrong = host.receive(str, left)
        break
      except (OSError, ValueError) as e:
        if host:
          host.close()
        if left < _RETRY_S:
          raise RuntimeError(
            f"ep.launch: the launcher of host 0 at {self._at} let this host"
            " wait, or has ended; see what it says, and start all hosts again."
            if host
            else f"ep.launch: host 0 did not come to {self._at}, within"
            f" {self._timeout_s:g} s ({getattr(e, 'strerror', '') or e}); start"
            " the same command there with --host_id=0, and open the port in its"
            " firewall."
          ) from e
      time.sleep(_RETRY_S)
    self._stack.enter_context(contextlib.closing(host))
    if wrong:
      raise RuntimeError(f"ep.launch: {wrong}")
    return host

  def _accept_all(self) -> None:
    """Waits until all other hosts have connected to host 0."""
    wrong = ""
    for number, host, wrong in self._arrivals(self._timeout_s):
      if wrong:
        host.send(wrong)
        break
      self._hosts[number] = host
    late = {*range(1, self._common["num_hosts"])} - self._hosts.keys()
    if late and not wrong:
      wrong = (
        f"of {self._common['num_hosts']} hosts these did not come to host 0 at"
        f" {self._at}, within {self._timeout_s:g} s:"
        f" {', '.join(map(str, sorted(late)))}; start the same command there,"
        " each with its own --host_id."
      )
    for host in self.peers:
      host.send(wrong)
    if wrong:
      raise RuntimeError(f"ep.launch: {wrong}")

  def _arrivals(
    self, timeout_s: float, signals: Sequence[int] = ()
  ) -> Iterator[tuple[int, Host, str]]:
    """Yields each host that connects: its index, and an error if it differs.

    Ends when no host is missing, after the timeout, or after a signal.
    """
    end = time.monotonic() + timeout_s
    try:
      server = socket.create_server(self._address, family=self._family)
    except OSError as e:
      raise RuntimeError(
        f"ep.launch: host 0 cannot listen at {self._at} ({e.strerror}); the"
        " coordinator is an address of the host whose --host_id is 0, with a"
        " free port."
      ) from e
    strangers: list[Host] = []
    try:
      while len(self._hosts) < self._common["num_hosts"] - 1 and not signals:
        if (left := end - time.monotonic()) <= 0:
          return
        sources: list[Any] = [server, *strangers]
        ready = select.select(sources, [], [], min(left, _RETRY_S))[0]
        if server in ready:
          connection, (ip, *_) = server.accept()
          strangers.append(Host(ip, connection))
          if len(strangers) > _STRANGERS:
            strangers.pop(0).close()
        for host in [host for host in strangers if host in ready]:
          strangers.remove(host)
          try:
            theirs = host.receive(dict, _MESSAGE_S)
            number = theirs.pop("host_id")
            if number not in range(1, self._common["num_hosts"]):
              raise ValueError("there is no such host")
          except (OSError, ValueError, KeyError):
            host.close()  # the sender is no launcher
            continue
          self._stack.enter_context(contextlib.closing(host))
          host.name = f"host {number} ({host.name})"
          yield number, host, self._difference(number, host, theirs)
    finally:
      server.close()
      for host in strangers:
        host.close()

  def _difference(
    self, number: int, host: Host, theirs: Mapping[str, Any]
  ) -> str:
    """Describes the first argument in which a host differs from host 0."""
    if number in self._hosts:
      return (
        f"{self._hosts[number].name} and {host.name} were both started with"
        f" --host_id={number}; each host needs another number."
      )
    for name, value in self._common.items():
      if theirs.get(name) != value:
        return (
          f"host {number} was started with --{name}={theirs.get(name)!r}, but"
          f" host 0 with --{name}={value}; run the same command on every host,"
          " with another --host_id."
        )
    return ""


def _left(told: Mapping[int, Losses], is_host_lost: bool) -> dict[int, int]:
  """Returns the ranks that each host has left.

  After a sure loss of a rank or host, other ranks only reported it. Suspects on
  several hosts may all report another rank.
  """
  is_sure = is_host_lost or any(each.is_sure for each in told.values())
  is_known = is_sure or sum(each.lost > 0 for each in told.values()) > 1
  return {
    index: each.places - each.lost * (each.is_sure or not is_known)
    for index, each in told.items()
  }
