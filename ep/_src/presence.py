# SPDX-License-Identifier: Apache-2.0
"""Which processes of the job have died, as far as this host can tell.

JAX takes minutes to notice, and a socket must be there first. So each process
tells the others, in JAX's key-value store, who it is to the system.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
from typing import Any

import jax

from ep._src import compat


def announce() -> None:
  """Makes this process known; again, if it is already."""
  if client := compat.distributed_client():
    key = _key(compat.distributed_process())
    client.key_value_set(key, json.dumps(_me()), allow_overwrite=True)


def pid(process: int) -> int:
  """The system's id of a process; 0 if it is unknown, or not seen from here."""
  return _seen(process).get("pid", 0)


def died(process: int) -> bool:
  """Whether a process is known to have died."""
  seen = _seen(process)
  return bool(seen) and _start(seen["pid"]) != seen["start"]


def _key(process: int) -> str:
  return f"ep/process/{process}"


def boot_id() -> str:
  """Identifies this boot of this machine. Raises OSError outside of Linux."""
  return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@functools.cache
def _sees() -> str | None:
  """Equal on processes that know each other by the same ids; None: unknown."""
  try:
    return f"{boot_id()}/{os.readlink('/proc/self/ns/pid')}"
  except OSError:
    return None


def _me() -> dict[str, Any]:
  if _sees() is None:
    return {}
  return dict(sees=_sees(), pid=os.getpid(), start=_start(os.getpid()))


def _seen(process: int) -> dict[str, Any]:
  """What a process has told; empty if nothing, or if not seen from here."""
  client = compat.distributed_client()
  try:
    theirs = json.loads(client.key_value_try_get(_key(process)))
  except (AttributeError, jax.errors.JaxRuntimeError):  # no client; no key
    return {}
  return theirs if theirs and theirs["sees"] == _sees() else {}


def _start(pid: int) -> int | None:
  """When a process started, since ids are used again; None if it has ended."""
  try:
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
  except OSError:
    return None
  state, *fields = stat.rpartition(")")[2].split()  # from the third on
  return None if state in "ZX" else int(fields[18])
