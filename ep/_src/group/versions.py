# SPDX-License-Identifier: Apache-2.0
"""Versions and compiler options, which must be equal on all processes."""

from __future__ import annotations

from collections.abc import Iterable
import functools
import hashlib
import os
import pathlib
import shlex

import jax
import jaxlib

from ep._src.base import compat
from ep._src.native import ffi

# These flags of XLA do not change the compiled program.
_HARMLESS_FLAGS = ("--xla_force_host_platform_device_count", "--xla_dump_")


@functools.cache
def versions(backend: str) -> dict[str, str]:
  """Returns the versions of the software of a backend, by name.

  The versions of ep's files are digests.
  """
  package = sorted(pathlib.Path(__file__).parents[2].rglob("*.py"))
  found = {
    "the version of jax": jax.__version__,
    "the version of jaxlib": jaxlib.__version__,
    "the digest of the ep package": _digest(package),
  }
  if backend in ffi.PLATFORMS:
    library = ffi.find_library(backend)
    found[f"the digest of {library.name}"] = _digest([library])
  return found


def compiler_settings() -> dict[str, str]:
  """Returns the options of XLA for all programs, by name.

  XLA may copy an op (if a jitted function is called twice) and chooses the
  order of the copies. The engine matches copies of ranks by this order.
  """
  return {"XLA_FLAGS": _xla_flags(), **compat.compiler_options()}


def _xla_flags() -> str:
  text = os.environ.get("XLA_FLAGS", "").strip()
  if text and not text.startswith("-"):  # the name of a file of flags
    text = pathlib.Path(text).read_text()
  flags = shlex.split(text)
  last = {flag.partition("=")[0]: flag for flag in flags}
  names = [n for n in sorted(last) if not n.startswith(_HARMLESS_FLAGS)]
  return " ".join(last[name] for name in names) or "(none)"


def _digest(files: Iterable[pathlib.Path]) -> str:
  digest = hashlib.sha256()
  for file in files:
    digest.update(file.read_bytes())
  return digest.hexdigest()[:16]
