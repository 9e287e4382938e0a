# SPDX-License-Identifier: Apache-2.0
"""Tells for which processes a process id of the system has a meaning."""

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
def namespace() -> str | None:
  """Returns what identifies the namespace of process ids, or None."""
  try:
    return f"{boot_id()}/{os.readlink('/proc/self/ns/pid')}"
  except OSError:
    return None
