# SPDX-License-Identifier: Apache-2.0
"""Tells which processes share a kernel's namespace."""

from __future__ import annotations

import functools
import os
import pathlib


@functools.cache
def boot_id() -> str:
  """Returns the id of this boot of the machine. Only Linux has one.

  Raises:
    OSError: this is another system.
  """
  return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@functools.cache
def namespace(kind: str = "pid") -> str | None:
  """Returns what identifies a namespace of this process, or None.

  Within one of the kind "pid", a process id has a meaning.
  """
  try:
    return f"{boot_id()}/{os.readlink(f'/proc/self/ns/{kind}')}"
  except OSError:
    return None
