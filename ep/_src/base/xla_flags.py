# SPDX-License-Identifier: Apache-2.0
"""Reads the variable XLA_FLAGS as XLA does."""

from __future__ import annotations

import os
import pathlib
import shlex


def read() -> dict[str, str]:
  """Returns the last occurrence of each flag, by name: {"--a": "--a=1"}.

  XLA_FLAGS has flags, or the path of a file of flags.
  """
  text = os.environ.get("XLA_FLAGS", "").strip()
  if text and not text.startswith("-"):
    text = pathlib.Path(text).read_text()
  return {flag.partition("=")[0]: flag for flag in shlex.split(text)}
