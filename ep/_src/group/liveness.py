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
    identity = dict(namespace=namespace, pid=pid, start=_start(pid))
    text = json.dumps(identity if namespace else {})
    client.key_value_set(key, text, allow_overwrite=True)


def dead(client: Any, members: Collection[int]) -> list[int]:
  """Returns the `members` that are known to have died. Sends one request."""
  if len(members) == 1:
    (process,) = members
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # no published id
      found = client.key_value_try_get(_key(process))
      return [] if _lives(found) else [process]
    return []
  found = client.key_value_dir_get(_key(""))
  published = {int(key.rpartition("/")[2]): text for key, text in found}
  return [p for p in members if p in published and not _lives(published[p])]


def _key(process: int | str) -> str:
  return f"ep/process/{process}"


def _lives(published: str) -> bool:
  """Returns False if the process with this identity is known to be dead."""
  theirs = json.loads(published)
  is_near = theirs.get("namespace") == processes.namespace() and theirs
  return not is_near or _start(theirs["pid"]) == theirs["start"]


def _start(pid: int) -> int | None:
  """Returns a process's start time, in clock ticks; None if it terminated.

  The system reuses process ids, so an id and a start identify a process.
  """
  try:
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
  except OSError:
    return None
  # The fields 3, 4... of /proc/<pid>/stat; see proc(5).
  state, *fields = stat.rpartition(")")[2].split()
  return None if state in "ZX" else int(fields[18])
