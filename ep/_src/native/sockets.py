# SPDX-License-Identifier: Apache-2.0
"""Connects the processes of a group on one host: every pair gets a socket.

Each process listens at a random abstract address before it publishes the
address. So no process can take the address first, and the address vanishes with
the socket. A process connects to the processes before it, and accepts the
processes after it when all have connected.

The peer must be a process of this user in this network namespace, and the
expected process if process ids are known. Both sides ask the kernel who is at
the other end (SO_PEERCRED) before they send or read a byte. A secret would add
nothing: the key-value store that distributes the addresses would distribute the
secret, and the store asks for no credentials. Root and this user, who could
trace the process anyway, are trusted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import errno
import os
import queue
import secrets
import socket
import struct
import threading
import time
from typing import Self

_HELLO = struct.Struct("i")  # the sender's number in the group
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid; see unix(7)
_RETRY_S = 0.01
_ACCEPT_S = 5.0  # limit for a process that has connected


class Listener:
  """Listens at a random abstract address until the `with` block ends.

  A thread accepts connections and closes the connections of other users, who
  could otherwise fill the queue in the kernel.
  """

  def __init__(self) -> None:
    """Raises `RuntimeError` if the process may open no more files."""
    with _errors_name("cannot listen for other processes"):
      self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
      self._socket.bind(f"\0ep_ffi-{secrets.token_hex(16)}")
      self._socket.listen(socket.SOMAXCONN)
    self._accepted: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
    self._thread = threading.Thread(target=self._accept, daemon=True)
    self._thread.start()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *error: object) -> None:
    self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
    self._thread.join()
    self._socket.close()
    while not self._accepted.empty():
      self._accepted.get().close()

  @property
  def address(self) -> str:
    """The abstract address, without the zero byte."""
    return str(self._socket.getsockname()[1:].decode())

  def accept(self, pids: Mapping[int, int]) -> dict[int, socket.socket]:
    """Returns the sockets of processes that have connected, by their numbers.

    `pids` gives the ids of the processes by their numbers in the group, or 0
    for an unknown id.

    Raises:
      RuntimeError: one of them has not connected.
    """
    found: dict[int, socket.socket] = {}
    deadline = time.monotonic() + _ACCEPT_S
    while len(found) < len(pids):
      try:
        peer = self._accepted.get(timeout=max(0, deadline - time.monotonic()))
      except queue.Empty:
        for peer in found.values():
          peer.close()
        missing = ", ".join(map(str, pids.keys() - found.keys()))
        raise RuntimeError(
          f"ep_bootstrap: the processes {missing} of the group did not connect;"
          " too many files may be open: raise the limit (ulimit -n)."
        ) from None
      number = _number(peer, pids)
      if number is None or number in found:
        peer.close()
      else:
        found[number] = peer
    return found

  def _accept(self) -> None:
    while True:
      try:
        peer, _ = self._socket.accept()
      except ConnectionAbortedError:
        continue
      except OSError:  # the `with` block has ended, or too many files are open
        return
      if _is_process(peer, pid=0):
        self._accepted.put(peer)
      else:
        peer.close()


def connect(
  address: str, pid: int, me: int, *, name: str, timeout_s: float
) -> socket.socket:
  """Connects to the process that listens at an abstract address.

  Args:
    address: the address, without the zero byte.
    pid: the id of the process, or 0 if unknown.
    me: the number of this process in the group.
    name: the name of the process in errors.
    timeout_s: seconds until a process whose queue of connections is full must
      have accepted some.

  Raises:
    RuntimeError: the process does not listen, or another one does.
  """
  deadline = time.monotonic() + timeout_s
  with _errors_name(f"cannot connect to {name}"):
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
      peer.setblocking(False)
      while code := peer.connect_ex(f"\0{address}"):
        is_full = code == errno.EAGAIN  # the queue of the other end
        if not is_full or time.monotonic() > deadline:
          raise OSError(code, os.strerror(code))
        time.sleep(_RETRY_S)
      if not _is_process(peer, pid):
        raise OSError(errno.EPERM, "another process listens at its address")
      peer.send(_HELLO.pack(me))
    except OSError:
      peer.close()
      raise
  return peer


def _number(peer: socket.socket, pids: Mapping[int, int]) -> int | None:
  """Returns the number that an expected process has sent, or None."""
  try:
    hello = peer.recv(_HELLO.size, socket.MSG_DONTWAIT)
    (number,) = _HELLO.unpack(hello)
  except (OSError, struct.error):  # it sent nothing, or something else
    return None
  is_expected = number in pids and _is_process(peer, pids[number])
  return number if is_expected else None


def _is_process(peer: socket.socket, pid: int) -> bool:
  """Returns whether the peer is this user's process `pid`, or any if 0."""
  credentials = peer.getsockopt(
    socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
  )
  its_pid, uid, _ = _CREDENTIALS.unpack(credentials)
  return uid == os.geteuid() and pid in (0, its_pid)


@contextlib.contextmanager
def _errors_name(what: str) -> Iterator[None]:
  try:
    yield
  except OSError as e:
    raise RuntimeError(
      f"ep_bootstrap: {what}: {e.strerror}; see what the other processes say."
      " If there are too many open files, raise the limit (ulimit -n)."
    ) from e
