# SPDX-License-Identifier: Apache-2.0
"""Finds processes of the job that have left.

JAX takes minutes to notice a death, and a socket notices a death only if it was
connected before. So each process publishes its operating-system process id in
JAX's key-value store, for the processes on the same host. If a process can, it
also publishes that it leaves, for the processes on all hosts.
"""

from __future__ import annotations

from collections.abc import Collection
import contextlib
import json
import os
import pathlib
import re
import time
from typing import Any

import jax

from ep._src.base import compat
from ep._src.native import processes

_VISIBLE_S = 2.0  # time after which other processes know of a death
_MAX_NAMES = 8  # of processes in a message

# XLA's CPU collectives name their library and, if a process has not joined, the
# ids of all devices and the index of the missing device.
_LIBRARY = "Gloo"
_AWAITED = re.compile(r"timed out with key: cpu:gloo/([\d,]+)/(\d+)")


def announce(left: str = "") -> None:
  """Publishes this process's id if `jax.distributed` is active. Idempotent.

  Args:
    left: how the process leaves, such as "has exited"; "" if it does not leave.
  """
  if client := compat.distributed_client():
    processes.tell("joined")
    key = _key(compat.distributed_process())
    pid, namespace = os.getpid(), processes.namespace()
    identity = dict(namespace=namespace, pid=pid, start=_stat(pid)[1])
    text = json.dumps(dict(left=left) | (identity if namespace else {}))
    client.key_value_set(key, text, allow_overwrite=True)


def dead(client: Any, members: Collection[int]) -> list[int]:
  """Returns the `members` that are known to have died. Sends one request."""
  if len(members) == 1:
    (process,) = members
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # no published id
      found = client.key_value_try_get(_key(process))
      return [process] if _state(found) == "dead" else []
    return []
  found = states(client)
  return [p for p in members if found.get(p) == "dead"]


def states(client: Any) -> dict[int, str]:
  """Returns the state of each process: "dead", "stopped" or ""."""
  found = client.key_value_dir_get(_key(""))
  return {int(key.rpartition("/")[2]): _state(text) for key, text in found}


def left(client: Any) -> dict[int, str]:
  """Returns the processes that are known to have left, and how they left."""
  found = client.key_value_dir_get(_key(""))
  return {
    int(key.rpartition("/")[2]): json.loads(text).get("left") or "has died"
    for key, text in found
    if _state(text) == "dead"
  }


def blame(error: str) -> str:
  """Returns a sentence about the missing processes of an error, or "".

  XLA's CPU collectives fail if a process is missing. Their errors do not name
  the process. An error of a process that failed for this reason has the name of
  their library, so the process is not blamed if another one has left.
  """
  client = compat.distributed_client()
  if _LIBRARY not in error or client is None:
    return ""
  what = "ep: XLA's error names no process,"
  awaited = _AWAITED.search(error)
  until = time.monotonic() + (0 if awaited else _VISIBLE_S)
  try:
    while True:
      found = left(client)
      found.pop(compat.distributed_process(), None)
      first = {p: how for p, how in found.items() if _LIBRARY not in how}
      if first or time.monotonic() > until:
        break
      time.sleep(0.05)
  except jax.errors.JaxRuntimeError:
    return (
      f"{what} and the coordination service of jax.distributed, by default in"
      " process 0, does not answer; read its log."
    )
  found = first or found
  if awaited:
    device = int(awaited[1].split(",")[int(awaited[2])])
    places = {d.id: d.process_index for d in jax.devices("cpu")}
    found.setdefault(places[device], "has not run this program")
  if not found:
    return f"{what} and none is known to have left; read the logs of all."
  names = [f"process {p} {how}" for p, how in sorted(found.items())]
  more = [f"{len(names) - _MAX_NAMES} more"] * (len(names) > _MAX_NAMES)
  logs = "its log" if len(names) == 1 else "their logs"
  return f"{what} but {', '.join(names[:_MAX_NAMES] + more)}; read {logs}."


def _key(process: int | str) -> str:
  return f"ep/process/{process}"


def _state(published: str) -> str:
  """Returns the known state of a process: "dead", "stopped" or ""."""
  theirs = json.loads(published)
  if theirs.get("left"):
    return "dead"
  if "pid" not in theirs or theirs["namespace"] != processes.namespace():
    return ""
  state, start = _stat(theirs["pid"])
  if start != theirs["start"]:
    return "dead"
  return "stopped" if state in "Tt" else ""


def _stat(pid: int) -> tuple[str, int | None]:
  """Returns a process's state and start time, in clock ticks.

  The system reuses process ids, so an id and a start identify a process. The
  start is None if the process terminated.
  """
  try:
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
  except OSError:
    return "X", None
  # The fields 3, 4... of /proc/<pid>/stat; see proc(5).
  state, *fields = stat.rpartition(")")[2].split()
  return state, None if state in "ZX" else int(fields[18])
