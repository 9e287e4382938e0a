# SPDX-License-Identifier: Apache-2.0
"""Finds dead processes of the job on this host.

JAX takes minutes to notice a death, and a socket notices a death only if it was
connected before. So each process publishes its operating-system process id in
JAX's key-value store.
"""

from __future__ import annotations

from collections.abc import Collection
import contextlib
import json
import os
import pathlib
from typing import Any

import jax

from ep._src.base import compat, processes


def announce() -> None:
  """Publishes this process's id if `jax.distributed` is active. Idempotent."""
  if client := compat.distributed_client():
    processes.tell("joined")
    key = _key(compat.distributed_process())
    pid, namespace = os.getpid(), processes.namespace()
    identity = dict(namespace=namespace, pid=pid, start=_stat(pid)[1])
    text = json.dumps(identity if namespace else {})
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


def _key(process: int | str) -> str:
  return f"ep/process/{process}"


def _state(published: str) -> str:
  """Returns the known state of a process: "dead", "stopped" or ""."""
  theirs = json.loads(published)
  if not theirs or theirs["namespace"] != processes.namespace():
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
