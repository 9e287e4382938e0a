# SPDX-License-Identifier: Apache-2.0
"""Moves snapshots between ranks of different hosts, over TCP.

Each rank has a server. A connection carries a line with the token of the job,
one request, a line of JSON, and one answer, a line of JSON with an error or "":

    {"put": rank, "step": s, "index": i, "sizes": [...]}, bytes   ->  ""
    {"get": [restart, rank], "position": p, "size": n}   ->  "", bytes

The ranks find the token and the addresses in the job's key-value store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import contextlib
import hmac
import json
import socket
import socketserver
import threading
from typing import Any

from ep._tools.snapshots import memory

_TIMEOUT_S = 60.0  # without a byte
_LINE = 1 << 26  # limit of a line
_READ = 1 << 28  # bytes of a request, at most


class Server(socketserver.ThreadingTCPServer):
  """Serves the files that a rank has inherited, until the process ends."""

  daemon_threads = True

  def __init__(self, host: str, token: str, files: memory.Inherited):
    self.address_family = socket.getaddrinfo(host, 0)[0][0]
    super().__init__((host, 0), _Handler)
    self.token, self.files = token, files
    self.address = (host, self.server_address[1])
    threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(socketserver.StreamRequestHandler):
  """Answers a request; drops connections without the token."""

  timeout = _TIMEOUT_S
  server: Server

  def handle(self) -> None:
    token = self.server.token.encode() + b"\n"
    with contextlib.suppress(OSError):
      if hmac.compare_digest(self.rfile.readline(len(token)), token):
        self._answer()

  def _answer(self) -> None:
    try:
      request = json.loads(self.rfile.readline(_LINE))
      answer = (
        self._put(**request) if "put" in request else self._get(**request)
      )
      self.wfile.write(json.dumps("").encode() + b"\n")
      self.wfile.write(answer)
    except (OSError, ValueError, KeyError, TypeError) as error:
      self.wfile.write(json.dumps(str(error) or repr(error)).encode() + b"\n")

  def _put(
    self, put: int, step: int, index: Any, sizes: Sequence[int]
  ) -> bytearray:
    parts = [memoryview(_receive(self.rfile, size)) for size in sizes]
    self.server.files.copies[put].write(step, index, parts)
    return bytearray()

  def _get(self, get: tuple[int, int], position: int, size: int) -> bytearray:
    restart, rank = get
    if not 0 <= size <= _READ or position < 0:
      raise ValueError(f"no {size} bytes can be read at {position}")
    return self.server.files.old[restart][rank].read(position, size)


class Peer:
  """The server of another rank."""

  def __init__(self, address: tuple[str, int], token: str):
    self._address, self._token = (address[0], address[1]), token

  def put(
    self, rank: int, step: int, index: Any, arrays: Sequence[memoryview]
  ) -> None:
    """Writes a generation of `rank` into the memory of the peer's host."""
    sizes = [array.nbytes for array in arrays]
    request = dict(put=rank, step=step, index=index, sizes=sizes)
    self._ask(request, arrays, 0)

  def file(self, restart: int, rank: int) -> memory.File:
    """Returns a file of the peer's host, for reading only."""
    return _Remote(self, restart, rank)

  def _ask(
    self, request: Mapping[str, Any], parts: Sequence[memoryview], size: int
  ) -> bytearray:
    with socket.create_connection(self._address, _TIMEOUT_S) as connection:
      lines = f"{self._token}\n{json.dumps(request)}\n"
      connection.sendall(lines.encode())
      for part in parts:
        connection.sendall(part)
      with connection.makefile("rb") as file:
        if error := json.loads(file.readline(_LINE)):
          raise OSError(f"the rank at {self._address[0]} says: {error}")
        return _receive(file, size)


class _Remote(memory.File):
  """A file of another host."""

  def __init__(self, peer: Peer, restart: int, rank: int):
    self._peer, self._key = peer, (restart, rank)

  def read(self, position: int, size: int) -> bytearray:
    data = bytearray()
    for at in range(0, size, _READ):
      count = min(_READ, size - at)
      request = dict(get=self._key, position=position + at, size=count)
      data += self._peer._ask(request, (), count)
    return data


def _receive(file: Any, size: int) -> bytearray:
  data = bytearray(size)
  view = memoryview(data)
  done = 0
  while done < size:
    if not (count := file.readinto(view[done:])):
      raise OSError("the connection was closed too early")
    done += count
  return data
